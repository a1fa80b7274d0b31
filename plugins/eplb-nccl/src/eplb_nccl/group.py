"""The host's device group as this backend uses it: checked once, posted to in batches, waited for, severed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from eplb_core.backend import Cancelled
from eplb_core.backend.toolkit import Backoff, Deadline, RowMove, first_line
from eplb_core.errors import error_for
from eplb_nccl.hooks import NAME

_SHORTEST = timedelta(milliseconds=1)  # zero is "no limit" to gloo
_SEVER_TAG = 1 << 30  # no message of ours has it
_severed: weakref.WeakSet[Any] = weakref.WeakSet()


class Posted(NamedTuple):
    """Something torch works on: one operation, or a whole batch where the group coalesces."""

    peers: tuple[int, ...]
    receives: bool
    """Does it hold receives?"""
    work: Any


class Failure(NamedTuple):
    """Why a wait ended early."""

    reason: str
    peers: tuple[int, ...] = ()
    timed_out: bool = False
    receives: bool = True


class DeviceGroup:
    """A ``torch.distributed.ProcessGroup`` of the host's, whose ranks are the members in order.

    Groups that torch's registry knows are used through ``batch_isend_irecv``; others (elastic hosts build them
    directly), which ``P2POp`` refuses, through the calls that it would make.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        The host's process group.
    device : torch.device
        Device of the tensors.
    members : sequence of int
        Ranks, ascending.
    rank : int
        Number of this rank.

    Raises
    ------
    ConfigError
        EPLB-C010: there is no group, it is another one than the members', it has no backend for the device, or its
        connections were closed by an abort.
    """

    def __init__(self, group: Any, *, device: torch.device, members: Sequence[int], rank: int) -> None:
        problem = _why_not(group, device, members, rank)
        if problem is not None:
            raise error_for("EPLB-C010", problem=f"{NAME} {problem}")
        self._group = group
        self._device = device
        self._backend: Any = group._get_backend(device)
        self._coalesces = bool(self._backend.supports_coalescing)
        self._registered = _is_registered(group)
        self._place = {member: place for place, member in enumerate(members)}
        self._own = self._place[rank]
        self._lock = threading.Lock()
        self.kind = str(self._backend.name())
        """Such as "nccl" or "gloo"."""
        self.polls = self.kind != "gloo"
        """Does ``is_completed`` say anything before a wait? gloo counts a completion off only when it is waited for."""

    @property
    def severed(self) -> bool:
        """Were its connections closed, by this communicator or by another one that shares the group?"""
        return self._group in _severed

    def post(self, operations: Sequence[RowMove], tag: int) -> list[Posted]:
        """Start a batch; RuntimeError when a connection is closed.

        Parameters
        ----------
        operations : sequence of RowMove
            Receives first. Both ends of a pair list what they exchange in the same order.
        tag : int
            Keeps this batch apart from the host's own messages, where the group knows tags.
        """
        if not operations:
            return []  # torch refuses an empty batch
        try:
            works = self._start(operations, tag)
        except BaseException:
            if self._coalesces:
                # An NCCL group that stays open swallows whatever this thread calls next, on any communicator.
                with suppress(RuntimeError):
                    self._group._end_coalescing(self._device)
            raise
        if len(works) == len(operations):
            return [
                Posted((operation.peer,), not operation.is_send, work)
                for operation, work in zip(operations, works, strict=True)
            ]
        peers = tuple(sorted({operation.peer for operation in operations}))
        return [Posted(peers, any(not operation.is_send for operation in operations), work) for work in works]

    def sum_of_ones(self) -> tuple[torch.Tensor, list[Posted]]:
        """Start a sum over all members: the first call on an NCCL group must be everyone's."""
        ones = torch.ones(1, dtype=torch.int32, device=self._device)
        others = tuple(place for place in self._place.values() if place != self._own)
        return ones, [Posted(others, True, self._group.allreduce([ones]))]

    def finish(
        self, posted: Sequence[Posted], deadline: Deadline, cancelled: Callable[[], Cancelled | None]
    ) -> Failure | None:
        """Wait until all is complete, on the device too.

        Parameters
        ----------
        posted : sequence of Posted
            In posting order.
        deadline : Deadline
            Limit of the wait.
        cancelled : callable
            Consulted where works can be polled; elsewhere the caller watches.

        Returns
        -------
        Failure or None
            None when complete. A limit that runs out over gloo closes all its connections.
        """
        return self._poll(posted, deadline, cancelled) if self.polls else self._block(posted, deadline)

    def sever(self) -> None:
        """Close every connection, from any thread: waits in progress, here and at the peers, end with an error.

        The group is of no use to anyone afterwards. NCCL's communicators are aborted. gloo's own ``abort`` leaves
        blocked waits blocked; a wait that times out closes all connections.
        """
        with self._lock:
            if self.severed:
                return
            _severed.add(self._group)
            if self.polls:
                with suppress(RuntimeError):
                    self._backend.abort()
                return
            nothing = torch.empty(1, dtype=torch.uint8)
            for place in self._place.values():
                if place != self._own:
                    with suppress(RuntimeError):  # closed already, or just what was meant
                        self._group.recv([nothing], place, _SEVER_TAG).wait(_SHORTEST)

    # --- behind it ------------------------------------------------------------------------------------------------

    def _start(self, operations: Sequence[RowMove], tag: int) -> list[Any]:
        if self._registered:
            return dist.batch_isend_irecv(
                [
                    dist.P2POp(
                        dist.isend if is_send else dist.irecv,
                        buffer,
                        group=self._group,
                        tag=tag,
                        group_peer=self._place[peer],
                    )
                    for peer, is_send, buffer in operations
                ]
            )
        if self._coalesces:
            self._group._start_coalescing(self._device)
        works = [
            (self._group.send if is_send else self._group.recv)([buffer], self._place[peer], tag)
            for peer, is_send, buffer in operations
        ]
        return [self._group._end_coalescing(self._device)] if self._coalesces else works

    def _block(self, posted: Sequence[Posted], deadline: Deadline) -> Failure | None:
        # Receives first: when time is up, who sent nothing says more than who did not take anything.
        ordered = sorted(posted, key=lambda one: not one.receives)
        for i, one in enumerate(ordered):
            reason = _finish(one.work, deadline.left_s)
            if reason is None:
                continue
            if not reason.startswith("Timed out"):
                return Failure(reason, one.peers)
            alike = [other for other in ordered[i + 1 :] if other.receives == one.receives]
            late = {*one.peers}.union(*(other.peers for other in alike if _finish(other.work, 0.0) is not None))
            return Failure(reason, tuple(sorted(late)), timed_out=True, receives=one.receives)
        return None

    def _poll(
        self, posted: Sequence[Posted], deadline: Deadline, cancelled: Callable[[], Cancelled | None]
    ) -> Failure | None:
        left, backoff = list(posted), Backoff()
        while True:
            state = self._error()
            if state is not None:
                return Failure(state, _peers_of(left))
            try:
                left = [one for one in left if not one.work.is_completed()]
            except RuntimeError as error:
                return Failure(first_line(error), _peers_of(left))
            if not left:
                state = self._error()  # a work that failed counts as completed
                return None if state is None else Failure(state, _peers_of(posted))
            called_off = cancelled()
            if called_off is not None:
                return Failure(str(called_off), _peers_of(left))
            if deadline.over:
                return Failure("Timed out", _peers_of(left), timed_out=True)
            backoff.pause(deadline.left_s)

    def _error(self) -> str | None:
        """Ask an NCCL backend for an error of its communicators; others have no such question."""
        get_error = getattr(self._backend, "get_error", None)
        if get_error is None:
            return None
        state = get_error()
        return None if int(getattr(state, "value", state)) == 0 else str(getattr(state, "name", state))


