"""Posting to the device group and waiting for it, with a look around while a call blocks; why one ended early."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from eplb_core.backend import BackendContext
from eplb_core.backend.toolkit import (
    CancelWatch,
    Deadline,
    Lifecycle,
    RowMove,
    cancelled_error,
    failed_error,
    first_line,
    name_ranks,
    stalled_error,
)
from eplb_nccl.group import DeviceGroup, Failure, Posted
from eplb_nccl.hooks import NAME
from eplb_nccl.transfer import LayerTransfer

_EXACT_S = 1.0  # gloo's own limit is the exact one; the watch is there for what happens elsewhere


class WatchedGroup:
    """A device group as one communicator uses it.

    Parameters
    ----------
    group : DeviceGroup
        The host's group.
    context : BackendContext
        Says what was called off, and on which stream the group is used.
    life : Lifecycle
        Put out of use when the group is severed from here.
    """

    def __init__(self, group: DeviceGroup, context: BackendContext, life: Lifecycle[LayerTransfer]) -> None:
        self._group = group
        self._context = context
        self._life = life
        self._watch: CancelWatch | None = None

    def stream(self) -> AbstractContextManager[Any]:
        """Make the backend's stream current, and with it its device: NCCL orders itself after it."""
        return nullcontext() if self._context.stream is None else self._context.stream

    def post(
        self, batches: Iterable[Sequence[RowMove]], tag: int, deadline: Deadline, posted: list[Posted]
    ) -> Failure | None:
        """Post batches in their order and note what is in flight, also of a batch that fails half-way."""
        try:
            # NCCL blocks where a pair has not connected yet; gloo never does, and the watch would only cost.
            with self.stream(), self._look_around(deadline) if self._group.polls else nullcontext():
                for batch in batches:
                    posted.extend(self._group.post(batch, tag))
        except RuntimeError as error:  # a connection closed meanwhile, or the device failed
            return Failure(first_line(error))
        return None

    def count_members(self, deadline: Deadline) -> tuple[Failure | None, int]:
        """Sum a one of every member: the first call on an NCCL group must be everyone's."""
        try:
            with self.stream(), self._look_around(deadline):
                ones, posted = self._group.sum_of_ones()
            failure = self.finish(posted, deadline)
            return failure, 0 if failure is not None else int(ones.item())
        except RuntimeError as error:
            return Failure(first_line(error)), 0

    def finish(self, posted: Sequence[Posted], deadline: Deadline) -> Failure | None:
        """Wait until all is complete; None when it is."""
        if self._group.polls:
            return self._group.finish(posted, deadline, self._context.cancelled)
        with self._look_around(Deadline(deadline.left_s + _EXACT_S)):
            return self._group.finish(posted, deadline, lambda: None)

    def sever(self, where: str, reason: str) -> None:
        """Close the group's connections, so that the peers' waits end too; nothing goes over it any more."""
        self._life.poison(where, reason)
        self._group.sever()

    def explain(self, failure: Failure, where: str, elapsed_s: float) -> Exception:
        """Say why a wait failed: because of what happened elsewhere, if anything did, else what the group says."""
        watch = self._watch
        if watch is not None and watch.failure is not None:
            return watch.failure
        cancelled = (watch.told if watch is not None else None) or self._context.cancelled()
        if cancelled is not None:
            return cancelled_error(NAME, cancelled, where)
        if failure.timed_out or (watch is not None and watch.timed_out):
            late = name_ranks(failure.peers) if failure.peers else "a peer"
            return stalled_error(NAME, elapsed_s, where, late if failure.receives else f"{late} to take what was sent")
        return failed_error(NAME, failure.reason, where, failure.peers)

    def has_drained(self, posted: Sequence[Posted], limit_s: float) -> bool:
        """Wait a moment for what was given up; False while a severed group may still write."""
        failure = self._group.finish(posted, Deadline(limit_s), lambda: None)
        return failure is None or not (failure.timed_out and self._group.polls)

    @property
    def is_blocked(self) -> bool:
        """Is another thread inside a call?"""
        return self._watch is not None and self._watch.is_watching

    def close(self) -> None:
        """End the thread that looks around."""
        if self._watch is not None:
            self._watch.close()

    def _look_around(self, deadline: Deadline) -> AbstractContextManager[None]:
        if self._watch is None:
            self._watch = CancelWatch(self._context.cancelled, self._group.sever, name="eplb-nccl-watch")
        return self._watch.during(deadline)
