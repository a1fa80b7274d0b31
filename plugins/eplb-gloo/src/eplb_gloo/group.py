"""A gloo group of the backend's own: made within a limit, used point to point, severed at once."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from eplb_core.backend import Cancelled
from eplb_core.errors import error_for
from eplb_gloo.hooks import NAME
from eplb_gloo.messages import TAG_BITS

NONCE_NBYTES = 16
CONNECT = f"phase connect ({NAME})"

_SHORTEST = timedelta(milliseconds=1)  # zero is "no limit" to gloo
_SEVER_TAG = 1 << TAG_BITS  # no message has it


class GlooGroup:
    """Connections among the members, in no registry: no default group, no global rank, no environment variable.

    Parameters
    ----------
    store : torch.distributed.Store
        Reached by all members, in a namespace of this group's own.
    members : sequence of int
        Ranks, ascending; a rank's place among them is its rank within gloo.
    rank : int
        This rank.
    host : str
        Address of this rank that the others reach.
    threads : int
        Threads that move bytes; gloo makes one, and one connection per peer, for every device it is given.
    nonce : bytes
        Drawn by this rank for this epoch.
    timeout_s : float
        Limit of the construction, seconds.
    cancelled : callable
        See `eplb_core.backend.BackendContext`.

    Attributes
    ----------
    nonces : mapping of int to bytes
        What every member drew, by rank.

    Raises
    ------
    StalledError
        Members did not come within the limit; the message names them.
    TransferError
        gloo could not connect, or the connect was cancelled.
    StoreLostError
        The store does not answer.
    """

    def __init__(
        self,
        store: Any,
        *,
        members: Sequence[int],
        rank: int,
        host: str,
        threads: int,
        nonce: bytes,
        timeout_s: float,
        cancelled: Callable[[], Cancelled | None],
    ) -> None:
        self._size = len(members)
        self._own = list(members).index(rank)
        self._threads = threads
        self._lock = threading.Lock()
        self._severed = False
        started = time.monotonic()
        try:
            self.nonces: Mapping[int, bytes] = _gather(store, members, rank, nonce, timeout_s, cancelled)
        except RuntimeError as error:  # DistError and its kin; older torch raises it plain
            raise error_for("EPLB-T005", where=CONNECT, problem=brief(error), layers="none") from error
        # Of all nonces: a member left over from another attempt has another prefix and meets nobody.
        prefix = blake2b(b"".join(self.nonces[member] for member in members), digest_size=16).hexdigest()
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
        options._timeout = timedelta(seconds=max(timeout_s - (time.monotonic() - started), 0.001))
        options._threads = 1  # serves collectives, of which there are none
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host) for _ in range(threads)]
            self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), self._own, self._size, options)
            _forget(store, members, [f"{prefix}/{device}" for device in range(threads)])
        except RuntimeError as error:
            others = ", ".join(str(member) for member in members if member != rank)
            detail = f"(rank {rank} at {host} connecting to ranks {others}, {CONNECT})."
            raise error_for("EPLB-T001", label=NAME, state=brief(error), detail=detail) from error

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Any:
        """Post a receive; `source` counts among the members. RuntimeError when the connection is closed."""
        return self._group.recv([buffer], source, tag)

    def send(self, buffer: torch.Tensor, destination: int, tag: int) -> Any:
        """Post a send; `destination` counts among the members. RuntimeError when the connection is closed."""
        return self._group.send([buffer], destination, tag)

    def sever(self) -> None:
        """Close every connection, from any thread: waits in progress, here and at the peers, fail within milliseconds.

        The only way there is: a wait that times out makes gloo close all connections that share its thread. Its own
        ``abort`` leaves blocked waits blocked.
        """
        with self._lock:
            if self._severed or self._group is None:
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

    def close(self) -> None:
        """Give threads, sockets and connections back, once nobody holds a posted send or receive any more."""
        with self._lock:
            self._group = None


def finish(work: Any, limit_s: float) -> str | None:
    """Wait for a posted send or receive; this is also the only way to learn that it is complete.

    A limit that runs out closes all connections of the group.

    Parameters
    ----------
    work : torch.distributed.Work
        What `GlooGroup.send` or `GlooGroup.receive` returned.
    limit_s : float
        Seconds; 1 ms is the shortest.

    Returns
    -------
    str or None
        None when it is complete, else gloo's reason. The exception itself would keep the connection open, by the
        frames it holds.
    """
    try:
        complete = work.wait(max(timedelta(seconds=limit_s), _SHORTEST))
    except RuntimeError as error:
        return brief(error)
    return None if complete else "the operation was cancelled"


def timed_out(reason: str) -> bool:
    """Is this what gloo says when a limit ran out?"""
    return reason.startswith("Timed out")


def _gather(
    store: Any,
    members: Sequence[int],
    rank: int,
    nonce: bytes,
    timeout_s: float,
    cancelled: Callable[[], Cancelled | None],
) -> dict[int, bytes]:
    """Wait for every member before gloo does: its own wait names nobody and cannot be cancelled."""
    keys = {member: f"member/{member}" for member in members}
    store.set(keys[rank], nonce)
    started, pause_s = time.monotonic(), 0.0005
    arrived = store.add("arrived", 1)
    while arrived < len(members):
        reason = cancelled()
        if reason:
            raise error_for("EPLB-T001", label=NAME, state="cancelled", detail=f"{reason} ({CONNECT}).")
        elapsed_s = time.monotonic() - started
        if elapsed_s > timeout_s:
            missing = [member for member, key in keys.items() if not store.check([key])]
            raise error_for("EPLB-T002", seconds=elapsed_s, where=CONNECT, waiting_for=name_ranks(missing))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
        arrived = store.add("arrived", 0)
    return {member: store.get(key) for member, key in keys.items()}


def _forget(store: Any, members: Sequence[int], prefixes: Sequence[str]) -> None:
    """Delete the keys that connecting took, once every member is connected, so that a store can serve for ever."""
    if store.add("connected", 1) < len(members):
        return
    keys = [f"{prefix}/{place}" for prefix in prefixes for place in range(len(members))]
    for key in (*keys, *(f"member/{member}" for member in members), "arrived", "connected"):
        store.delete_key(key)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 3"."""
    distinct = sorted(set(ranks))
    return f"rank{'s' if len(distinct) > 1 else ''} {', '.join(map(str, distinct))}"


def brief(error: Exception) -> str:
    """Return what gloo, or torch, says without the place in its source and the advice that follows."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).splitlines()[0]
    return text.split(". ")[0]
