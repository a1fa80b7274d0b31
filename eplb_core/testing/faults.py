"""Faults on demand: an observer that kills, stops, delays or raises at one phase of one layer on one rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

from eplb_core.backend import Event
from eplb_core.hookspecs import hookimpl

Phase = Literal["agree", "transfer", "wait", "landed", "vote", "tally", "commit"]
Action = Literal["raise", "kill", "stop", "delay", "interrupt"]


class InjectedFault(RuntimeError):
    """What the action "raise" raises."""


@dataclass
class FaultInjector:
    """Acts once, where it is told to.

    Parameters
    ----------
    phase : str
        "agree": before the ballot on the maps. "transfer": before the transfer starts. "wait": before the wait.
        "landed": after it. "vote": before the ballot. "tally": on the deciding rank, before the decision.
        "commit": after the copies.
    action : str
        "raise", "kill" (SIGKILL to itself), "stop" (SIGSTOP to itself), "delay", "interrupt" (KeyboardInterrupt).
    generation : int
        In which rearrangement, from 1.
    layer : int or None
        In which layer; None acts at the first that comes.
    delay_s : float
        For "delay".
    """

    phase: Phase
    action: Action
    generation: int = 1
    layer: int | None = None
    delay_s: float = 0.0
    name: str = "fault injector"
    acted: bool = False
    _current: tuple[int, int | None] = (0, None)

    @hookimpl(wrapper=True)
    def transfer(self, plan: Any) -> Generator[None, Any, Any]:
        """Act before a transfer starts."""
        self._reach("transfer", plan.generation, plan.layer)
        handle = yield
        self._plans = {**getattr(self, "_plans", {}), id(handle): plan}
        return handle

    @hookimpl(wrapper=True)
    def wait(self, handle: Any, timeout_s: float) -> Generator[None, Any, Any]:
        """Act before, or after, a wait."""
        plan = self._plans.pop(id(handle))
        self._reach("wait", plan.generation, plan.layer)
        receipt = yield
        self._reach("landed", plan.generation, plan.layer)
        return receipt

    @hookimpl
    def observe(self, event: Event) -> None:
        """Act at agree, vote, tally and commit."""
        if event.kind != "abort":
            self._reach(event.kind, event.generation, event.layer)

    def _reach(self, phase: str, generation: int, layer: int | None) -> None:
        here = phase == self.phase and generation == self.generation and self.layer in (None, layer)
        if not here or self.acted:
            return
        self.acted = True
        if self.action == "raise":
            raise InjectedFault(f"injected in {phase} of layer {layer}, generation {generation}")
        if self.action == "interrupt":
            raise KeyboardInterrupt
        if self.action == "delay":
            time.sleep(self.delay_s)
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)
