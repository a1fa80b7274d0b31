"""Ranks that a test drives: it talks to them, signals them, and waits for how each ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from eplb_core.launch.processes import Processes
from eplb_core.launch.rank import Rank

__all__ = ["Outcome", "Rank", "Ranks", "run_ranks"]

_ENDING_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a rank ended.

    Parameters
    ----------
    value : object
        What its function returned; None when it did not return.
    error : str or None
        Traceback of what it raised.
    killed : bool
        The process ended without a value or an error.
    """

    value: Any = None
    error: str | None = None
    killed: bool = False


class Ranks:
    """N processes that run one function; a context manager that leaves none behind.

    Parameters
    ----------
    world_size : int
        Number of processes.
    function : callable
        ``function(rank: Rank, *args)``, importable by the children; its value must pickle.
    *args
        Passed on; they must pickle.
    env : Mapping[str, str] or None
        Set in the children before the function's module is imported, beside the environment of this process as it is
        now.
    daemon : bool
        Make them daemonic, which may start no processes of their own.

    Examples
    --------
    >>> def hello(rank):
    ...     return rank.rank
    >>> with Ranks(2, hello) as ranks:                    # doctest: +SKIP
    ...     [outcome.value for outcome in ranks.join(30)]
    [0, 1]
    """

    def __init__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        daemon: bool = False,
    ) -> None:
        self.world_size = world_size
        self._outcomes: dict[int, Outcome] = {}
        self._notes: dict[int, list[Any]] = {rank: [] for rank in range(world_size)}
        self._processes = Processes(world_size, function, args, env=env, daemon=daemon)

    def pid(self, rank: int) -> int:
        """Return a rank's process id."""
        return self._processes.pid(rank)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        os.kill(self.pid(rank), number)

    def tell(self, rank: int, value: Any) -> None:
        """Send a note to one rank (see `Rank.listen`)."""
        self._processes.send(rank, value)

    def hear(self, rank: int, timeout_s: float = 60.0) -> Any:
        """Wait for the next note of one rank (see `Rank.tell`)."""
        until = time.monotonic() + timeout_s
        while not self._notes[rank]:
            if rank in self._outcomes:
                raise AssertionError(f"rank {rank} ended without the note: {self._outcomes[rank]}")
            if not self._receive([rank], max(0.0, until - time.monotonic())):
                raise TimeoutError(f"rank {rank} sent no note within {timeout_s} s")
        return self._notes[rank].pop(0)

    def join(self, timeout_s: float, *, without: tuple[int, ...] = ()) -> list[Outcome]:
        """Wait until every rank ended, except those in `without`, and return how.

        Raises
        ------
        TimeoutError
            One did not end in time; it names them.
        """
        until = time.monotonic() + timeout_s
        awaited = [rank for rank in range(self.world_size) if rank not in without]
        while late := [rank for rank in awaited if rank not in self._outcomes]:
            if not self._receive(late, max(0.0, until - time.monotonic())):
                raise TimeoutError(f"ranks {late} did not end within {timeout_s} s")
        return [self._outcomes.get(rank, Outcome(killed=True)) for rank in range(self.world_size)]

    def values(self, timeout_s: float) -> list[Any]:
        """Wait for all ranks and return their values; the first failure is an AssertionError with its traceback."""
        outcomes = self.join(timeout_s)
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None or outcome.killed:
                raise AssertionError(f"rank {rank} failed:\n{outcome.error or 'it ended without a word'}")
        return [outcome.value for outcome in outcomes]

    def _receive(self, ranks: list[int], timeout_s: float) -> bool:
        """Sort what these ranks say next; False after the limit."""
        messages = self._processes.receive(ranks, timeout_s)
        for rank, kind, value in messages:
            if kind == "note":
                self._notes[rank].append(value)
            elif kind == "value":
                self._outcomes.setdefault(rank, Outcome(value=value))
            elif kind == "failed":
                self._outcomes.setdefault(rank, Outcome(error=value.trace))
            else:
                self._outcomes.setdefault(rank, Outcome(killed=True))
        return bool(messages)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.end(_ENDING_S if kind is None else 0.0)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run one function on N ranks and return their values, in rank order.

    Raises
    ------
    AssertionError
        A rank raised or died; the message holds its traceback.
    TimeoutError
        A rank did not end in time; all are killed.
    """
    with Ranks(world_size, function, *args, env=env) as ranks:
        return ranks.values(timeout_s)
