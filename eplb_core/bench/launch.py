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

Connect = Callable[[], Any]
"""``connect()``: a ``torch.distributed`` store of this launch."""

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
    lifeline_fd: int
    events_fd: int
    stderr_fd: int
    pending: bytes = b""
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=_STDERR_LINES))
    open: bool = True
    finished: bool = False
    failure: RankFailure | None = None

    def fails(self, error: str, message: str) -> None:
        """Keep the first thing that went wrong."""
        if self.failure is None:
            self.failure = RankFailure(self.number, error, "", message, "\n".join(self.stderr))


def launch(
    target: str,
    payload: Mapping[str, Any],
    num_ranks: int,
    *,
    limit_s: float,
    grace_s: float = 5.0,
    ending_s: float = 30.0,
    on_event: Callable[[int, str, dict[str, Any]], None],
) -> tuple[RankFailure, ...]:
    """Run a function on N ranks and return when all are done, failed or killed.

    Each rank is a fresh interpreter that runs ``function(payload, rank, world_size, connect, emit)``, where
    ``connect()`` returns a client of a store of this launch. Rank 0 hosts it, and its process stays until all others
    are done. A rank ends with this process, however this process ends: it holds one end of a pipe whose other end
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
    ending_s : float
        Seconds that processes get to end once all ranks have done their work.
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
    ranks: list[_Rank] = []
    failures: list[RankFailure] = []

    def notice() -> None:
        failures.extend(rank.failure for rank in ranks if rank.failure is not None and rank.failure not in failures)

    limit = _Limit(limit_s)
    try:
        _start(ranks, target, payload, num_ranks)
        for _ in _listen(ranks, limit, on_event):
            notice()
            if failures:
                limit.shorten(grace_s)
        late = "it did not answer the failure of another rank" if failures else f"it still ran after {limit_s:g} s"
        for rank in ranks:
            if rank.open and not rank.finished:
                rank.fails("Killed", late)
        notice()
        if not failures:
            _let_go(ranks[0])
            _await_end(ranks, ending_s)
            notice()
    finally:
        for rank in ranks:
            _end(rank)
    return tuple(failures)


class _Limit:
    """A point in time that can come closer."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())

    def shorten(self, seconds: float) -> None:
        self._at = min(self._at, time.monotonic() + seconds)


def _listen(ranks: list[_Rank], limit: _Limit, on_event: Callable[[int, str, dict[str, Any]], None]) -> Iterator[None]:
    """Take in what ranks say until all have closed their pipes or the limit is reached; yields after each piece."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.events_fd, selectors.EVENT_READ, rank)
            selector.register(rank.stderr_fd, selectors.EVENT_READ, rank)
        while any(rank.open for rank in ranks) and limit.left_s > 0:
            for key, _ in selector.select(timeout=limit.left_s):
                rank = key.data
                chunk = os.read(key.fd, 1 << 16)
                if key.fd == rank.stderr_fd:
                    rank.stderr.extend(chunk.decode(errors="replace").splitlines())
                elif chunk:
                    _take_events(rank, chunk, on_event)
                else:
                    rank.open = False
                    if not rank.finished:
                        _find_out_what_ended(rank)
                if not chunk:
                    selector.unregister(key.fd)
            yield


def _start(ranks: list[_Rank], target: str, payload: Mapping[str, Any], num_ranks: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = {"target": target, "payload": dict(payload), "world_size": num_ranks, "port": server.getsockname()[1]}
        # Rank 0 takes the listening socket over: no other process can take the port in between. One by one, so that
        # those that were started are known when the next cannot be.
        ranks.extend(
            _start_one({**job, "rank": number, "listen_fd": None if number else server.fileno()})
            for number in range(num_ranks)
        )


def _start_one(job: Mapping[str, Any]) -> _Rank:
    child_stdin, lifeline_fd = os.pipe()
    events_fd, child_events = os.pipe()
    stderr_fd, child_stderr = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, *_same_flags(), "-m", "eplb_core.bench.rank_process"],
            stdin=child_stdin,
            stdout=subprocess.DEVNULL,
            stderr=child_stderr,
            pass_fds=[fd for fd in (child_events, job["listen_fd"]) if fd is not None],
            env={"GLOO_SOCKET_IFNAME": _loopback(), **os.environ},
            start_new_session=True,  # Ctrl-C is for this process; it ends the ranks itself
        )
    except OSError as error:
        for fd in (lifeline_fd, events_fd, stderr_fd):
            os.close(fd)
        raise BenchError("EPLB-B002", 0, f"rank {job['rank']} could not be started: {error}") from error
    finally:
        for fd in (child_stdin, child_events, child_stderr):
            os.close(fd)
    with suppress(BrokenPipeError):  # a rank that ended already shows at its other pipes
        os.write(lifeline_fd, json.dumps({**job, "events_fd": child_events}).encode() + b"\n")
    return _Rank(job["rank"], process, lifeline_fd, events_fd, stderr_fd)


def _same_flags() -> list[str]:
    return ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []


def _loopback() -> str:
    """Name the loopback interface: gloo would ask for the host's name, which containers often cannot resolve."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


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


def _find_out_what_ended(rank: _Rank) -> None:
    """Say why a rank closed its pipe without a word: that happens when its process ends, so this waits for little."""
    try:
        status = rank.process.wait(_CLOSING_S)
    except subprocess.TimeoutExpired:
        rank.fails("Died", "it closed its pipe and said no more")
        return
    os.set_blocking(rank.stderr_fd, False)
    with suppress(BlockingIOError):  # a process of its own may keep the pipe open
        while chunk := os.read(rank.stderr_fd, 1 << 16):
            rank.stderr.extend(chunk.decode(errors="replace").splitlines())
    rank.fails("Died", _status_text(status))


def _let_go(host: _Rank) -> None:
    """Tell the rank that hosts the store that nobody needs it any more."""
    with suppress(BrokenPipeError):  # it ended already, and how is seen next
        os.write(host.lifeline_fd, b"leave\n")


def _await_end(ranks: list[_Rank], ending_s: float) -> None:
    """Wait until the processes of finished ranks have ended, and ended well."""
    limit = _Limit(ending_s)
    for rank in ranks:
        try:
            status = rank.process.wait(limit.left_s)
        except subprocess.TimeoutExpired:
            rank.fails("Killed", "it had done its work, but its process did not end")
        else:
            if status:
                rank.fails("Died", f"it had done its work, then {_status_text(status)}")


def _status_text(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"its process was ended by {name}"


def _end(rank: _Rank) -> None:
    """End a rank's process whatever state it is in, and give back what it held here."""
    os.close(rank.lifeline_fd)
    if rank.failure is not None or not rank.finished:
        rank.process.kill()
    try:
        rank.process.wait(_CLOSING_S)
    except subprocess.TimeoutExpired:
        rank.process.kill()
        rank.process.wait()
    os.close(rank.events_fd)
    os.close(rank.stderr_fd)
