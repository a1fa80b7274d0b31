"""A call that may block too long, made in a thread of its own that can be let go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Attempt(Generic[T]):
    """One call, begun in a thread of its own, that can be let go.

    Notes
    -----
    Python cannot end a thread that is inside a C function. When a call is late, nobody waits for its thread any more,
    and it does not keep the process from ending. A result that comes later goes to ``discard``. The call must not hold
    the interpreter's lock while it blocks.
    """

    def __init__(self, operation: Callable[[], T], what: str, discard: Callable[[T], object] | None = None) -> None:
        self._operation: Callable[[], T] | None = operation
        self._discard = discard
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._gone = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name=f"eplb {what}", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the call, at most so long; False when it is still running."""
        return self._over.wait(timeout_s)

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; once, and only after `wait` said True."""
        if self._error is not None:
            raise self._error
        return self._results.pop()

    def let_go(self) -> None:
        """Give the call up, whether it is over or not."""
        with self._lock:
            self._gone = True
            late, self._results = self._results, []
        self._drop(late)

    def _run(self) -> None:
        operation, self._operation = self._operation, None
        if operation is None:
            return
        try:
            result = [operation()]
        except BaseException as error:  # raised by `result`, in the thread that asks
            self._error = error
            result = []
        with self._lock:
            late = result if self._gone else []
            self._results = [] if self._gone else result
        self._over.set()
        self._drop(late)

    def _drop(self, late: list[T]) -> None:
        if self._discard is not None:
            for result in late:
                self._discard(result)


def within(timeout_s: float, operation: Callable[[], T], what: str) -> T:
    """Return what a call returns, or let go of it at the limit with a TimeoutError."""
    attempt = Attempt(operation, what)
    try:
        over = attempt.wait(timeout_s)
    except BaseException:
        attempt.let_go()
        raise
    if not over:
        attempt.let_go()
        raise TimeoutError(f"{what} took longer than {timeout_s:g} s")
    return attempt.result()
