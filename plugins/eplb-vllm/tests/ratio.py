"""vLLM's own time over ours, turn by turn in one set of processes: ``python plugins/eplb-vllm/tests/ratio.py``.

Both sides run vLLM's functions, with the plugin's patches in place, on the same weights and maps: "sync" is
``rearrange_expert_weights_inplace``; "async" is what vLLM's worker and main thread do for a cycle, layer by layer,
without the forward steps between. A side's communicator is there in its own turn only: an idle agent of vLLM's NIXL
communicator has a thread that polls, which on a few cores takes half of the other side's time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import on_cpu

EXPERTS, TENSORS = 16, 3


@dataclass(frozen=True)
class Case:
    """What is moved."""

    backend: str
    world: int
    nbytes: int
    landing: str = "vllm"

    @property
    def layers(self) -> int:
        return 16 if self.nbytes < 1 << 20 else 6


def measure(rank: int, case: Case, port: int, rounds: int) -> dict[str, list[float]]:
    """Take turns on one rank; return the ratio of every pair of turns."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from vllm.config import set_current_vllm_config
    from vllm.distributed.eplb import async_worker, eplb_state, rebalance_execute
    from vllm.distributed.eplb.eplb_communicator import create_eplb_communicator
    from vllm.distributed.parallel_state import get_eplb_group

    import engine as engines

    rng = np.random.default_rng(0)
    slots = case.world * EXPERTS
    old, new = (torch.from_numpy(np.stack([rng.permutation(slots) for _ in range(case.layers)])) for _ in range(2))
    weights = [
        [torch.zeros(EXPERTS, case.nbytes, dtype=torch.uint8) for _ in range(TENSORS)] for _ in range(case.layers)
    ]
    buffer = [torch.zeros_like(weight) for weight in weights[0]]

    def value(layer: int, tensor: int, expert: int) -> int:
        return (expert * 7 + layer * 3 + tensor + 1) % 251

    def fill() -> None:
        for layer, tensors in enumerate(weights):
            for tensor, weight in enumerate(tensors):
                for row in range(EXPERTS):
                    weight[row] = value(layer, tensor, int(old[layer, rank * EXPERTS + row]))

    def wrong() -> int:
        return sum(
            not bool((weight[row] == value(layer, tensor, int(new[layer, rank * EXPERTS + row]))).all())
            for layer, tensors in enumerate(weights)
            for tensor, weight in enumerate(tensors)
            for row in range(EXPERTS)
        )

    with engines.groups(rank, case.world, port, engines.configuration(None, use_async=True)):
        coordinator = get_eplb_group()
        group = coordinator.device_group

        def sync(communicator) -> None:
            eplb_state.rearrange_expert_weights_inplace(old, new, weights, buffer, group, communicator)

        def background(communicator) -> None:
            if hasattr(communicator, "mover"):
                communicator.mover.begin(old.numpy(), new.numpy())
            for layer in range(case.layers):
                result = async_worker.transfer_layer(
                    old_layer_indices=old[layer],
                    new_layer_indices=new[layer],
                    expert_weights=weights[layer],
                    expert_weights_buffer=buffer,
                    communicator=communicator,
                    ep_group=group,
                    layer_idx=layer,
                )
                rebalance_execute.move_from_buffer(weights[layer], buffer, result, new[layer].numpy(), rank)

        def turn(core, run, compared) -> float:
            """One side's turn: built, connected by a first run, timed in two more, and gone."""
            with set_current_vllm_config(engines.configuration(core, use_async=True)):
                communicator = create_eplb_communicator(coordinator, case.backend, weights, buffer)
            seconds = []
            for number in range(3):
                fill()
                if core is not None:
                    communicator.mover.comm.reloaded(old.numpy())
                dist.barrier(group)
                began = time.perf_counter()
                run(communicator)
                dist.barrier(group)
                seconds.append(time.perf_counter() - began)
                if compared and number == 0 and wrong():
                    raise AssertionError(f"wrong rows after {type(communicator).__name__}")
            if core is not None:
                communicator.mover.close()
            del communicator
            gc.collect()
            dist.barrier(group)
            return min(seconds[1:])

        core = {"communicator": case.backend, "landing": case.landing}
        return {
            name: [turn(None, run, number == 0) / turn(core, run, number == 0) for number in range(rounds)]
            for name, run in (("sync", sync), ("async", background))
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=["nixl", "torch_gloo"])
    parser.add_argument("--world", action="append", type=int)
    parser.add_argument("--nbytes", action="append", type=int)
    parser.add_argument("--landing", default="vllm", choices=["vllm", "own"])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    on_cpu.stand_in_for_an_accelerator()
    on_cpu.let_its_nixl_use_host_memory()
    import eplb_vllm

    eplb_vllm.register()
    print(f"{'backend':12}{'row':>8}{'ranks':>7}   sync (min, max)       async (min, max)")
    for backend in given.backend or ["nixl", "torch_gloo"]:
        for nbytes in given.nbytes or [64 << 10, 2 << 20]:
            for world in given.world or [2, 4]:
                case = Case(backend, world, nbytes, given.landing)
                ratios = on_cpu.run(world, measure, case, on_cpu.free_port(), given.rounds, limit_s=300)[0]
                cells = [
                    f"{statistics.median(ratios[name]):.2f} ({min(ratios[name]):.2f}, {max(ratios[name]):.2f})"
                    for name in ("sync", "async")
                ]
                print(f"{backend:12}{nbytes >> 10:>6} K{world:>7}   {cells[0]:22}{cells[1]}", flush=True)


if __name__ == "__main__":
    main()
