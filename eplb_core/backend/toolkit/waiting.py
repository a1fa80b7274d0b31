"""Waits that poll: a limit, growing pauses, and both together with a check for cancellation."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from eplb_core.backend.protocol import BackendContext
from eplb_core.backend.toolkit.failures import cancelled_error, name_ranks, stalled_error

logger = logging.getLogger("eplb_core")


class Deadline:
    """A limit in time, shared by the steps of one wait.

    Parameters
    ----------
    timeout_s : float
        Seconds from now.

    Examples
    --------
    >>> deadline = Deadline(60.0)
    >>> deadline.over, deadline.left_s <= 60.0
    (False, True)
    >>> Deadline(0.0).over
    True
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the deadline was made."""
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.timeout_s - self.elapsed_s)

    @property
    def over(self) -> bool:
        """Has it run out?"""
        return self.elapsed_s >= self.timeout_s


class Backoff:
    """The pauses of a polling loop, each longer than the one before it, up to a longest.

    Parameters
    ----------
    first_s, longest_s : float
        Seconds. Start short when the event is microseconds away, longer when it depends on other ranks.
    factor : float
        Growth from one pause to the next.
    spin_s : float
        Seconds, from the first pause on, in which the loop spins instead of sleeping.

    Examples
    --------
    >>> backoff = Backoff(first_s=1e-4, longest_s=3e-4, factor=2.0)
    >>> [backoff.pause() for _ in range(3)]
    [0.0001, 0.0002, 0.0003]
    """

    def __init__(
        self, first_s: float = 20e-6, longest_s: float = 1e-3, factor: float = 1.5, *, spin_s: float = 0.0
    ) -> None:
        self._next_s = first_s
        self._longest_s = longest_s
        self._factor = factor
        self._spin_s = spin_s
        self._spins_until_s: float | None = None

    def pause(self, at_most_s: float = float("inf")) -> float:
        """Sleep, at most so long; return the intended seconds."""
        if self._spin_s:
            now = time.monotonic()
            if self._spins_until_s is None:
                self._spins_until_s = now + self._spin_s
            if now < self._spins_until_s:
                return 0.0
        pause_s = min(self._next_s, at_most_s)
        time.sleep(pause_s)
        self._next_s = min(self._factor * self._next_s, self._longest_s)
        return pause_s


class Wait:
    """One polling wait of a backend: bounded, with growing pauses, and ended when the core cancels.

    Parameters
    ----------
    context : BackendContext
        Its ``cancelled()`` is consulted; ``rank`` goes into the log.
    timeout_s : float
        Limit, seconds.
    label : str
        Leading word of the backend's errors.
    where : str
        Layer and phase, such as ``"layer 3, phase wait"``.
    backoff : Backoff or None
        None takes the default.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> from eplb_core.backend import Cancelled
    >>> answers = iter([None, None, Cancelled("rank 2 aborted layer 3")])
    >>> context = SimpleNamespace(rank=0, cancelled=lambda: next(answers))
    >>> wait = Wait(context, 60.0, label="mine", where="layer 3, phase wait")
    >>> polls = 0
    >>> while polls < 10:  # until what is waited for is there
    ...     polls += 1
    ...     wait.pause([1])
    Traceback (most recent call last):
        ...
    eplb_core.errors.classes.TransferError: mine transfer failed with state=cancelled rank 2 aborted layer 3 \
(layer 3, phase wait for rank 1). [EPLB-T001]
    >>> polls
    3
    """

    def __init__(
        self, context: BackendContext, timeout_s: float, *, label: str, where: str, backoff: Backoff | None = None
    ) -> None:
        self.deadline = Deadline(timeout_s)
        self._context = context
        self._label = label
        self._where = where
        self._backoff = backoff or Backoff()
        self._has_warned = False

    def pause(self, waiting_for: str | Iterable[int], backoff: Backoff | None = None) -> None:
        """Check, then sleep a little.

        Parameters
        ----------
        waiting_for : str or iterable of int
            Ranks, or a text, that say what is still missing.
        backoff : Backoff or None
            Back-off of a step that needs pauses of its own; None takes the wait's.

        Raises
        ------
        TransferError
            EPLB-T001 with ``state="cancelled"``.
        StalledError
            EPLB-T002.
        """
        self.check(waiting_for)
        (backoff or self._backoff).pause(self.deadline.left_s)

    def check(self, waiting_for: str | Iterable[int]) -> None:
        """Raise if the wait was cancelled or its limit ran out; log once, half-way, what it waits for."""
        cancelled = self._context.cancelled()
        if cancelled is not None:
            raise cancelled_error(self._label, cancelled, self._where, _named(waiting_for))
        elapsed_s = self.deadline.elapsed_s
        if elapsed_s >= self.deadline.timeout_s:
            raise stalled_error(self._label, elapsed_s, self._where, _named(waiting_for))
        if not self._has_warned and elapsed_s >= self.deadline.timeout_s / 2:
            self._has_warned = True
            named = _named(waiting_for)
            rank, where = self._context.rank, f"{self._where} over {self._label}"
            logger.warning("rank %d has waited %.1f s for %s, in %s", rank, elapsed_s, named, where)


def _named(waiting_for: str | Iterable[int]) -> str:
    return waiting_for if isinstance(waiting_for, str) else name_ranks(waiting_for)
