"""One rank of the demo: it holds experts, moves them for a skewed load, and checks every byte afterwards."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from eplb_core.bench.load import zipf_load
from eplb_core.bench.tensors import Verification, allocate, fill, verify
from eplb_core.bench.workload import IntArray, Workload, WorkloadOptions, build_workload
from eplb_core.errors import BenchError
from eplb_core.launch.rank import Rank

if TYPE_CHECKING:
    from eplb_core import Communicator, RearrangeReport

Emit = Callable[[str, Mapping[str, Any]], None]
"""``emit(kind, data)``: how a rank reports; `data` must go into JSON."""

_SHOWN_ROWS = 5


@dataclass(frozen=True)
class DemoJob:
    """The job that the user asked for; equal on all ranks.

    Parameters
    ----------
    workload : WorkloadOptions
        The experts that are moved.
    backend : str or None
        Name of the backend; None for the automatic choice.
    rounds : int
        Number of rearrangements, each for another load.
    timeout_s : float
        Limit of every wait, seconds.
    """

    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    backend: str | None = None
    rounds: int = 1
    timeout_s: float = 60.0


def run_launched(rank: Rank, job: DemoJob) -> None:
    """Run one rank on the store of its launch; its notes are (kind, data)."""
    dist: Any = import_module("torch.distributed")
    limit = timedelta(seconds=job.timeout_s)
    store = rank.store("demo_group")
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size, timeout=limit)
    run_rank(job, dist.group.WORLD, None, lambda kind, data: rank.tell((kind, dict(data))))
    dist.destroy_process_group()


def run_in_environment(job: DemoJob, emit: Emit) -> None:
    """Run the rank that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, as torchrun sets them."""
    dist: Any = import_module("torch.distributed")
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
    run_rank(job, dist.group.WORLD, _own_address(os.environ["MASTER_ADDR"]), emit)
    dist.destroy_process_group()


def run_rank(job: DemoJob, group: Any, host: str | None, emit: Emit) -> None:
    """Do one rank's part, through the public API alone.

    Parameters
    ----------
    job : DemoJob
        The same on every rank.
    group : torch.distributed.ProcessGroup
        All ranks; it must move CPU tensors.
    host : str or None
        Address at which the other ranks reach this one; None is loopback.
    emit : callable
        Rank 0 reports "workload", "choice", "progress" and "round"; every rank reports "wrong" rows.

    Raises
    ------
    EplbError
        What the rearrangement raised, or EPLB-B006 when rows of this rank do not hold what they should.
    """
    import torch

    import eplb_core as eplb

    dist: Any = import_module("torch.distributed")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))

    def report(kind: str, **data: Any) -> None:
        if rank == 0:
            emit(kind, data)

    workload = build_workload(job.workload, world_size)
    report("workload", **workload.describe())
    config = eplb.EPLBConfig(
        communicator=job.backend,
        use_async=False,
        num_redundant_experts=workload.num_redundant_experts,
        timeout_s=job.timeout_s,
    )
    choice = eplb.select(config, device_type="cpu", catalog=eplb.discover())
    rejected = {} if job.backend else {name: why for name, why in choice.reasons.items() if name != choice.name}
    report("choice", name=choice.name, why=choice.reasons[choice.name], rejected=rejected)

    placement = workload.initial_map()
    num_local = workload.num_local_physical_experts
    mine = slice(rank * num_local, (rank + 1) * num_local)
    weights = allocate(workload.source.specs, num_local)
    fill(workload.source, weights, placement[:, mine], _progress(report, "load", 0, workload.num_layers))

    control = eplb.ControlPlane.from_process_group(group, host=host)
    found = Verification(0, 0, ())
    names = [[spec.name for spec in layer] for layer in workload.source.specs]
    # For a backend that moves rows over the host's group: a separate one, for it may close it.
    device_group = dist.new_group(dist.get_process_group_ranks(group), timedelta(seconds=job.timeout_s), "gloo")
    with eplb.Communicator(config, weights, control, device_group, tensor_names=names, name="demo") as comm:
        comm.connect(job.timeout_s)
        for number in range(1, job.rounds + 1):
            load, wanted = _next_placement(job, workload, number)
            dist.barrier(group)
            moved, seconds = _rearrange(comm, placement, wanted, report, number)
            before, placement = placement, moved.physical_to_logical_map
            checking = _progress(report, "verify", number, workload.num_layers)
            found = verify(workload.source, weights, placement[:, mine], checking)
            for row in found.wrong[:_SHOWN_ROWS]:
                emit("wrong", {"round": number, "row": str(row)})
            sums = _sum(
                group,
                nbytes_moved=moved.nbytes_received,
                nbytes_local=moved.nbytes_local,
                rows_checked=found.num_rows,
                nbytes_checked=found.nbytes,
                rows_wrong=len(found.wrong),
            )
            report(
                "round",
                round=number,
                **_balancedness(load, before, placement, world_size),
                layers_committed=list(moved.committed_layers),
                seconds=_slowest(group, seconds),
                **sums,
            )
            if sums["rows_wrong"]:  # the same on every rank, so that all leave together
                break
    if found.wrong:
        raise BenchError("EPLB-B006", len(found.wrong), found.num_rows, rank, detail=f"First: {found.wrong[0]}.")


def _next_placement(job: DemoJob, workload: Workload, number: int) -> tuple[IntArray, IntArray]:
    """Return the load of a round and the default policy's placement for it, equal on all ranks."""
    from eplb_core.balancing import rebalance_experts

    load = zipf_load(
        workload.num_layers, workload.source.num_experts, workload.top_k, seed=job.workload.seed, round_number=number
    )
    return load, rebalance_experts(load, workload.num_physical_experts, num_ranks=workload.world_size)


def _rearrange(
    comm: Communicator, old: IntArray, new: IntArray, report: Callable[..., None], number: int
) -> tuple[RearrangeReport, float]:
    """Move the layers one by one; return the rearrangement's report and this rank's seconds."""
    started = time.perf_counter()
    generation = comm.begin(old, new)
    moving = _progress(report, "move", number, len(generation.layers))
    for done, layer in enumerate(generation.layers, 1):
        generation.stage(layer)
        generation.commit(layer)
        moving(done)
    generation.end()
    return comm.report, time.perf_counter() - started


def _balancedness(load: IntArray, before: IntArray, after: IntArray, world_size: int) -> dict[str, float]:
    from eplb_core.balancing import balancedness

    return {
        f"balancedness_{when}": float(balancedness(load, placement, world_size).mean())
        for when, placement in (("before", before), ("after", after))
    }


def _progress(report: Callable[..., None], phase: str, number: int, total: int) -> Callable[[int], None]:
    def done(count: int) -> None:
        report("progress", phase=phase, round=number, done=count, total=total)

    return done


def _sum(group: Any, **counts: int) -> dict[str, int]:
    """Add each count up over all ranks."""
    import torch

    totals = torch.tensor(list(counts.values()), dtype=torch.int64)
    import_module("torch.distributed").all_reduce(totals, group=group)
    return dict(zip(counts, totals.tolist(), strict=True))


def _slowest(group: Any, seconds: float) -> float:
    import torch

    dist: Any = import_module("torch.distributed")
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _own_address(master: str) -> str | None:
    """Return the address from which this host reaches another; None when that is this host itself."""
    family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: the kernel looks the route up
        own = str(probe.getsockname()[0])
    return None if own.startswith("127.") or own == "::1" else own
