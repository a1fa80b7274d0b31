"""A thread that blocks inside gloo in its caller's place, so that the caller can let go of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LimitOverError
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger("eplb_core")


class Waiter:
    """One thread, which makes one call after the other.

    gloo's waits can be neither polled nor cut short. Closing the connections wakes them, except for a receive that is
    partly in and a send that is partly out: a peer that dies in the middle of a message leaves such a wait blocked for
    good. So no caller is ever inside one.

    The thread refers to the calls that it was given and to nothing else: whoever owns the waiter can be dropped.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # A daemon: one that is stuck must not keep the process, which ends at once and cleanly around it.
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name="eplb-gloo-waiter", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a call made after those submitted before.

        Parameters
        ----------
        call : callable
            May block; refers to no one who owns this waiter.

        Returns
        -------
        Future
            Of its result.
        """
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def close(self, limit_s: float, keep: object = None) -> bool:
        """End the thread after the calls submitted so far; whoever can wakes them before.

        Parameters
        ----------
        limit_s : float
            Seconds that it may take.
        keep : object
            Kept for the life of the process when the thread is still inside a call then: it must not be freed.

        Returns
        -------
        bool
            True when the thread has ended, False when it is left behind inside a call.
        """
        self._calls.put(None)
        if self._thread is not threading.current_thread():  # the collector runs finalizers on any thread
            self._thread.join(limit_s)
        if not self._thread.is_alive():
            return True
        if all(thread is not self._thread for thread, _ in _LEFT_BEHIND):
            _LEFT_BEHIND.append((self._thread, keep))
            logger.warning(
                "a thread is left inside gloo, in a call that does not return, with what it holds; %d in this process",
                left_behind(),
            )
        return False


def ended(future: Future[Any], limit_s: float) -> bool:
    """Wait for a call's end, whichever it is, at most `limit_s` seconds; say whether it has come."""
    try:
        future.exception(limit_s)
    except LimitOverError:  # the builtin TimeoutError only from Python 3.11 on
        return False
    return True


def left_behind() -> int:
    """Return the number of this process's threads that are inside gloo and that nobody waits for any more."""
    return sum(thread.is_alive() for thread, _ in _LEFT_BEHIND)


_LEFT_BEHIND: list[tuple[threading.Thread, object]] = []
"""Threads that were let go of, each with what must live as long as it may be inside: for the life of the process."""


def _serve(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (submitted := calls.get()) is not None:
        future, call = submitted
        try:
            future.set_result(call())
        except BaseException as error:  # whoever waits for the result raises it
            future.set_exception(error)
        del submitted, future, call  # while it idles it keeps nothing
