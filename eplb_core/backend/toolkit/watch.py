"""Ends blocking calls that cannot be polled: a thread checks for cancellation and makes the call fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eplb_core.backend.protocol import Cancelled
from eplb_core.backend.toolkit.waiting import Deadline

INTERVAL_S = 0.05
"""Seconds between two looks."""

_PARK_AFTER = 40  # looks without a blocking call, two seconds


class CancelWatch:
    """Severs a transport when a blocked call is cancelled or its limit has run out.

    For libraries whose waits can be neither polled nor cut into slices (gloo's), and calls that block the host (NCCL's,
    while a pair of ranks connects). Otherwise a rank that is blocked on a slow peer would learn of an abort
    elsewhere only when its own limit runs out. The thread sleeps while nothing blocks, and first checks up to 50 ms
    after a call began, so that short calls cost nothing.

    Parameters
    ----------
    cancelled : callable
        ``context.cancelled``; called in the watch's thread, never while the watched thread runs.
    sever : callable
        Makes the blocked call fail; called in the watch's thread, once.
    name : str
        Name of the watching thread.

    Attributes
    ----------
    told : Cancelled or None
        Why a call was cancelled.
    failure : Exception or None
        Exception that `cancelled` raised; it ends the call as well.
    timed_out : bool
        Did a limit run out?

    Examples
    --------
    >>> import threading
    >>> from eplb_core.backend import Cancelled
    >>> severed = threading.Event()
    >>> watch = CancelWatch(lambda: Cancelled("rank 2 aborted layer 3"), severed.set, name="mine-watch")
    >>> with watch.during(Deadline(60.0)):
    ...     ended = severed.wait(5.0)  # a call that nothing else would end
    >>> ended, watch.told.reason
    (True, 'rank 2 aborted layer 3')
    >>> watch.close()
    """

    def __init__(
        self, cancelled: Callable[[], Cancelled | None], sever: Callable[[], None], *, name: str = "eplb-cancel-watch"
    ) -> None:
        self._cancelled = cancelled
        self._sever = sever
        self._condition = threading.Condition()
        self._is_watching = False
        self._deadline: Deadline | None = None
        self._parked = False
        self._closed = False
        self.told: Cancelled | None = None
        self.failure: Exception | None = None
        self.timed_out = False
        # A daemon, so that a store that hangs in `cancelled` cannot keep the process; `close` joins it otherwise.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @contextmanager
    def during(self, deadline: Deadline | None = None) -> Iterator[None]:
        """Watch the block; without a deadline only for cancellation."""
        with self._condition:
            self._deadline = deadline
            self._is_watching = True
            if self._parked:
                self._condition.notify()
        try:
            yield
        finally:
            with self._condition:  # not before a look in progress is over
                self._is_watching = False

    @property
    def is_watching(self) -> bool:
        """Is a call in progress?"""
        return self._is_watching

    @property
    def has_acted(self) -> bool:
        """Was the transport severed from here?"""
        return self.timed_out or self.told is not None or self.failure is not None

    def close(self, timeout_s: float = 0.5) -> None:
        """Stop the thread; a check that hangs is left to end by itself."""
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
                idle = 0 if self._is_watching else idle + 1
                if self._is_watching and not self.has_acted:
                    self._look()

    def _look(self) -> None:
        try:
            self.told = self._cancelled()
        except Exception as error:  # whatever it is, the watched thread raises it
            self.failure = error
        self.timed_out = not self.has_acted and self._deadline is not None and self._deadline.over
        if self.has_acted:
            self._sever()
