"""What a load balancer is doing: stamped by its worker, looked at by anyone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from eplb_core.balancing.policy import NewPlacement
from eplb_core.balancing.promise import PromiseBook
from eplb_core.errors import EplbError

Phase = Literal[
    "idle", "load", "agree", "slots", "engine", "pace", "stage", "vote", "end", "rebuild", "failed", "closed"
]


@dataclass(frozen=True)
class LoadBalancerStatus:
    """A load balancer at one moment.

    Parameters
    ----------
    phase : str
        "idle" until the next interval; "load": the ranks' loads are gathered and placed; "agree"; "engine": this rank's
        engine has yet to come to a commit; "slots": others' have; "pace": waiting so as not to use more bandwidth than
        configured; "stage": rows are on their way; "vote": landed, and to be decided; "end"; "rebuild": after a
        failure; "failed": nothing is rearranged until `adopt`; "closed".
    layer : int or None
        Number of the layer, where the phase has one.
    since_s : float
        How long it has been in this phase.
    waiting_for : tuple of int
        Ranks, where the wait is long enough to ask for whom it is.
    step : int
        Forward steps so far.
    promised, due : Mapping of int to int
        Layers and the forward step that this rank promised not to pass undecided; layers and the step at which all
        ranks commit them.
    next_step : int
        From which on there is a rearrangement again.
    backend : str
        In use.
    num_rearrangements : int
        That came to their end.
    num_failures : int
        Since the start.
    failures_in_a_row : int
        Failures of transfers since the last success; after two the fallback is taken, where one is configured.
    num_engine_waits : int
        Times that `step` had to wait at a promise.
    num_engine_settled : int
        Times that it gave up waiting, and asked the store itself what stands.
    engine_waited_s, longest_engine_wait_s : float
        How long, in all and at most.
    counter_offset : int
        By how many steps more than explainable a rank was ahead of another, if that was ever seen: the forward steps
        that the ranks count are not the same ones.
    last_failure : EplbError or None
        The last one.
    placement : NewPlacement or None
        What was last placed: its gain, and the rows that it moves with and without alignment.
    """

    phase: str
    layer: int | None
    since_s: float
    waiting_for: tuple[int, ...]
    step: int
    promised: Mapping[int, int]
    due: Mapping[int, int]
    next_step: int
    backend: str
    num_rearrangements: int
    num_failures: int
    failures_in_a_row: int
    num_engine_waits: int
    num_engine_settled: int
    engine_waited_s: float
    longest_engine_wait_s: float
    counter_offset: int
    last_failure: EplbError | None
    placement: NewPlacement | None


@dataclass
class Progress:
    """The same while it changes. Single values, each written by one thread, so nobody needs a lock to look."""

    at: tuple[Phase, int | None, float] = field(default_factory=lambda: ("idle", None, time.monotonic()))
    waiting_for: tuple[int, ...] = ()
    num_rearrangements: int = 0
    num_failures: int = 0
    failures_in_a_row: int = 0
    num_engine_waits: int = 0
    num_engine_settled: int = 0
    engine_waited_s: float = 0.0
    longest_engine_wait_s: float = 0.0
    counter_offset: int = 0
    last_failure: EplbError | None = None
    placement: NewPlacement | None = None
    balancedness: float | None = None
    """Of the placement that holds, under the load of all ranks that was gathered last."""
    load_step: int = 0
    """The last step of that load."""

    def status(self, book: PromiseBook, *, next_step: int, backend: str) -> LoadBalancerStatus:
        """Return what it is at this moment."""
        phase, layer, since_s = self.at
        with book.changed:
            promised, due, step = dict(book.promised), dict(book.due), book.step
        return LoadBalancerStatus(
            phase=phase,
            layer=layer,
            since_s=time.monotonic() - since_s,
            waiting_for=self.waiting_for,
            step=step,
            promised=promised,
            due=due,
            next_step=next_step,
            backend=backend,
            num_rearrangements=self.num_rearrangements,
            num_failures=self.num_failures,
            failures_in_a_row=self.failures_in_a_row,
            num_engine_waits=self.num_engine_waits,
            num_engine_settled=self.num_engine_settled,
            engine_waited_s=self.engine_waited_s,
            longest_engine_wait_s=self.longest_engine_wait_s,
            counter_offset=self.counter_offset,
            last_failure=self.last_failure,
            placement=self.placement,
        )

    def enter(self, phase: Phase, layer: int | None = None) -> None:
        """A phase begins."""
        self.waiting_for = ()
        self.at = (phase, layer, time.monotonic())

    def place(self) -> str:
        """Say where it is, and for how long, for texts."""
        phase, layer, since_s = self.at
        where = phase if layer is None else f"{phase} of layer {layer}"
        return f"has been in phase {where} for {time.monotonic() - since_s:.0f} s"

    def engine_waited(self, seconds: float) -> None:
        """The engine waited at a promise."""
        self.num_engine_waits += 1
        self.engine_waited_s += seconds
        self.longest_engine_wait_s = max(self.longest_engine_wait_s, seconds)

    def failed(self, error: EplbError) -> None:
        """A rearrangement failed; one that never came to the backend says nothing of it."""
        self.num_failures += 1
        self.failures_in_a_row += error.code.startswith("EPLB-T")
        self.last_failure = error

    def succeeded(self) -> None:
        """A rearrangement came to its end."""
        self.num_rearrangements += 1
        self.failures_in_a_row = 0
        if self.placement is not None:
            self.balancedness = self.placement.balancedness_after

    def placed(self, placement: NewPlacement, step: int) -> None:
        """The load up to a step was gathered, and a placement found."""
        self.placement, self.balancedness, self.load_step = placement, placement.balancedness_before, step
