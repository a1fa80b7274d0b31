"""What a rearrangement cost this rank: seconds by phase, and bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PHASES = ("agree", "connect", "transfer", "source", "wait", "vote", "commit")


@dataclass(eq=False)
class Counts:
    """Seconds and bytes of one rearrangement, from begin to end."""

    began: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    by_phase: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    nbytes_received: int = 0
    nbytes_sent: int = 0
    nbytes_local: int = 0
    nbytes_supplied: int = 0
    unmet: tuple[tuple[int, int, tuple[int, ...]], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds from begin to end, or to now."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a step to its phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.by_phase[name] += time.perf_counter() - started

    def end(self) -> None:
        """Stop the clock."""
        self.ended = time.perf_counter()
