"""A rank's own side of its launch: it runs one function, reports through a pipe, and ends when its launcher does."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from eplb_core.launch.failure import RankFailure
from eplb_core.launch.messages import send_message

if TYPE_CHECKING:
    from eplb_core.control.plane import ControlPlane

_CONNECT_S = 60.0


class Rank:
    """What a rank's function is given, inside its process.

    Parameters
    ----------
    rank, world_size : int
        Number of this rank, and how many there are.
    port : int
        Port on loopback of the store that the launching process hosts.
    pipe : Connection
        Connection to the launching process.
    """

    def __init__(self, rank: int, world_size: int, port: int, pipe: Connection) -> None:
        self.rank = rank
        self.world_size = world_size
        self.port = port
        self._pipe = pipe

    def store(self, namespace: str = "") -> Any:
        """Open a client of the store that the launching process hosts, which outlives every rank."""
        dist: Any = import_module("torch.distributed")
        client = dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
        return dist.PrefixStore(namespace, client) if namespace else client

    def control(self, namespace: str = "") -> ControlPlane:
        """Make a control plane over that store."""
        from eplb_core.control.plane import ControlPlane

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
        dist: Any = import_module("torch.distributed")
        ranks = list(range(self.world_size)) if members is None else list(members)
        place, store = ranks.index(self.rank), self.store(topic)
        group = dist.ProcessGroup(store, place, len(ranks))
        gloo = dist.ProcessGroupGloo(store, place, len(ranks), timedelta(seconds=_CONNECT_S))
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(import_module("torch").device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group

    def tell(self, value: Any) -> None:
        """Send a note to the launching process (see `Ranks.hear`)."""
        send_message(self._pipe.fileno(), ("note", value))

    def listen(self, timeout_s: float = 60.0) -> Any:
        """Wait for a note of the launching process (see `Ranks.tell`)."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"rank {self.rank} heard nothing for {timeout_s} s")
        return self._pipe.recv()


@dataclass(frozen=True)
class Job:
    """What all ranks of a launch are given.

    Parameters
    ----------
    world_size, port : int
        See `Rank`.
    call : bytes
        Function and arguments, pickled. A rank unpickles them itself, after its environment is set: so modules are
        imported with these settings, and a function that cannot be imported is reported as any failure is.
    environment : dict of str to str
        The whole environment.
    finalize : bool
        End as an interpreter ends, with exit handlers and finalization.
    """

    world_size: int
    port: int
    call: bytes
    environment: dict[str, str]
    finalize: bool


def run(job: Job, rank: int, pipe: Connection, stderr: Connection | None) -> None:
    """Be a rank: run the function, send its value or why there is none, and end with status 0 for a value, else 1.

    Parameters
    ----------
    job : Job
        The same for all ranks.
    rank : int
        Number of this rank.
    pipe : Connection
        Connection to the launcher.
    stderr : Connection or None
        Pipe for everything that is written to stderr; what is written to stdout is dropped then. None leaves both.
    """
    os.setsid()  # Ctrl-C is for the launcher, which ends its ranks itself
    threading.Thread(target=_end_with_launcher, name="eplb-lifeline", daemon=True).start()
    if stderr is not None:
        _redirect_output(stderr)
    for name in set(os.environ) - set(job.environment):
        del os.environ[name]
    os.environ.update(job.environment)
    with pipe:
        status = _work(job, rank, pipe)
    if job.finalize:
        ctypes.pythonapi.Py_Exit(status)  # multiprocessing would leave through os._exit
    sys.exit(status)


def _work(job: Job, rank: int, pipe: Connection) -> int:
    try:
        function, args = pickle.loads(job.call)  # noqa: S301 - from the process that started this one
        import_module("torch").set_num_threads(1)
        value = function(Rank(rank, job.world_size, job.port, pipe), *args)
        send_message(pipe.fileno(), ("value", value))
    except BaseException as error:
        with suppress(BrokenPipeError):  # the launcher is gone
            send_message(pipe.fileno(), ("failed", RankFailure.of(rank, error)))
        return 1
    return 0


def _end_with_launcher() -> None:
    """End this process when the launching process is gone, however that one ended."""
    launcher = parent_process()
    if launcher is not None:
        wait([launcher.sentinel])
        os._exit(1)


def _redirect_output(stderr: Connection) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    with stderr:
        os.dup2(stderr.fileno(), 2)
