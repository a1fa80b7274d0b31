"""What every author of a backend needs besides the contract."""

from __future__ import annotations

import time


class Deadline:
    """A limit in time, shared by the steps of one wait."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.timeout_s - self.elapsed_s)

    @property
    def over(self) -> bool:
        """Has it run out?"""
        return self.elapsed_s >= self.timeout_s