def _finish(work: Any, limit_s: float) -> str | None:
    try:
        complete = work.wait(max(timedelta(seconds=limit_s), _SHORTEST))
    except RuntimeError as error:
        return first_line(error)
    return None if complete else "the operation was cancelled"


def _peers_of(posted: Sequence[Posted]) -> tuple[int, ...]:
    return tuple(sorted({peer for one in posted for peer in one.peers}))


def _is_registered(group: Any) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False


def _why_not(group: Any, device: torch.device, members: Sequence[int], rank: int) -> str | None:
    if group is None:
        return "moves weights over the host's group: pass device_group=, whose ranks are the members in order"
    if not isinstance(group, dist.ProcessGroup):
        return f"needs device_group= to be a torch.distributed.ProcessGroup, not a {type(group).__name__}"
    if group in _severed:
        return "closed the connections of this device_group when a transfer was aborted: pass a new group"
    place, size = list(members).index(rank), len(members)
    if (group.rank(), group.size()) != (place, size):
        return (
            f"was given a device_group in which this is rank {group.rank()} of {group.size()}, "
            f"where the members {list(members)} make it rank {place} of {size}"
        )
    try:
        group._get_backend(device)
    except RuntimeError:
        return f"was given a device_group that cannot move {device.type} tensors"
    return None
