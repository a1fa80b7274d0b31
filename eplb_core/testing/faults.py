"""Faults on demand: an observer that misbehaves once, at one phase of one layer of one rearrangement, on its rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from eplb_core.backend import Event
from eplb_core.observers.base import Observer, Step, StepName

if TYPE_CHECKING:
    from eplb_core.backend import TransferPlan

Phase = Literal["agree", "transfer", "wait", "landed", "vote", "tally", "commit"]
Action = Literal["raise", "kill", "stop", "delay", "interrupt", "hang", "corrupt"]


class InjectedFault(RuntimeError):
    """What the action "raise" raises, and what ends a hang that nobody ended."""


@dataclass(eq=False)
class FaultInjector(Observer):
    """Acts once, where it is told to; only the rank that is to fail is given one.

    Give it before other observers, so that they see what it does as if the backend had done it.

    Parameters
    ----------
    phase : str
        "agree": before the ballot on the maps. "transfer": before the transfer starts. "wait": before the wait.
        "landed": after it. "vote": before the ballot. "tally": on the deciding rank, before the decision.
        "commit": after the copies.
    action : str
        "raise"; "kill" (SIGKILL to itself); "stop" (SIGSTOP to itself); "delay"; "interrupt" (KeyboardInterrupt);
        "hang": this thread goes no further until `release`, the rest of the process lives on; "corrupt", at "landed"
        alone: one byte that landed is inverted.
    generation : int
        Number of the rearrangement in which it acts, from 1.
    layer : int or None
        In which layer; None acts at the first that comes, to corrupt at the first in which rows land here.
    delay_s : float
        Seconds of the action "delay".
    name : str
        Tells several injectors of one communicator apart.
    hang_limit_s : float
        A hang that nobody released by then raises.
    landed_row, byte : int
        What to corrupt: which of the rows that landed, in the plan's order, and which byte of it.
    acted : bool
        Has it acted?

    Raises
    ------
    ValueError
        An unknown phase or action, or "corrupt" elsewhere than at "landed".
    """

    phase: Phase
    action: Action
    generation: int = 1
    layer: int | None = None
    delay_s: float = 0.0
    name: str = "fault injector"
    hang_limit_s: float = 600.0
    landed_row: int = 0
    byte: int = 0
    acted: bool = False
    _released: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        super().__init__()
        if self.phase not in get_args(Phase) or self.action not in get_args(Action):
            raise ValueError(f"no fault is known as {self.action!r} at {self.phase!r}")
        if self.action == "corrupt" and self.phase != "landed":
            raise ValueError(
                f"only what has landed can be corrupted without harm to live weights, not at {self.phase!r}"
            )

    def release(self) -> None:
        """End the hang."""
        self._released.set()

    def starts(self, name: StepName, plan: TransferPlan) -> None:
        """Act before a transfer or a wait."""
        self._reach(name, plan.generation, plan.layer)

    def ends(self, step: Step) -> None:
        """Act after a wait."""
        if step.name == "wait" and step.error is None:
            self._reach("landed", step.plan.generation, step.plan.layer, step.plan)

    def told(self, event: Event) -> None:
        """Act at agree, vote, tally and commit."""
        if event.kind != "abort":
            self._reach(event.kind, event.generation, event.layer)

    def _reach(self, phase: str, generation: int, layer: int | None, plan: TransferPlan | None = None) -> None:
        here = phase == self.phase and generation == self.generation and self.layer in (None, layer)
        if not here or self.acted:
            return
        if self.action == "corrupt" and plan is not None:
            self._corrupt(plan)
            return
        self.acted = True
        if self.action == "raise":
            raise InjectedFault(f"injected in {phase} of layer {layer}, generation {generation}")
        if self.action == "interrupt":
            raise KeyboardInterrupt
        if self.action == "delay":
            time.sleep(self.delay_s)
        elif self.action == "hang":
            if not self._released.wait(self.hang_limit_s):
                raise InjectedFault(f"hung in {phase} of layer {layer} for {self.hang_limit_s:g} s, unreleased")
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)

    def _corrupt(self, plan: TransferPlan) -> None:
        if not len(plan.receives):
            if self.layer is not None:
                raise InjectedFault(f"nothing lands here in layer {plan.layer}, so nothing can be corrupted")
            return
        self.acted = True
        row = self.landed(plan, self.landed_row)
        row[self.byte] = 255 - row[self.byte]
