"""A launch that runs by itself: start ranks, hand on what they report, end them on a failure or at a limit."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from eplb_core.launch.failure import RankFailure
from eplb_core.launch.processes import Processes

_CLOSING_S = 2.0


def launch(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    limit_s: float,
    grace_s: float = 5.0,
    ending_s: float = 30.0,
    on_note: Callable[[int, Any], None],
) -> tuple[RankFailure, ...]:
    """Run a function on N ranks and return when all are done, failed or killed.

    Parameters
    ----------
    function : callable
        ``function(rank: Rank, *args)``, run by a process for each rank, which ends with finalization.
    *args
        Passed on; they must pickle.
    num_ranks : int
        Processes to start.
    limit_s : float
        Seconds after which ranks that are still running are killed.
    grace_s : float
        Seconds that the others get after the first failure to say what they saw.
    ending_s : float
        Seconds that processes get to end once all ranks have done their work.
    on_note : callable
        ``on_note(rank, value)``, called here for everything that ranks tell.

    Returns
    -------
    tuple of RankFailure
        In the order in which they happened; empty when every rank returned.

    Raises
    ------
    BenchError
        EPLB-B002: a rank cannot be started; those before it are killed.
    KeyboardInterrupt
        After all ranks have been killed.
    """
    # gloo would ask for the host's name, which containers often cannot resolve.
    env = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or _loopback()}
    ranks = Processes(num_ranks, function, args, env=env, quiet=True, finalize=True)
    patience_s = 0.0
    try:
        failures = _listen(ranks, limit_s, grace_s, on_note)
        if not failures:
            failures = _await_end(ranks, num_ranks, ending_s)
        patience_s = 0.0 if failures else _CLOSING_S
    finally:
        ranks.end(patience_s)
    return tuple(failures.values())


def _listen(
    ranks: Processes, limit_s: float, grace_s: float, on_note: Callable[[int, Any], None]
) -> dict[int, RankFailure]:
    """Take in what ranks say until all have closed their pipes or the limit is reached; the first failure of each."""
    failures: dict[int, RankFailure] = {}
    finished: set[int] = set()
    until = time.monotonic() + limit_s
    while ranks.open and (left_s := until - time.monotonic()) > 0:
        for rank, kind, value in ranks.receive(ranks.open, left_s):
            if kind == "note":
                on_note(rank, value)
            elif kind == "value":
                finished.add(rank)
            elif kind == "failed":
                failures.setdefault(rank, value)
            elif rank not in finished and rank not in failures:
                failures[rank] = _death(ranks, rank)
        if failures:
            until = min(until, time.monotonic() + grace_s)
    late = "it did not answer the failure of another rank" if failures else f"it still ran after {limit_s:g} s"
    for rank in sorted(ranks.open - finished):
        failures.setdefault(rank, _failure(ranks, rank, "Killed", late))
    return failures


def _await_end(ranks: Processes, num_ranks: int, ending_s: float) -> dict[int, RankFailure]:
    """Wait until the processes of finished ranks have ended, and return which did not, or not well."""
    failures = {}
    until = time.monotonic() + ending_s
    for rank in range(num_ranks):
        status = ranks.status(rank, max(0.0, until - time.monotonic()))
        if status is None:
            failures[rank] = _failure(ranks, rank, "Killed", "it had done its work, but its process did not end")
        elif status:
            failures[rank] = _failure(ranks, rank, "Died", f"it had done its work, then {_status_text(status)}")
    return failures


def _death(ranks: Processes, rank: int) -> RankFailure:
    """Say why a rank closed its pipe without a word: that happens when its process ends, so this waits for little."""
    status = ranks.status(rank, _CLOSING_S)
    text = "it closed its pipe and said no more" if status is None else _status_text(status)
    return _failure(ranks, rank, "Died", text)


def _failure(ranks: Processes, rank: int, error: str, message: str) -> RankFailure:
    return RankFailure(rank, error, "", message, ranks.last_words(rank))


def _status_text(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"its process was ended by {name}"


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")
