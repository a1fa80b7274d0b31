"""Ends calls into torch that block: a thread that severs the group when one is called off or takes too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eplb_core.backend import Cancelled

INTERVAL_S = 0.05
"""Seconds between two looks."""

_PARK_AFTER = 40  # looks without a blocking call, two seconds


class BlockedCallWatch:
    """Severs a group when what a blocked call waits for was cancelled, or when its limit has run out.

    gloo's waits can be neither polled nor cut into slices, and NCCL blocks the host while a pair of ranks connects. The
    thread sleeps for good while nothing blocks.

    Parameters
    ----------
    cancelled : callable
        See `eplb_core.backend.BackendContext`; called in the watch's thread, never while the watched thread runs.
    sever : callable
        Makes the blocked call fail.
    """

    def __init__(self, cancelled: Callable[[], Cancelled | None], sever: Callable[[], None]) -> None:
        self._cancelled = cancelled
        self._sever = sever
        self._condition = threading.Condition()
        self._until_s: float | None = None
        self._parked = False
        self._closed = False
        self.reason: Cancelled | None = None
        """Why a call was cancelled."""
        self.failure: Exception | None = None
        """What `cancelled` raised, which cancels as well."""
        self.timed_out = False
        """Did a limit run out?"""
        # A daemon, so that a store that hangs in `cancelled` cannot keep the process; `close` joins it otherwise.
        self._thread = threading.Thread(target=self._run, name="eplb-nccl-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def until(self, deadline_s: float) -> Iterator[None]:
        """Watch what runs inside, until a moment on the monotonic clock."""
        with self._condition:
            self._until_s = deadline_s
            if self._parked:
                self._condition.notify()
        try:
            yield
        finally:
            with self._condition:  # not before a look in progress is over
                self._until_s = None

    @property
    def watching(self) -> bool:
        """Is a call in progress?"""
        return self._until_s is not None

    @property
    def acted(self) -> bool:
        """Was the group severed from here?"""
        return self.timed_out or self.reason is not None or self.failure is not None

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
                idle = 0 if self._until_s is not None else idle + 1
                if self._until_s is not None and not self.acted:
                    self._look(self._until_s)

    def _look(self, deadline_s: float) -> None:
        try:
            self.reason = self._cancelled()
        except Exception as error:  # whatever it is, the watched thread raises it
            self.failure = error
        self.timed_out = not self.acted and time.monotonic() > deadline_s
        if self.acted:
            self._sever()
