"""One member of a group under test: weights of known bytes, plans of the core, a backend driven hook by hook."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.backend import BackendContext, Buffers, Cancelled, PeerMetadata, TransferPlan
from eplb_core.memory.landing import LandingMemory
from eplb_core.memory.staging import TorchStaging
from eplb_core.plan import TransferRules, plan_moves
from eplb_core.testing.ranks import Rank
from eplb_core.weights.layout import build_layout
from eplb_gloo.backend import GlooBackend
from eplb_gloo.options import GlooOptions

UNTOUCHED = 0xEE


@dataclass(frozen=True)
class Case:
    """What is moved among whom.

    Parameters
    ----------
    row_nbytes : sequence of sequence of int
        ``[num_layers][num_tensors]``.
    world_size : int
        Ranks, members or not.
    members : tuple of int or None
        None is all ranks.
    num_rows : int
        Experts per rank.
    options : GlooOptions
        Of the backend.
    staging_layers : int
        Slots.
    timeout_s : float
        Of the context.
    device : str
        Of the weights.
    new_map : tuple of tuple of int or None
        ``[num_layers][world_size * num_rows]`` logical experts; None is a random placement. The old one is 0, 1, 2 ...
    """

    row_nbytes: tuple[tuple[int, ...], ...]
    world_size: int = 2
    members: tuple[int, ...] | None = None
    num_rows: int = 4
    options: GlooOptions = field(default_factory=GlooOptions)
    staging_layers: int = 2
    timeout_s: float = 30.0
    device: str = "cpu"
    new_map: tuple[tuple[int, ...], ...] | None = None

    @property
    def present(self) -> tuple[int, ...]:
        return tuple(range(self.world_size)) if self.members is None else self.members

    def maps(self) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(self.row_nbytes), self.world_size, self.num_rows)
        old = np.broadcast_to(np.arange(shape[1] * shape[2]).reshape(shape[1:]), shape).copy()
        absent = [rank for rank in range(self.world_size) if rank not in self.present]
        old[:, absent] = -1
        if self.new_map is not None:
            new = np.array(self.new_map).reshape(shape)
        else:
            # Some experts twice and some nowhere, so that rows go to several peers too.
            shuffle = np.random.default_rng(7)
            held = old[0, list(self.present)].ravel()
            new = np.full(shape, -1)
            for layer in range(shape[0]):
                chosen = shuffle.choice(held, len(held), replace=layer % 2 == 1)
                new[layer, list(self.present)] = shuffle.permutation(chosen).reshape(-1, self.num_rows)
        flat = (shape[0], shape[1] * shape[2])
        return old.reshape(flat).astype(np.int64), new.reshape(flat).astype(np.int64)


def content(expert: int, layer: int, tensor: int, nbytes: int) -> torch.Tensor:
    """Return the bytes of one expert's row; no two rows of a case share them."""
    seed = np.uint32(expert * 7919 + layer * 104729 + tensor * 1299709)
    mixed = (np.arange(nbytes, dtype=np.uint32) + seed) * np.uint32(0x9E3779B1)
    return torch.from_numpy((mixed >> np.uint32(24)).astype(np.uint8))


