"""The processes of a history: ranks and the store's host, started, signalled, listened to, and ended by pid."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.lives.calls import Call, Command
from tests.lives.rank import serve
from tests.lives.worlds import Map, World

_START_LIMIT_S = 60.0
_PRELOAD = ["torch", "torch.distributed", "eplb_core.communicator", "tests.lives.rank"]
# multiprocessing reads how a child ended from a pipe, once: two histories of one process must not do so at a time.
_LOCK = threading.RLock()


class HarnessError(RuntimeError):
    """Nothing was found out: what starts and hears the ranks failed."""


class Process:
    """A child with a pipe.

    Parameters
    ----------
    label : str
        For people.
    target, args
        What it runs; the pipe is put in place of an argument that is None.
    """

    def __init__(self, label: str, target: Callable[..., None], *args: Any) -> None:
        self.label = label
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.pipe, theirs = context.Pipe()
        with _LOCK:
            self._process = context.Process(target=target, args=[theirs if arg is None else arg for arg in args])
            self._process.start()
        theirs.close()
        self.pid = int(self._process.pid or 0)
        self.stopped = False
        self.stops: list[tuple[float, float]] = []
        """When it was stopped: from, to."""

    def stop(self) -> None:
        """SIGSTOP."""
        if self.exit_code() is None:
            self.send_signal(signal.SIGSTOP)
            self.note_stop()

    def note_stop(self) -> None:
        """It stopped itself."""
        if not self.stopped:
            self.stopped = True
            self.stops.append((time.monotonic(), float("inf")))

    def wake(self) -> None:
        """SIGCONT."""
        if self.stopped:
            self.stopped = False
            self.stops[-1] = (self.stops[-1][0], time.monotonic())
            self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send any, unless it has ended."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def is_stopped_by_itself(self) -> bool:
        """Ask the kernel."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def stopped_s(self, since: float, until: float) -> float:
        """Return how long of a span it was stopped."""
        return sum(max(0.0, min(until, to) - max(since, began)) for began, to in self.stops)

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """Return how it ended; None while it runs."""
        until = time.monotonic() + timeout_s
        while True:
            with _LOCK:
                code = self._process.exitcode
            if code is not None or time.monotonic() > until:
                return code
            time.sleep(0.002)

    def end(self) -> None:
        """Kill it whatever it does, and leave nothing of it."""
        self.kill()
        self.exit_code(10.0)
        self.pipe.close()


@dataclass
class Running:
    """A command that a process is at."""

    command: Command
    since_s: float = field(default_factory=time.monotonic)


