"""The connections among the members, used point to point and severed at once; a forked child leaves them alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch

from eplb_core.backend.toolkit import first_line
from eplb_gloo.messages import TAG_BITS
from eplb_gloo.waiter import Waiter

T = TypeVar("T")

_NO_LIMIT = timedelta(days=3650)  # limits are kept by those who wait for the waiter
_SHORTEST = timedelta(milliseconds=1)  # zero is gloo's own limit
_SEVER_TAG = 1 << TAG_BITS  # no message has it


class GlooGroup:
    """A connected gloo group, in no registry: no default group, no global rank, no environment variable.

    Parameters
    ----------
    group : torch.distributed.ProcessGroupGloo
        Group of all members.
    waiter : Waiter
        Its thread waits for what is posted here.
    own, size, threads : int
        This rank's place among the members, how many there are, and gloo's threads, each of which has a connection to
        every member.
    nonces : mapping of int to bytes
        What every member drew for this epoch, by rank.
    """

    def __init__(
        self, group: Any, waiter: Waiter, *, own: int, size: int, threads: int, nonces: Mapping[int, bytes]
    ) -> None:
        self.nonces = nonces
        self._group = group
        self._waiter = waiter
        self._own = own
        self._size = size
        self._threads = threads
        self._lock = threading.Lock()
        self._severed = False
        self._pid = os.getpid()

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Any:
        """Post a receive; `source` counts among the members. RuntimeError when the connection is closed."""
        return self._group.recv([buffer], source, tag)

    def send(self, buffer: torch.Tensor, destination: int, tag: int) -> Any:
        """Post a send; `destination` counts among the members. RuntimeError when the connection is closed."""
        return self._group.send([buffer], destination, tag)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have the waiter's thread make a call that blocks in gloo; see `Waiter.submit`."""
        return self._waiter.submit(call)

    def sever(self) -> None:
        """Close every connection, from any thread: waits in progress, here and at the peers, fail within milliseconds.

        The only way there is: a wait that times out makes gloo close all connections that share its thread. Its own
        ``abort`` leaves blocked waits blocked. What this does not wake either is a receive that is partly in and a send
        that is partly out.
        """
        with self._lock:
            if self._severed or self._group is None or self.is_inherited:
                return
            self._severed = True
            nothing = torch.empty(1, dtype=torch.uint8)
            for thread in range(self._threads):  # a tag is served by thread (tag mod threads)
                for peer in range(self._size):
                    if peer != self._own:
                        try:
                            work = self.receive(nothing, peer, _SEVER_TAG + thread)
                        except RuntimeError:
                            continue  # closed already
                        finish(work, 0.0)

    def close(self, limit_s: float, keep: object = None) -> bool:
        """Give threads, sockets and connections back, once nobody holds a posted send or receive any more.

        Parameters
        ----------
        limit_s : float
            Seconds that the waiter's thread may take to come out of its wait.
        keep : object
            See `Waiter.close`.

        Returns
        -------
        bool
            True when that thread is out.
        """
        with self._lock:
            group, self._group = self._group, None
        return self._waiter.close(limit_s, (group, keep))

    @property
    def is_inherited(self) -> bool:
        """Is this process a forked child of the one that connected? Then sockets and their streams are the parent's."""
        return os.getpid() != self._pid


def finish(work: Any, limit_s: float | None = None) -> str | None:
    """Wait for a posted send or receive; this is also the only way to learn that it is complete.

    A limit that runs out closes all connections of the group.

    Parameters
    ----------
    work : torch.distributed.Work
        What `GlooGroup.send` or `GlooGroup.receive` returned.
    limit_s : float or None
        Seconds; 1 ms is the shortest, None is no limit.

    Returns
    -------
    str or None
        None when it is complete, else gloo's reason. The exception itself would keep the connection open, by the
        frames it holds.
    """
    try:
        complete = work.wait(_NO_LIMIT if limit_s is None else max(timedelta(seconds=limit_s), _SHORTEST))
    except RuntimeError as error:
        return first_line(error)
    return None if complete else "the operation was cancelled"
