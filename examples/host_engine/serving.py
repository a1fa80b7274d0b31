"""The serving loop: forward steps, each ended by the load balancer, each compared with the reference."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

import eplb_core as eplb
from engine import Engine


@dataclass
class Run:
    """What one rank noted of some forward steps in a row.

    Parameters
    ----------
    step_s : list of float
        How long each forward step took, the load balancer's part of it included, the comparison not.
    record_s, held_s : list of float
        How long the load balancer held the engine's thread in it: the calls of `record`, and `step`.
    moving : list of bool
        Was a rearrangement under way in it?
    committed : dict
        Forward step to the layers whose experts changed places at its end.
    nbytes_moved : int
        By them, on all ranks.
    tokens : int
        That this rank served.
    load : ndarray, int64, [steps, num_moe_layers, world_size]
        Tokens of this rank for the experts of each rank.
    """

    step_s: list[float] = field(default_factory=list)
    record_s: list[float] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)
    moving: list[bool] = field(default_factory=list)
    committed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    nbytes_moved: int = 0
    tokens: int = 0
    load: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0, 0), np.int64))


def serve(engine: Engine, steps: int, balancer: eplb.LoadBalancer | None) -> Run:
    """Serve the traffic from its start on, with a load balancer or with the experts where they are.

    Raises
    ------
    RuntimeError
        A bit of the logits is not as in the reference, or a byte of an expert not as in the checkpoint.
    EplbError
        A rearrangement failed.
    """
    run = Run()
    load = []
    nbytes_moved = engine.nbytes_moved
    for step in range(steps):
        work = engine.traffic.at(step)
        began = time.perf_counter()
        logits = engine.forward(work)
        forwarded = time.perf_counter()
        if balancer is not None:
            for layer, experts in enumerate(engine.experts):
                balancer.record(layer, experts.counts)
            recorded = time.perf_counter()
            committed = balancer.step(is_dummy=work is None)
        ended = time.perf_counter()

        run.step_s.append(ended - began)
        if balancer is not None:
            run.record_s.append(recorded - forwarded)
            run.held_s.append(ended - recorded)
            run.moving.append(bool(committed) or (balancer.config.use_async and balancer.status.phase != "idle"))
            if committed:
                run.committed[step] = committed
        if work is not None and logits is not None:
            engine.reference.check(logits, work.topic, work.position)
            run.tokens += work.tokens
        load.append(torch.stack([experts.load_of_ranks() for experts in engine.experts]))
    run.load = torch.stack(load).numpy()
    run.nbytes_moved = engine.nbytes_moved - nbytes_moved
    engine.check_weights()
    return run


def gathered(run: Run, group: dist.ProcessGroup | None) -> list[Run]:
    """Return the runs of all ranks; they must have switched the same layers at the same steps."""
    runs: list[Run] = [run] * dist.get_world_size(group)
    dist.all_gather_object(runs, run, group)
    for rank, other in enumerate(runs):
        if other.committed != runs[0].committed:
            raise RuntimeError(f"rank 0 committed {runs[0].committed}, rank {rank} {other.committed}")
    return runs