class RankProcess(Process):
    """One life of one rank.

    Attributes
    ----------
    running : Running or None
        What it is at.
    condemned : bool
        It is to die, so its death is no finding.
    calls : list of Call
        What the last command did.
    held : Map or None
        What its last report said, or what its host loaded.
    cohort : int
        Those of one number were built, or rebuilt, together.
    version : int
        Of its weights.
    built : bool
        It has a communicator.
    invalid : bool
        A commit failed on it.
    fresh : bool
        Its communicator has been through no collective call yet.
    open : bool
        Its host walked away from a generation.
    stops_itself_for_s : float or None
        Its fault is to stop it, and it is to be woken after so long; infinity leaves it stopped.
    """

    def __init__(self, world: World, rank: int, label: str, port: int, folder: Path) -> None:
        self.rank = rank
        self.log = folder / f"{label.replace(' ', '-')}.log"
        environment = {**os.environ, **world.env}
        super().__init__(label, serve, world, rank, port, None, str(self.log), environment)
        self.running: Running | None = None
        self.condemned = False
        self.gone = False
        self.calls: list[Call] = []
        self.held: Map | None = None
        self.cohort = 0
        self.version = -1
        self.built = False
        self.invalid = False
        self.fresh = True
        self.open = False
        self.stops_itself_for_s: float | None = None

    def await_start(self) -> None:
        """Wait until it listens."""
        if not self.pipe.poll(_START_LIMIT_S) or self.pipe.recv() != "here":
            raise HarnessError(f"{self.label} did not start:\n{self.tail()}")

    def tell(self, command: Command) -> None:
        """Give it something to do."""
        if self.running is not None:
            raise HarnessError(f"{self.label} is still at {self.running.command}")
        self.running = Running(command)
        fault = command.fault
        if fault is not None and fault.action == "kill":
            self.condemned = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died meanwhile; its pipe's end says so
            self.pipe.send(command)

    @property
    def free(self) -> bool:
        """It lives, runs, and waits for a command."""
        return not self.gone and not self.stopped and self.running is None

    def kill(self) -> None:
        """SIGKILL, on purpose."""
        self.condemned = True
        super().kill()

    def busy_s(self) -> float:
        """Return how long it has been at its command, stops not counted."""
        if self.running is None:
            return 0.0
        now = time.monotonic()
        return now - self.running.since_s - self.stopped_s(self.running.since_s, now)

    def overdue(self) -> bool:
        """Is it past the bound of its command?"""
        return self.running is not None and self.busy_s() > self.running.command.bound_s

    def stacks(self) -> str:
        """Let it print where its threads are."""
        self.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return self.tail(6000)

    def tail(self, nbytes: int = 3000) -> str:
        """Return the end of what it printed."""
        return self.log.read_text(errors="replace")[-nbytes:] if self.log.exists() else ""


def _host_store(pipe: Connection, log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600), 2)  # torch warns of names that it cannot look up
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        pipe.recv()


class StoreProcess(Process):
    """The host of a TCPStore that outlives every rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__("store", _host_store, None, str(folder / "store.log"))
        if not self.pipe.poll(_START_LIMIT_S):
            raise HarnessError("the store's host did not start")
        self.port = int(self.pipe.recv())


@dataclass(order=True)
class Timer:
    """Something to do at a moment."""

    at_s: float
    act: Callable[[], None] = field(compare=False)


def listen(
    ranks: Iterable[RankProcess],
    timers: list[Timer],
    *,
    finished: Callable[[RankProcess], None],
    died: Callable[[RankProcess], None],
    late: Callable[[RankProcess], None],
) -> None:
    """Hear what ranks have to say and do what is due, until every running rank is done; stopped ones are left alone.

    Parameters
    ----------
    ranks : iterable of RankProcess
        To listen to.
    timers : list of Timer
        Done in time; more may be added meanwhile.
    finished, died, late : callable
        Told of a rank that did its command, ended, or is past the bound of its command and is then killed.
    """
    ranks = list(ranks)
    while True:
        now = time.monotonic()
        timers.sort()
        while timers and timers[0].at_s <= now:
            timers.pop(0).act()
        awaited = [each for each in ranks if each.running is not None and not each.stopped and not each.gone]
        for each in awaited:
            if each.stops_itself_for_s is not None and each.is_stopped_by_itself():
                each.note_stop()
                if each.stops_itself_for_s != float("inf"):
                    timers.append(Timer(time.monotonic() + each.stops_itself_for_s, each.wake))
                each.stops_itself_for_s = None
            elif each.overdue():
                late(each)
        awaited = [each for each in awaited if not each.stopped]
        if not awaited and not timers:
            return
        pause_s = 0.1
        if timers:
            pause_s = min(pause_s, max(0.0, timers[0].at_s - time.monotonic()))
        if any(each.stops_itself_for_s is not None for each in awaited):
            pause_s = min(pause_s, 0.01)
        by_pipe = {each.pipe: each for each in ranks if not each.gone}
        for pipe in wait(list(by_pipe), timeout=pause_s):
            each = by_pipe[pipe]  # type: ignore[index]
            try:
                each.calls = each.pipe.recv()
            except (EOFError, OSError):
                each.gone, each.running = True, None
                died(each)
            else:
                each.running, each.stops_itself_for_s = None, None
                finished(each)
