"""One rank of a test: the backend driven through its hooks as the core drives it.

Run as ``python rank.py RANK PORT``; takes scenarios and prints what they say as lines of JSON. Ranks are processes of
their own, so that a test can stop and kill them, and can give UCX its settings through their environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.backend import BackendContext, Buffers, Cancelled, PeerMetadata
from eplb_core.memory.commit import commit_copies
from eplb_core.memory.landing import LandingMemory
from eplb_core.memory.staging import TorchStaging
from eplb_core.plan import TransferRules, plan_moves
from eplb_core.weights.layout import build_layout
from eplb_nixl.backend import NixlBackend
from eplb_nixl.options import NixlOptions

STEP_LIMIT_S = 60.0


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def value_of(expert: int, layer: int, tensor: int) -> int:
    return (expert * 7 + layer * 3 + tensor + 1) % 251


class Rank:
    """A rank: weights, landing memory, backend, and a barrier that pumps progress."""

    run = 0  # keys of one run of a scenario are never those of another

    def __init__(self, rank: int, world: int, port: int, *, name: str = "test", epoch: int = 1, **shape: Any) -> None:
        self.rank, self.world, self.epoch, self.name = rank, world, epoch, name
        self.num_layers = shape.get("layers", 3)
        self.num_experts = shape.get("experts", 4)
        self.nbytes = shape.get("nbytes", [4096, 512, 4])
        self.options = NixlOptions(**shape.get("options", {}))
        self.store = dist.PrefixStore(
            f"{self.run}/{name}/{epoch}", dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=STEP_LIMIT_S))
        )
        self.called_off: Cancelled | None = None
        self.steps = self.generation = 0
        self.weights = [
            [torch.zeros(self.num_experts, n, dtype=torch.uint8) for n in self.nbytes] for _ in range(self.num_layers)
        ]

    def build(self, weights: list[list[torch.Tensor]] | None = None) -> None:
        self.weights = weights or self.weights
        self.layout = build_layout(self.weights)
        staging = TorchStaging(torch.device("cpu"))
        self.landing = LandingMemory(
            self.layout,
            staging_layers=2,
            landing_layout=NixlBackend.landing_layout,
            landing_device=torch.device("cpu"),
            num_peers=self.world - 1,
            allocator=staging,
            host_landing=None,
        )
        self.context = BackendContext(
            rank=self.rank,
            world_size=self.world,
            members=tuple(range(self.world)),
            epoch=self.epoch,
            name=self.name,
            store=self.store,
            device=torch.device("cpu"),
            stream=None,
            device_group=None,
            staging=staging,
            staging_layers=2,
            timeout_s=STEP_LIMIT_S,
            host="127.0.0.1",
            cancelled=lambda: self.called_off,
            max_ops_per_batch=32,
        )
        self.backend = NixlBackend(self.options, self.context)
        self.buffers = Buffers(
            rows=self.layout.rows,
            landing=self.landing.slots,
            landing_rows=None,
            send_nbytes=max(geometry.nbytes_rows for geometry in self.layout.geometries),
        )
        self.local = self.backend.register_buffers(self.buffers)
        self.store.set(f"payload/{self.rank}", self.local.payload)

    def payload(self, peer: int) -> bytes:
        return self.store.get(f"payload/{peer}")

    def connect(self) -> None:
        self.connect_to([peer for peer in range(self.world) if peer != self.rank])
        self.barrier()

    def connect_to(self, peers: list[int]) -> None:
        self.backend.exchange_metadata(self.local, [PeerMetadata(peer, self.payload(peer)) for peer in peers])
        self.until(self.backend.connected)

    def until(self, happened: Any) -> None:
        limit = time.monotonic() + STEP_LIMIT_S
        while not happened():
            if time.monotonic() > limit:
                raise TimeoutError("a step of the test took too long")
            self.backend.progress()
            time.sleep(1e-4)

    def barrier(self, ranks: int | None = None) -> None:
        self.steps += 1
        key = f"barrier/{self.steps}"
        self.store.add(key, 1)
        self.until(lambda: self.store.add(key, 0) >= (ranks or self.world))

    def fill(self, mapping: np.ndarray) -> None:
        for layer, tensors in enumerate(self.weights):
            for number, tensor in enumerate(tensors):
                for row in range(self.num_experts):
                    expert = int(mapping[layer, self.rank * self.num_experts + row])
                    tensor[row] = value_of(expert, layer, number)

    def wrong_rows(self, mapping: np.ndarray) -> int:
        wrong = 0
        for layer, tensors in enumerate(self.weights):
            for number, tensor in enumerate(tensors):
                for row in range(self.num_experts):
                    expert = int(mapping[layer, self.rank * self.num_experts + row])
                    wrong += not bool((tensor[row] == value_of(expert, layer, number)).all())
        return wrong

    def maps(self, seed: int, redundant: int = 0) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        slots = self.world * self.num_experts
        base = np.concatenate([np.arange(slots - redundant), np.arange(redundant)])
        old = np.stack([rng.permutation(base) for _ in range(self.num_layers)])
        new = np.stack([rng.permutation(base) for _ in range(self.num_layers)])
        return old, new

    def plan(self, moves: Any, layer: int, place: int) -> Any:
        return moves.transfer_plan(
            layer,
            self.rank,
            self.layout.geometries[layer],
            TransferRules(NixlBackend.landing_layout),
            generation=self.generation,
            sequence=(self.generation << 32) + place,
            slot=place % 2,
        )

    def start(self, old: np.ndarray, new: np.ndarray, *, first: int = 0) -> tuple[Any, list[Any]]:
        """All layers' plans, canonical on every rank; what numbers them follows from (generation, place)."""
        self.generation += 1
        moves = plan_moves(old, new, world_size=self.world)
        return moves, [self.plan(moves, layer, first + place) for place, layer in enumerate(moves.layers)]

    def commit(self, moves: Any, plan: Any) -> None:
        rows = [[view[row] for row in range(self.num_experts)] for view in self.layout.rows[plan.layer]]
        commit_copies(
            rows,
            self.layout.geometries[plan.layer],
            moves.commit_plan(plan.layer, self.rank),
            plan.receives,
            self.landing,
            plan.slot,
        ).run()

    def rearrange(self, old: np.ndarray, new: np.ndarray) -> None:
        """Two slots deep, as the core does it: the next layer is started before this one is committed."""
        moves, plans = self.start(old, new)
        handles = [self.backend.transfer(plans[0])] if plans else []
        for number, plan in enumerate(plans):
            self.backend.wait(handles[number], STEP_LIMIT_S)
            if number + 1 < len(plans):
                handles.append(self.backend.transfer(plans[number + 1]))
            self.barrier()
            self.commit(moves, plan)
            self.barrier()


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    import scenarios  # which knows this module as `rank`, not as the program that runs

    rank, port = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    for line in sys.stdin:
        command = json.loads(line)
        scenarios.Rank.run = command["run"]
        try:
            getattr(scenarios, command["scenario"])(rank, command["world"], port, **command["arguments"])
            say(end="well")
        except Exception:
            traceback.print_exc()
            say(end="badly", why=traceback.format_exc())


if __name__ == "__main__":
    main()
