"""The base of observers: they follow one communicator, layer by layer, with the plan of each step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from eplb_core.backend import Buffers, Event, LocalMetadata, TransferReceipt
from eplb_core.errors import ConfigError
from eplb_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from eplb_core.backend import TransferPlan

StepName = Literal["transfer", "wait", "vote"]


@dataclass(frozen=True, eq=False)
class Step:
    """One step of one layer on this rank, once it is over.

    Parameters
    ----------
    name : {"transfer", "wait", "vote"}
        "transfer" and "wait": the hook of that name. "vote": from this rank's ballot until the layer is committed or
        aborted here; the commit's copies, and what ran meanwhile for the next layer, are part of it.
    plan : TransferPlan
        What this rank sends and receives in the layer.
    began_ns, ended_ns : int
        `time.perf_counter_ns`.
    receipt : TransferReceipt or None
        Receipt of a wait that succeeded, else None.
    error : BaseException or None
        What the hook raised.
    aborted : bool
        Was the layer aborted?
    """

    name: StepName
    plan: TransferPlan
    began_ns: int
    ended_ns: int
    receipt: TransferReceipt | None = None
    error: BaseException | None = None
    aborted: bool = False

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.ended_ns - self.began_ns) * 1e-9


class Observer:
    """Follows one communicator. A subclass overrides `registered`, `starts`, `ends` or `told`, as it needs.

    An exception of `starts`, `ends` or `told` before a layer is decided aborts that layer on every rank. Of several
    observers the first is nearest to the backend: it acts last before a hook and first after it.

    Attributes
    ----------
    name : str
        Name of its evidence in ballots; different for all observers of a communicator.
    buffers : Buffers or None
        Live rows and landing memory, once they are registered.
    """

    name: str = "observer"

    def __init__(self) -> None:
        self.buffers: Buffers | None = None
        self._started: deque[tuple[Any, TransferPlan]] = deque()
        self._landed: dict[int, TransferPlan] = {}
        self._balloted_ns: dict[int, int] = {}

    # --- for subclasses ----------------------------------------------------------------------------------------------

    def registered(self, buffers: Buffers) -> None:
        """Called with live rows and landing memory, and again after a rebuild."""

    def starts(self, name: StepName, plan: TransferPlan) -> None:
        """Called before the hook "transfer" or "wait"."""

    def ends(self, step: Step) -> None:
        """Called after a step, also when it failed."""

    def told(self, event: Event) -> bytes | None:
        """Called with an event; at "vote" return evidence for this rank's ballot, or None."""
        return None

    # --- hooks -------------------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def register_buffers(self, buffers: Buffers) -> Generator[None, LocalMetadata, LocalMetadata]:
        """Note the buffers.

        Raises
        ------
        ConfigError
            Another communicator was given this observer first (EPLB-C010).
        """
        if self.buffers is not None and self.buffers.rows is not buffers.rows:
            problem = f"observer {self.name!r} follows another communicator already"
            raise ConfigError("EPLB-C010", problem=problem, detail="Make one for each.")
        local = yield
        self.buffers = buffers
        self._forget()
        self.registered(buffers)
        return local

    @hookimpl(wrapper=True)
    def transfer(self, plan: TransferPlan) -> Generator[None, Any, Any]:
        """Follow the start of a layer's transfer."""
        self.starts("transfer", plan)
        began_ns = time.perf_counter_ns()
        try:
            handle = yield
        except BaseException as error:
            self.ends(Step("transfer", plan, began_ns, time.perf_counter_ns(), error=error))
            raise
        self._started.append((handle, plan))
        self.ends(Step("transfer", plan, began_ns, time.perf_counter_ns()))
        return handle

    @hookimpl(wrapper=True)
    def wait(self, handle: Any) -> Generator[None, TransferReceipt, TransferReceipt]:
        """Follow the wait for it."""
        plan = self._plan_of(handle)
        self.starts("wait", plan)
        began_ns = time.perf_counter_ns()
        try:
            receipt = yield
        except BaseException as error:
            self.ends(Step("wait", plan, began_ns, time.perf_counter_ns(), error=error))
            raise
        self._landed[plan.layer] = plan
        self.ends(Step("wait", plan, began_ns, time.perf_counter_ns(), receipt=receipt))
        return receipt

    @hookimpl
    def observe(self, event: Event) -> bytes | None:
        """Follow votes and their outcomes."""
        if event.kind == "agree":
            self._forget()  # what an aborted rearrangement left
        layer = event.layer
        if event.kind in ("commit", "abort") and layer is not None and layer in self._balloted_ns:
            plan, began_ns = self._landed.pop(layer), self._balloted_ns.pop(layer)
            self.ends(Step("vote", plan, began_ns, time.perf_counter_ns(), aborted=event.kind == "abort"))
        evidence = self.told(event)
        if event.kind == "vote" and layer in self._landed:
            self._balloted_ns[layer] = time.perf_counter_ns()
        return evidence

    def landed_plan(self, layer: int) -> TransferPlan:
        """Return the plan of a layer that has landed here and is not committed or aborted yet."""
        return self._landed[layer]

    def landed(self, plan: TransferPlan, number: int) -> torch.Tensor:
        """Return the landing memory of a received row, ``plan.receives[number]``: uint8 ``[nbytes]``, shared."""
        buffers, moves = self._registered(), plan.receives
        if buffers.landing_rows is not None:
            return buffers.landing_rows[plan.slot][int(moves.tensor[number])][int(moves.row[number])]
        start = int(moves.landing_offset[number])
        return buffers.landing[plan.slot][start : start + int(moves.nbytes[number])]

    def live(self, layer: int, tensor: int, row: int) -> torch.Tensor:
        """Return a live row, uint8 ``[nbytes]``, shared: not to be written."""
        live: torch.Tensor = self._registered().rows[layer][tensor][row]
        return live

    def _registered(self) -> Buffers:
        if self.buffers is None:
            raise LookupError(f"observer {self.name!r} was given to no communicator")
        return self.buffers

    def _plan_of(self, handle: Any) -> TransferPlan:
        # Handles are waited for in the order of their transfer, and may be equal, or one object, so the first is meant.
        for index, (started, plan) in enumerate(self._started):
            if started is handle:
                del self._started[index]
                return plan
        raise LookupError(f"observer {self.name!r} saw no transfer that returned {handle!r}")

    def _forget(self) -> None:
        self._started.clear()
        self._landed.clear()
        self._balloted_ns.clear()