class Member:
    """One rank's backend, with all that the core would give it."""

    def __init__(self, rank: Rank, case: Case, cancelled: Callable[[], Cancelled | None] = lambda: None) -> None:
        self.case = case
        self.rank = rank.rank
        self.old, new = case.maps()
        weights = [
            [torch.zeros(case.num_rows, nbytes, dtype=torch.uint8) for nbytes in layer] for layer in case.row_nbytes
        ]
        for layer, tensors in enumerate(weights):
            for tensor, rows in enumerate(tensors):
                for row in range(case.num_rows):
                    expert = int(self.old[layer, self.rank * case.num_rows + row])
                    rows[row] = content(expert, layer, tensor, rows.shape[1])
        self.weights = [[tensor.to(case.device) for tensor in layer] for layer in weights]
        self.layout = build_layout(self.weights)
        self.allocator = TorchStaging(self.layout.device)
        self.landing = LandingMemory(
            self.layout,
            staging_layers=case.staging_layers,
            landing_layout=GlooBackend.landing_layout,
            landing_device=torch.device("cpu"),
            num_peers=len(case.present) - 1,
            allocator=self.allocator,
            host_landing=None,
        )
        self.plans = plan_moves(self.old, new, world_size=case.world_size, members=case.members)
        stream = None if case.device == "cpu" else torch.Stream(device=self.layout.device)
        self.store: Any = rank.store("backend")
        self.context = BackendContext(
            rank=self.rank,
            world_size=case.world_size,
            members=case.present,
            epoch=1,
            name="under test",
            store=self.store,
            device=self.layout.device,
            stream=stream,
            device_group=None,
            staging=self.allocator,
            staging_layers=case.staging_layers,
            timeout_s=case.timeout_s,
            host="127.0.0.1",
            cancelled=cancelled,
            max_ops_per_batch=32,
        )
        self.buffers = Buffers(
            rows=self.layout.rows,
            landing=self.landing.slots,
            landing_rows=None,
            send_nbytes=max(geometry.nbytes_rows for geometry in self.layout.geometries),
        )
        self.sequence = 0
        self.backend = GlooBackend(case.options, self.context)

    def connect(self, attempt: int = 0) -> None:
        """Register, tell the others, and connect to those that the plan names."""
        local = self.backend.register_buffers(self.buffers)
        key = f"payload/{attempt}"
        talk: Any = dist.PrefixStore("talk", self.store)
        talk.set(f"{key}/{self.rank}", local.payload)
        peers = [PeerMetadata(peer, talk.get(f"{key}/{peer}")) for peer in self.plans.peers(self.rank)]
        receipt = self.backend.exchange_metadata(local, peers)
        assert receipt.peers == tuple(peer.rank for peer in peers)

    def plan(self, layer: int) -> TransferPlan:
        plan = self.plans.transfer_plan(
            layer,
            self.rank,
            self.layout.geometries[layer],
            TransferRules(GlooBackend.landing_layout, self.backend.coalesce_nbytes),
            generation=1,
            sequence=self.sequence,
            slot=self.sequence % self.case.staging_layers,
        )
        self.sequence += 1
        return plan

    def start(self, layer: int) -> tuple[TransferPlan, Any]:
        plan = self.plan(layer)
        self.landing.slots[plan.slot].fill_(UNTOUCHED)
        return plan, self.backend.transfer(plan)

    def finish(self, started: tuple[TransferPlan, Any], timeout_s: float = 30.0) -> int:
        """Wait, check every byte that landed, and return how many there are."""
        plan, handle = started
        receipt = self.backend.wait(handle, timeout_s)
        assert receipt.nbytes_received == int(plan.receives.nbytes.sum())
        assert receipt.nbytes_sent == int(plan.sends.nbytes.sum())
        self.check(plan)
        return receipt.nbytes_received

    def check(self, plan: TransferPlan) -> None:
        """Compare what landed with what the sources held; nothing else in the slot was written."""
        expected = torch.full_like(self.landing.slots[plan.slot], UNTOUCHED)
        columns = plan.receives
        for peer, tensor, source_row, nbytes, offset in zip(
            columns.peer, columns.tensor, columns.peer_row, columns.nbytes, columns.landing_offset, strict=True
        ):
            expert = int(self.old[plan.layer, peer * self.case.num_rows + source_row])
            expected[offset : offset + nbytes] = content(expert, plan.layer, int(tensor), int(nbytes))
        assert torch.equal(self.landing.slots[plan.slot], expected)

    def rounds(self, count: int = 1) -> int:
        """Transfer every layer that moves, two in flight where there are two slots; return the bytes received."""
        total = 0
        for _ in range(count):
            started = []
            for layer in self.plans.layers:
                started.append(self.start(layer))
                if len(started) == self.case.staging_layers:
                    total += self.finish(started.pop(0))
            total += sum(self.finish(one) for one in started)
        return total

    def meet(self, topic: str, members: Sequence[int] | None = None, timeout_s: float = 30.0) -> None:
        """Wait until the members have all come here."""
        everyone = self.case.present if members is None else members
        talk: Any = dist.PrefixStore("talk", self.store)
        count = talk.add(f"meet/{topic}", 1)
        deadline = time.monotonic() + timeout_s
        while count < len(everyone):
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {count} of {len(everyone)} came to {topic}")
            time.sleep(0.002)
            count = talk.add(f"meet/{topic}", 0)


def descriptors() -> int:
    """Return the number of open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Return the number of threads of this process, those outside Python included."""
    return len(os.listdir("/proc/self/task"))
