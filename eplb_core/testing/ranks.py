"""Ranks for tests: real processes on loopback that report back, can be signalled by pid, and end at a limit."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from eplb_core.control.plane import ControlPlane

_PRELOAD = ["torch", "torch.distributed", "eplb_core.communicator", "eplb_core.testing.ranks"]


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
        It ended without a word.
    """

    value: Any = None
    error: str | None = None
    killed: bool = False


class Rank:
    """What a rank's function is given, inside its process.

    Parameters
    ----------
    rank, world_size : int
        Which it is, and of how many.
    port : int
        Of the store that the test's process hosts.
    pipe : Connection
        To the test.
    """

    def __init__(self, rank: int, world_size: int, port: int, pipe: Connection) -> None:
        self.rank = rank
        self.world_size = world_size
        self.port = port
        self._pipe = pipe

    def store(self, namespace: str = "") -> Any:
        """Open a client of the store that the test's process hosts, which outlives every rank."""
        client = dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=60))
        return dist.PrefixStore(namespace, client) if namespace else client

    def control(self, namespace: str = "") -> ControlPlane:
        """Make a control plane over that store."""
        return ControlPlane.from_store(self.store(namespace), rank=self.rank, world_size=self.world_size)

    def device_group(self, members: Sequence[int] | None = None, topic: str = "device group") -> Any:
        """Make a gloo group for CPU tensors over that store, as elastic hosts do: torch's registry does not know it.

        Parameters
        ----------
        members : sequence of int or None
            Ranks, ascending, all of which make the call; None is everyone.
        topic : str
            Tells groups apart.

        Returns
        -------
        torch.distributed.ProcessGroup
        """
        ranks = list(range(self.world_size)) if members is None else list(members)
        place, store = ranks.index(self.rank), self.store(topic)
        group: Any = dist.ProcessGroup(store, place, len(ranks))
        gloo: Any = dist.ProcessGroupGloo(store, place, len(ranks), timedelta(seconds=60))
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group

    def tell(self, value: Any) -> None:
        """Send a note to the test (see `Ranks.hear`)."""
        self._pipe.send(("note", value))

    def listen(self, timeout_s: float = 60.0) -> Any:
        """Wait for a note of the test (see `Ranks.tell`)."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"rank {self.rank} heard nothing for {timeout_s} s")
        return self._pipe.recv()


class Ranks:
    """N processes that run one function; a context manager that leaves none behind.

    Parameters
    ----------
    world_size : int
        How many.
    function : callable
        ``function(rank: Rank, *args)``, importable by the children; its value must pickle.
    *args
        Passed on.
    env : Mapping[str, str] or None
        Set in the children before the function runs, beside the environment of this process as it is now.
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
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._outcomes: dict[int, Outcome] = {}
        self._notes: dict[int, list[Any]] = {rank: [] for rank in range(world_size)}
        # All of it: the server that forks the ranks has the environment of the first test that started any.
        environment = {**os.environ, **(env or {})}
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_child,
                args=(rank, world_size, self._store.port, theirs, function, args, environment),
                name=f"rank{rank}",
                daemon=daemon,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def pid(self, rank: int) -> int:
        """Return a rank's process id."""
        return int(self._processes[rank].pid)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        os.kill(self.pid(rank), number)

    def tell(self, rank: int, value: Any) -> None:
        """Send a note to one rank (see `Rank.listen`)."""
        self._pipes[rank].send(value)

    def hear(self, rank: int, timeout_s: float = 60.0) -> Any:
        """Wait for the next note of one rank (see `Rank.tell`)."""
        until = time.monotonic() + timeout_s
        while not self._notes[rank]:
            if rank in self._outcomes:
                raise AssertionError(f"rank {rank} ended without the note: {self._outcomes[rank]}")
            if not self._receive(rank, max(0.0, until - time.monotonic())):
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
        for rank in awaited:
            while rank not in self._outcomes:
                if not self._receive(rank, max(0.0, until - time.monotonic())):
                    late = [r for r in awaited if r not in self._outcomes]
                    raise TimeoutError(f"ranks {late} did not end within {timeout_s} s")
        return [self._outcomes.get(rank, Outcome(killed=True)) for rank in range(self.world_size)]

    def values(self, timeout_s: float) -> list[Any]:
        """Wait for all ranks and return their values; the first failure is an AssertionError with its traceback."""
        outcomes = self.join(timeout_s)
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None or outcome.killed:
                raise AssertionError(f"rank {rank} failed:\n{outcome.error or 'it ended without a word'}")
        return [outcome.value for outcome in outcomes]

    def _receive(self, rank: int, timeout_s: float) -> bool:
        pipe = self._pipes[rank]
        if not pipe.poll(timeout_s):
            return False
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            self._outcomes[rank] = Outcome(killed=True)
            return True
        if kind == "note":
            self._notes[rank].append(value)
        else:
            self._outcomes[rank] = Outcome(value=value) if kind == "value" else Outcome(error=value)
        return True

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.join(0.5 if kind is None else 0.0)
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)  # a stopped process, too
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(10)
            pipe.close()


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


def _child(
    rank: int,
    world_size: int,
    port: int,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        value = function(Rank(rank, world_size, port, pipe), *args)
        pipe.send(("value", value))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    finally:
        pipe.close()
