"""The launcher: processes that run one function, heard through pipes, ended by pid, and never left behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from eplb_core.errors import BenchError
from eplb_core.launch.messages import MessageReader
from eplb_core.launch.rank import Job, run

_PRELOAD = ["torch", "torch.distributed", "eplb_core.communicator", "eplb_core.launch.rank"]
_PIECE_NBYTES = 1 << 16
_STDERR_LINES = 8
_KILLED_S = 10.0

Message = tuple[int, str, Any]
"""(rank, kind, value): a "note", the "value" of the function, "failed" with a `RankFailure`, or "closed" at the end."""


class Processes:
    """N processes that run one function, and the store at which they meet; this process hosts it and outlives them.

    Parameters
    ----------
    world_size : int
        Number of processes.
    function : callable
        ``function(rank: Rank, *args)``, importable by the processes; arguments and value must pickle.
    args : tuple
        Passed on.
    env : mapping of str to str or None
        Set in the processes before the function's module is imported, beside the environment of this process.
    daemon : bool
        Make them daemonic, which may start no processes of their own.
    quiet : bool
        Drop what they print, and keep the last lines of stderr (`last_words`).
    finalize : bool
        End each process as an interpreter ends, exit handlers and finalization included, so that a library that
        crashes there is seen. Otherwise they end as `multiprocessing` ends processes: at once.

    Raises
    ------
    BenchError
        EPLB-B002: a process cannot be started.

    Notes
    -----
    A server process that has imported torch forks them: importing it anew in each would take most of the time of a
    short run.
    """

    def __init__(
        self,
        world_size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        env: Mapping[str, str] | None = None,
        daemon: bool = False,
        quiet: bool = False,
        finalize: bool = False,
    ) -> None:
        self._context: Any = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()  # it imports torch while this process does
        dist: Any = import_module("torch.distributed")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._stderr: dict[int, Connection] = {}
        self._lines: list[deque[str]] = [deque(maxlen=_STDERR_LINES) for _ in range(world_size)]
        self._readers = [MessageReader() for _ in range(world_size)]
        self._open = set(range(world_size))
        # All of the environment: the server that forks has the one of the first launch of this process.
        environment = {**os.environ, **(env or {})}
        job = Job(world_size, self._store.port, pickle.dumps((function, args)), environment, finalize)
        try:
            with _interrupts_held_back():
                for rank in range(world_size):
                    self._start(job, rank, daemon=daemon, quiet=quiet)
        except BaseException:
            self.end()
            raise

    @property
    def open(self) -> frozenset[int]:
        """Ranks that may still say something."""
        return frozenset(self._open)

    def pid(self, rank: int) -> int:
        """Return a rank's process id."""
        return int(self._processes[rank].pid)

    def send(self, rank: int, value: Any) -> None:
        """Send a note to one rank."""
        self._pipes[rank].send(value)

    def receive(self, ranks: Collection[int], timeout_s: float) -> list[Message]:
        """Wait until one of these ranks says or ends something, and return all of it; nothing after the limit."""
        until = time.monotonic() + timeout_s
        messages: list[Message] = []
        while not messages and (sources := self._sources(ranks)):
            ready = wait([*sources], max(0.0, until - time.monotonic()))
            if not ready:
                break
            for source in ready:
                rank, is_stderr = sources[source]
                piece = _read(source)
                if is_stderr:
                    self._keep(rank, piece)
                    continue
                messages.extend((rank, *message) for message in self._readers[rank].take(piece))
                if not piece:
                    self._open.discard(rank)
                    messages.append((rank, "closed", None))
            if time.monotonic() > until:  # stderr alone may have something at any time
                break
        return messages

    def status(self, rank: int, timeout_s: float) -> int | None:
        """Wait for the end of one rank's process and return its exit status, minus the signal's number after one."""
        self._processes[rank].join(timeout_s)
        status = self._processes[rank].exitcode
        return None if status is None else int(status)

    def last_words(self, rank: int) -> str:
        """Return the last lines that a rank has written to stderr so far; empty unless `quiet`."""
        while rank in self._stderr and self._stderr[rank].poll():
            self._keep(rank, _read(self._stderr[rank]))
        return "\n".join(self._lines[rank])

    def end(self, patience_s: float = 0.0) -> None:
        """End every process, whatever state it is in.

        Parameters
        ----------
        patience_s : float
            Seconds that each gets to end by itself.
        """
        for process in self._processes:
            process.join(patience_s)
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)  # a stopped process, too
        for process in self._processes:
            process.join(_KILLED_S)
        for pipe in [*self._pipes, *self._stderr.values()]:
            pipe.close()
        self._stderr = {}
        self._open = set()

    def _start(self, job: Job, rank: int, *, daemon: bool, quiet: bool) -> None:
        ours, theirs = self._context.Pipe()
        self._pipes.append(ours)
        stderr = None
        if quiet:
            self._stderr[rank], stderr = self._context.Pipe(duplex=False)
        process = self._context.Process(target=run, args=(job, rank, theirs, stderr), name=f"rank{rank}", daemon=daemon)
        try:
            process.start()
        except OSError as error:
            raise BenchError("EPLB-B002", 0, f"rank {rank} could not be started: {error}") from error
        finally:
            theirs.close()
            if stderr is not None:
                stderr.close()
        self._processes.append(process)

    def _sources(self, ranks: Collection[int]) -> dict[Any, tuple[int, bool]]:
        """Return what these ranks can be heard through: whose it is, and whether it is stderr."""
        pipes = {self._pipes[rank]: (rank, False) for rank in ranks if rank in self._open}
        # stderr alone is no reason to wait: a process that a rank started may keep it open for ever.
        return pipes and pipes | {pipe: (rank, True) for rank, pipe in self._stderr.items()}

    def _keep(self, rank: int, piece: bytes) -> None:
        """Keep what arrived through stderr."""
        self._lines[rank].extend(piece.decode(errors="replace").splitlines())
        if not piece:
            self._stderr.pop(rank).close()


def _read(pipe: Any) -> bytes:
    """Read what is there; empty at the end."""
    try:
        return os.read(pipe.fileno(), _PIECE_NBYTES)
    except ConnectionResetError:  # it died with a note unread
        return b""


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Hold Ctrl-C back until every process is started and known, so that each can be ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
