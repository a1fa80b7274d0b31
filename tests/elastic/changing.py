"""An engine whose group grows and shrinks while it serves: three processes, of which two or three are ranks."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.testing.model import Model
from eplb_core.testing.ranks import Rank


class Engine:
    """A process that serves while it is a rank.

    Parameters
    ----------
    rank : Rank
        The process.
    config : EPLBConfig
        Without the redundant experts, which follow from the size of the group.
    num_experts, num_rows : int
        Logical experts of a layer, and slots of a rank.
    layers : sequence of sequence of int
        Bytes of the rows, ``[num_layers][num_tensors]``.
    """

    def __init__(
        self, rank: Rank, config: eplb.EPLBConfig, num_experts: int, num_rows: int, layers: Sequence[Sequence[int]]
    ) -> None:
        self._rank, self._config = rank, config
        self._experts, self._rows = num_experts, num_rows
        self._model = Model(rank.rank, num_rows, layers)
        self._notes = rank.store("notes")
        self._number = -1
        self._steps = self._commits = self._wrong = self._without = 0
        self._lb: Any = None
        self._comm: Any = None
        self._group: Any = None
        self._used: list[tuple[int, int, int]] = []

    def live(self, rounds: int) -> dict[str, Any]:
        """Be a rank of groups that change, or wait to be one; return what was seen."""
        order = [0, 1]
        if self._rank.rank in order:
            slots = len(order) * self._rows
            held = np.tile(np.arange(slots) % self._experts, (len(self._model.weights), 1))
            self._number = order.index(self._rank.rank)
            self._model.rank = self._number
            self._model.fill(held)
            self._comm = self._built("group -1", order)
            self._comm.connect()
            self._begin(order, "group -1", held)
            self._serve(10)
        for number in range(rounds):
            (newcomer,) = set(range(3)) - set(order)
            order = self._changes(f"grow {number}", order, [*order, newcomer])
            if self._number >= 0:
                self._serve(15)
                self._lb.drain([0])
                self._serve_until(lambda: self._lb.drained)
            order = self._changes(f"shrink {number}", order, order[1:])
            if self._number >= 0:
                self._serve(10)
            gc.collect()
            self._used.append((len(os.listdir("/proc/self/fd")), threading.active_count(), _resident()))
        if self._number >= 0:
            self._lb.close()
            self._comm.close()
        self._meet("the end")
        return {
            "wrong": self._wrong,
            "without a row": self._without,
            "steps": self._steps,
            "commits": self._commits,
            "used": self._used,
            "keys": sorted(key for key in self._rank.store().list_keys() if "eplb/" in key),
        }

    # --- a group that changes -----------------------------------------------------------------------------------------

    def _changes(self, name: str, before: list[int], after: list[int]) -> list[int]:
        """Go from one group of processes to another, at one step; return the new one."""
        mapping = {old: after.index(process) if process in after else -1 for old, process in enumerate(before)}
        process = self._rank.rank
        if process not in before:
            self._comm = self._built(name, after)
            self._comm.connect()
            held = np.array(json.loads(self._notes.get(f"map/{name}")))
            self._number = after.index(process)
            self._model.rank = self._number
            self._begin(after, name, held)
            return after
        found: list[Any] = []
        warming = None
        if process in after:
            control = eplb.ControlPlane.from_store(
                self._rank.store(name), rank=after.index(process), world_size=len(after)
            )
            warming = threading.Thread(target=lambda: found.append(self._comm.successor(control, mapping)))
            warming.start()
        self._serve_until(lambda: self._all(not (warming and warming.is_alive())))
        held = eplb.translate_map(self._lb.physical_to_logical_map, mapping, self._rows, len(after))
        if process == before[-1]:
            self._notes.set(f"map/{name}", json.dumps(held.tolist()))
        if warming is None:
            self._lb.close()
            self._comm.close()
            self._number, self._lb, self._comm = -1, None, None
            return after
        warming.join()
        old, self._comm = self._comm, found[0]
        self._lb.adopt(self._comm, held)
        old.close()
        self._number = after.index(process)
        self._model.rank = self._number
        self._group = self._meeting_place(after, name)
        return after

    def _built(self, name: str, order: list[int]) -> eplb.Communicator:
        number = order.index(self._rank.rank)
        control = eplb.ControlPlane.from_store(self._rank.store(name), rank=number, world_size=len(order))
        return eplb.Communicator(self._of_size(len(order)), self._model.weights, control)

    def _begin(self, order: list[int], name: str, held: Any) -> None:
        self._lb = eplb.LoadBalancer(self._of_size(len(order)), self._comm, held, self._experts)
        self._group = self._meeting_place(order, name)

    def _of_size(self, size: int) -> eplb.EPLBConfig:
        redundant = size * self._rows - self._experts
        return self._config.model_copy(
            update={"num_redundant_experts": redundant, "step_interval": 8, "window_size": 6, "use_async": True}
        )

    # --- serving ------------------------------------------------------------------------------------------------------

    def _serve(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _serve_until(self, enough: Any) -> None:
        for _ in range(5000):
            self._step()
            if enough():
                return
        raise AssertionError(f"not within 5000 steps: {self._lb.status}")

    def _step(self) -> None:
        self._steps += 1
        held = self._lb.physical_to_logical_map
        self._look(held)
        hot = self._steps // 8 % self._experts
        for layer, row in enumerate(held):
            self._lb.record(layer, np.where(row == hot, 100, np.where(row >= 0, 5, 0)))
        time.sleep(1e-3)
        self._all(True)  # the all-to-all of a forward pass
        self._commits += len(self._lb.step())

    def _look(self, held: Any) -> None:
        self._wrong += len(self._model.wrong_rows(held))
        present = [set(row.tolist()) for row in held]
        self._without += sum(not set(range(self._experts)) <= experts for experts in present)

    def _all(self, value: bool) -> bool:
        flag = torch.tensor([int(value)])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._group.allreduce([flag], options).wait(timedelta(seconds=60))
        return bool(flag.item())

    def _meeting_place(self, order: list[int], name: str) -> Any:
        number, store = order.index(self._rank.rank), self._rank.store(f"all-to-all {name}")
        return dist.ProcessGroupGloo(store, number, len(order), timedelta(seconds=60))

    def _meet(self, topic: str) -> None:
        self._notes.add(topic, 1)
        while int(self._notes.add(topic, 0)) < self._rank.world_size:
            time.sleep(2e-3)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
