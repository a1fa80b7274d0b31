"""Ranks as processes on loopback: started together, listened to, ended by pid on a failure or at a limit."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from eplb_core.errors import BenchError

Emit = Callable[[str, Mapping[str, Any]], None]
"""``emit(kind, data)``: how a rank reports; `data` must go into JSON."""

_STDERR_LINES = 8
_CLOSING_S = 2.0


@dataclass(frozen=True)
class RankFailure:
    """Why a rank did not finish.

    Parameters
    ----------
    rank : int
        Which.
    error : str
        Class of the exception, or "Died" and "Killed" for a process that could not say why.
    code : str
        Code of the catalogue; empty for what is no `EplbError`.
    message : str
        Text of the error.
    trace : str
        Traceback, or the last lines that the process wrote to stderr.
    """

    rank: int
    error: str
    code: str
    message: str
    trace: str


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    events_fd: int
    pending: bytes = b""
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=_STDERR_LINES))
    open_pipes: int = 2
    finished: bool = False
    failure: RankFailure | None = None
    counted: bool = False


def launch(
    target: str,
    payload: Mapping[str, Any],
    num_ranks: int,
    *,
    limit_s: float,
    grace_s: float = 5.0,
    on_event: Callable[[int, str, dict[str, Any]], None],
) -> tuple[RankFailure, ...]:
    """Run a function on N ranks and return when all are done, failed or killed.

    Each rank is a fresh interpreter that runs ``function(payload, rank, world_size, store, emit)`` with a store of its
    own launch. It ends with this process, however this process ends: it holds one end of a pipe whose other end
    closes then.

    Parameters
    ----------
    target : str
        ``"module:function"``.
    payload : mapping
        Argument for the function; must go into JSON.
    num_ranks : int
        Processes to start.
    limit_s : float
        Seconds after which ranks that are still running are killed.
    grace_s : float
        Seconds that the others get after the first failure to say what they saw.
    on_event : callable
        ``on_event(rank, kind, data)``, called here for everything that ranks emit.

    Returns
    -------
    tuple of RankFailure
        In the order in which they happened; empty when every rank returned.

    Raises
    ------
    KeyboardInterrupt
        After all ranks have been killed.
    """
    deadline = time.monotonic() + limit_s
    ranks: list[_Rank] = []
    failures: list[RankFailure] = []
    with selectors.DefaultSelector() as selector:
        try:
            _start(ranks, target, payload, num_ranks)
            for rank in ranks:
                selector.register(rank.events_fd, selectors.EVENT_READ, (rank, _take_events))
                selector.register(_stderr_of(rank), selectors.EVENT_READ, (rank, _take_stderr))
            while selector.get_map():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    failures += _overdue(ranks, limit_s, after_failure=bool(failures))
                    break
                for key, _ in selector.select(timeout=left_s):
                    rank, take = key.data
                    chunk = os.read(key.fd, 1 << 16)
                    take(rank, chunk, on_event)
                    if not chunk:
                        selector.unregister(key.fd)
                        rank.open_pipes -= 1
                    failure = _failure_of(rank)
                    if failure is not None and not rank.counted:
                        rank.counted = True
                        failures.append(failure)
                if failures or all(rank.finished for rank in ranks):
                    deadline = min(deadline, time.monotonic() + grace_s)
        finally:
            for rank in ranks:
                _end(rank)
    return tuple(failures)


def _start(ranks: list[_Rank], target: str, payload: Mapping[str, Any], num_ranks: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Rank 0 takes the listening socket over: no other process can take the port in between.
        job = {"target": target, "payload": dict(payload), "world_size": num_ranks, "port": server.getsockname()[1]}
        for number in range(num_ranks):
            events_fd, child_fd = os.pipe()
            listen_fd = server.fileno() if number == 0 else None
            try:
                process = subprocess.Popen(
                    [sys.executable, *_same_flags(), "-m", "eplb_core.bench.rank_process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=[child_fd] if listen_fd is None else [child_fd, listen_fd],
                    env={"GLOO_SOCKET_IFNAME": _loopback(), **os.environ},
                    start_new_session=True,  # Ctrl-C is for this process; it ends the ranks itself
                )
            except OSError as error:
                os.close(events_fd)
                raise BenchError("EPLB-B002", 0, f"rank {number} could not be started: {error}") from error
            finally:
                os.close(child_fd)
            ranks.append(_Rank(number, process, events_fd))
            line = json.dumps({**job, "rank": number, "events_fd": child_fd, "listen_fd": listen_fd})
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # that it has ended is told by its pipes
                    process.stdin.write(line.encode() + b"\n")
                    process.stdin.flush()


def _same_flags() -> list[str]:
    return ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []


def _loopback() -> str:
    """Name the loopback interface: gloo would ask for the host's name, which containers often cannot resolve."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


def _stderr_of(rank: _Rank) -> int:
    if rank.process.stderr is None:
        raise BenchError("EPLB-B002", 0, f"rank {rank.number} has no stderr")
    return rank.process.stderr.fileno()


def _take_events(rank: _Rank, chunk: bytes, on_event: Callable[[int, str, dict[str, Any]], None]) -> None:
    *lines, rank.pending = (rank.pending + chunk).split(b"\n")
    for line in lines:
        event = json.loads(line)
        kind, data = event["kind"], event["data"]
        if kind == "finished":
            rank.finished = True
        elif kind == "failed":
            rank.failure = RankFailure(rank.number, **data)
        else:
            on_event(rank.number, kind, data)


def _take_stderr(rank: _Rank, chunk: bytes, on_event: Callable[[int, str, dict[str, Any]], None]) -> None:  # noqa: ARG001
    rank.stderr.extend(chunk.decode(errors="replace").splitlines())


def _failure_of(rank: _Rank) -> RankFailure | None:
    """Return what a rank said of its failure, or, once its pipes are closed because it ended, what ended it."""
    if rank.failure is None and not rank.finished and not rank.open_pipes:
        try:
            status = rank.process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            status = rank.process.wait()
        rank.failure = RankFailure(rank.number, "Died", "", _status_text(status), "\n".join(rank.stderr))
    return rank.failure


def _status_text(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status} and said no more"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"its process was ended by {name}"


def _overdue(ranks: list[_Rank], limit_s: float, *, after_failure: bool) -> Iterator[RankFailure]:
    for rank in ranks:
        if not rank.open_pipes or rank.counted:
            continue
        if rank.finished:
            why = "it had done its work, but its process did not end"
        elif after_failure:
            why = "it did not answer the failure of another rank"
        else:
            why = f"it still ran after {limit_s:g} s"
        yield RankFailure(rank.number, "Killed", "", why, "\n".join(rank.stderr))


def _end(rank: _Rank) -> None:
    """End a rank's process whatever state it is in, and give back what it held here."""
    if rank.process.stdin is not None:
        with suppress(BrokenPipeError):  # that it has ended is told by its pipes
            rank.process.stdin.close()
    if not rank.finished or rank.open_pipes:
        rank.process.kill()
    try:
        rank.process.wait(_CLOSING_S)
    except subprocess.TimeoutExpired:
        rank.process.kill()
        rank.process.wait()
    os.close(rank.events_fd)
    if rank.process.stderr is not None:
        rank.process.stderr.close()
