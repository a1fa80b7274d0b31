"""How long a rank waits for others: a limit that runs only while its own engine goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from eplb_core.errors import EplbError, error_for

if TYPE_CHECKING:
    from eplb_core.balancing.progress import Progress
    from eplb_core.balancing.promise import PromiseBook

logger = logging.getLogger("eplb_core")

_STEPS_APART = 2
"""Engines that meet in an all-to-all are a step apart at most, and one more while ``step()`` is under way."""


class Patience:
    """The limit of one wait for other ranks' workers.

    A worker may rightly wait for its engine, and an engine without requests takes no step for hours. So a limit runs
    only once this rank's own engine is so far on that the others' must have come to the step they wait for.

    Parameters
    ----------
    book : PromiseBook
        Counts the engine's steps.
    progress : Progress
        Is told for whom the wait is.
    step : int or None
        What the others' workers may be waiting for; None: nothing, so the limit runs at once.
    timeout_s : float
        The limit, seconds.
    where : str
        For texts: "layer 5, phase vote".
    """

    def __init__(self, book: PromiseBook, progress: Progress, step: int | None, timeout_s: float, where: str) -> None:
        self._book = book
        self._progress = progress
        self._from_step = None if step is None else step + _STEPS_APART
        self._timeout_s = timeout_s
        self._where = where
        self._began_s = time.monotonic()
        self._runs_since_s: float | None = None if step is not None else self._began_s
        self._asked = False

    def worn_out(self, missing: Callable[[], list[int]]) -> EplbError | None:
        """Return the error of a wait that is over its limit, if it is; ask for whom it is when half of it is over."""
        now = time.monotonic()
        if self._runs_since_s is None:
            if self._from_step is not None and self._book.step >= self._from_step:
                self._runs_since_s = now
            return None
        waited_s = now - self._runs_since_s
        if not self._asked and waited_s > self._timeout_s / 2:
            self._asked = True
            self._progress.waiting_for = tuple(missing())
            logger.warning(
                "The load balancer's worker has waited %.1f s for %s, in %s", waited_s, self._whom(), self._where
            )
        if waited_s <= self._timeout_s:
            return None
        self._progress.waiting_for = tuple(missing())
        return error_for("EPLB-T002", seconds=waited_s, where=self._where, waiting_for=self._whom())

    def _whom(self) -> str:
        ranks = self._progress.waiting_for
        named = ", ".join(f"rank {rank}" for rank in ranks[:8])
        return (named + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")) or "a decision that nobody took"
