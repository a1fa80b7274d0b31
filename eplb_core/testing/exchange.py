"""A connected communicator whose hooks a scenario calls one by one, with access to landing memory and live rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch

from eplb_core.backend import Cancelled, TransferPlan
from eplb_core.communicator import Communicator
from eplb_core.config import EPLBConfig
from eplb_core.plan import TransferRules, check_maps, plan_moves
from eplb_core.testing.expectation import reach
from eplb_core.testing.model import Map, Model, shuffles
from eplb_core.testing.pool import Stage, Subject

PATTERN = 0xA5


def communicator(
    stage: Stage, subject: Subject, weights: Any, *, name: str = "default", control: Any = None, **given: Any
) -> Communicator:
    """Build a communicator of the backend under test.

    Parameters
    ----------
    stage, subject : Stage, Subject
        The rank, and the backend under test.
    weights : list of list of torch.Tensor
        Tensors to register.
    name : str
        Name of the communicator.
    control : ControlPlane or None
        None makes one of its own.
    **given
        Fields of EPLBConfig, or arguments of Communicator.
    """
    fields = {key: given.pop(key) for key in list(given) if key in EPLBConfig.model_fields}
    config = EPLBConfig(**{"communicator": subject.backend, "use_async": False, "timeout_s": 15, **fields})
    given.setdefault("device_group", stage.device_group(subject))
    return Communicator(config, weights, control or stage.control(name), options=subject.options, name=name, **given)


class Exchange:
    """Calls the hooks of a backend itself: makes plans, calls ``transfer`` and ``wait``, reads landing memory.

    Parameters
    ----------
    stage, subject : Stage, Subject
        The rank, and the backend under test.
    row_nbytes : sequence of sequence of int
        ``[num_layers][num_tensors]``.
    num_rows : int
        Physical experts per rank.
    maps : sequence of Map or None
        Placements to go through; None makes two random ones.
    **given
        See `communicator`.
    """

    def __init__(
        self,
        stage: Stage,
        subject: Subject,
        row_nbytes: Sequence[Sequence[int]] = ((64, 24),) * 2,
        *,
        num_rows: int = 4,
        maps: Sequence[Map] | None = None,
        **given: Any,
    ) -> None:
        self.stage = stage
        self.maps = maps or shuffles(2, len(row_nbytes), stage.world_size, num_rows, seed=5)
        self.model = Model(stage.rank, num_rows, row_nbytes, subject.device_type)
        self.model.fill(self.maps[0])
        self.comm = communicator(stage, subject, self.model.weights, **given)
        self.comm.connect()
        self.session = self.comm._lives.epoch
        self.backend = self.session.backend
        self.hooks = self.session.hooks
        self._sequence = 0

    def plan(self, layer: int = 0, *, slot: int = 0, generation: int = 1, old: int = 0, new: int = 1) -> TransferPlan:
        """Plan one layer's share of the move from one of `maps` to another."""
        session, made = self.session, self.session.setup
        world, layers, rows = self.stage.world_size, made.layout.num_layers, self.model.num_rows
        before, after = check_maps(
            self.maps[old], self.maps[new], num_layers=layers, world_size=world, num_local_physical_experts=rows
        )
        self._sequence += 1
        return plan_moves(before, after, world_size=world).transfer_plan(
            layer,
            session.rank,
            made.layout.geometries[layer],
            TransferRules.of(self.backend, made.info, made.config),
            generation=generation,
            sequence=self._sequence,
            slot=slot,
        )

    def complete(self, check: Callable[[bool, str], None] = reach) -> None:
        """Exchange a layer in slot 0 on all ranks, so that the test starts with a backend that has worked.

        Notes
        -----
        `check` is `expect` in tests that are about these rows, else `reach`.
        """
        plan = self.plan()
        self.hooks.wait(self.hooks.transfer(plan), 10.0)
        missing = self.missing(plan)
        self.meet()
        check(not missing, f"an exchange in which nothing is amiss left (tensor, row) {missing[:8]} out")

    def renew(self) -> None:
        """Write other weights on all ranks, so that bytes of an earlier exchange are wrong everywhere."""
        self.model.version += 1
        self.model.fill(self.maps[0])
        if self.model.device != "cpu":
            torch.get_device_module(self.model.device).synchronize()
        self.session.landing.slots[0].zero_()
        self.meet()

    def missing(self, plan: TransferPlan, *, new: int = 1) -> list[tuple[int, int]]:
        """Return the (tensor, row) pairs that the plan receives and landing memory does not hold."""
        moves, wrong = plan.receives, []
        landed = self.session.landing.landed_rows(plan.slot, moves)
        for tensor, row, there in zip(moves.tensor.tolist(), moves.row.tolist(), landed, strict=True):
            expert = int(self.maps[new][plan.layer, self.stage.rank * self.model.num_rows + row])
            if not np.array_equal(there.cpu().numpy(), self.model.content(plan.layer, tensor, expert)):
                wrong.append((tensor, row))
        return wrong

    def call_off(self, cancelled: Cancelled, *, after_s: float = 0.0) -> None:
        """Make ``context.cancelled()`` return this value after a moment."""
        since = time.monotonic() + after_s
        _, watch = self.session.entered
        watch.cancelled = lambda: cancelled if time.monotonic() >= since else None  # type: ignore[method-assign]

    def close_backend(self, *, undrained: bool) -> bool:
        """Close the backend by force, and return whether the core takes memory for safe.

        Notes
        -----
        The core is told that it is not, so that landing memory stays allocated and can be watched.
        """
        safe = self.session.close_backend(force=True, undrained=undrained)
        self.session.close_backend = lambda **_: False  # type: ignore[method-assign]
        return safe

    def progress(self) -> None:
        """Call the backend's ``progress``, if it has one."""
        if getattr(self.backend, "needs_progress", True):
            self.backend.progress()

    def pump(self, seconds: float) -> None:
        """Call the backend's ``progress`` for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.progress()
            time.sleep(1e-2)

    def meet(self) -> None:
        """Wait for every rank and call ``progress`` meanwhile: a peer may still read from here."""
        self.stage.meet(self.progress)

    def hear(self, word: str, timeout_s: float = 15.0) -> None:
        """Wait for a word of another rank and call ``progress`` meanwhile."""
        self.stage.hear(word, timeout_s, self.progress)

    def paint(self, slot: int) -> None:
        """Fill a landing slot with a pattern."""
        self.session.landing.slots[slot].fill_(PATTERN)

    def painted(self, slot: int) -> bool:
        """Is the pattern untouched?"""
        return bool((self.session.landing.slots[slot] == PATTERN).all())

    def live(self) -> list[list[torch.Tensor]]:
        """Copy the live rows."""
        return [[tensor.clone() for tensor in layer] for layer in self.model.weights]

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.comm.close(force=True)
