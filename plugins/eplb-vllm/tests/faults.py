"""Ranks that fail on purpose: in a phase of ours, or of vLLM's own."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import eplb_core
from eplb_core.testing import FaultInjector


@contextlib.contextmanager
def injected(*faults: FaultInjector | None) -> Iterator[None]:
    """Have the communicator that is built here watched by fault injectors."""
    given = [fault for fault in faults if fault is not None]
    plain = eplb_core.Communicator

    @functools.wraps(plain, updated=())
    def watched(*args: Any, observers: Any = (), **kwargs: Any) -> Any:
        return plain(*args, observers=[*given, *observers], **kwargs)

    eplb_core.Communicator = watched
    try:
        yield
    finally:
        eplb_core.Communicator = plain


def fail_its_own(communicator: Any, at: int) -> None:
    """Let vLLM's own communicator raise at one of its transfers."""
    plain, calls = communicator.execute, [0]

    def execute() -> None:
        calls[0] += 1
        if calls[0] == at:
            raise RuntimeError("injected")
        plain()

    communicator.execute = execute


def serve(engine: Any, steps: int, pause_s: float = 0.002) -> float:
    """Step; return the longest step, seconds."""
    longest = 0.0
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        longest = max(longest, time.perf_counter() - began)
        time.sleep(pause_s)
    return longest
