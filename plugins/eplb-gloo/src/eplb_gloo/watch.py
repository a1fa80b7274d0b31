"""Cancels waits that cannot look up themselves: a thread that asks ``cancelled`` while another is blocked in gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from eplb_core.backend import Cancelled

INTERVAL_S = 0.05
"""Seconds between two looks."""

_PARK_AFTER = 40  # looks without a wait, two seconds


class CancelWatch:
    """Severs a group when what a blocked wait waits for was called off.

    gloo's waits can be neither polled nor cut into slices, and a rank whose peer is merely slow would learn of an abort
    elsewhere only when its own limit runs out. Used as a context manager around each wait. The thread sleeps for good
    while there are no waits, and looks for the first time at most `INTERVAL_S` after one began, so short ones cost
    nothing.

    Parameters
    ----------
    cancelled : callable
        See `eplb_core.backend.BackendContext`; called in the watch's thread, never while the waiting thread runs.
    sever : callable
        Makes the wait fail.
    """

    def __init__(self, cancelled: Callable[[], Cancelled | None], sever: Callable[[], None]) -> None:
        self._cancelled = cancelled
        self._sever = sever
        self._condition = threading.Condition()
        self._waiting = False
        self._parked = False
        self._closed = False
        self.reason: Cancelled | None = None
        """Why the wait in progress, or the last one, was cancelled."""
        self.failure: Exception | None = None
        """What `cancelled` raised, which cancels as well."""
        # A daemon, so that a store that hangs in `cancelled` cannot keep the process; `close` joins it otherwise.
        self._thread = threading.Thread(target=self._run, name="eplb-gloo-watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> CancelWatch:
        with self._condition:
            self._waiting = True
            if self._parked:
                self._condition.notify()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._condition:  # not before a look in progress is over
            self._waiting = False

    @property
    def waiting(self) -> bool:
        """Is a wait in progress?"""
        return self._waiting

    @property
    def acted(self) -> bool:
        """Has it severed the group?"""
        return self.reason is not None or self.failure is not None

    def close(self, timeout_s: float = 0.5) -> None:
        """Stop the thread; a look that hangs is left to end by itself."""
        self._closed = True
        if self._condition.acquire(timeout=timeout_s):
            self._condition.notify()
            self._condition.release()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        idle = 0
        with self._condition:
            while not self._closed:
                self._parked = idle >= _PARK_AFTER
                self._condition.wait(None if self._parked else INTERVAL_S)
                idle = 0 if self._waiting else idle + 1
                if self._waiting and not self.acted:
                    self._look()

    def _look(self) -> None:
        try:
            self.reason = self._cancelled()
        except Exception as error:  # whatever it is, the waiting thread raises it
            self.failure = error
        if self.acted:
            self._sever()
