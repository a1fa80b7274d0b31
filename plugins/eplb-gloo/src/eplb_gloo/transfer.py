"""One layer's messages in flight: posted, waited for once and in a thread that can be let go of, dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from eplb_core.backend import BackendContext, TransferReceipt
from eplb_core.backend.toolkit import (
    LayerTransfer,
    Wait,
    cancelled_error,
    failed_error,
    first_line,
    name_ranks,
    stalled_error,
)
from eplb_core.errors import StalledError
from eplb_gloo.group import GlooGroup, finish
from eplb_gloo.hooks import NAME
from eplb_gloo.messages import Messages
from eplb_gloo.waiter import ended

LOOK_EVERY_S = 0.05
"""Seconds between two looks of a wait at whether it was called off: short waits cost none."""

_WAKE_S = 0.25  # a wait that closing wakes is out within milliseconds, where cores are to be had


@dataclass(frozen=True)
class Failure:
    """Where the messages of a layer stopped.

    Parameters
    ----------
    reason : str
        What gloo says.
    peers : tuple of int
        Whose message it was, as far as that is known.
    """

    reason: str
    peers: tuple[int, ...] = ()


class Progress:
    """How far the thread that waits for a layer's messages has come.

    Parameters
    ----------
    works : sequence of (int, Work)
        (peer, posted operation), in the order in which they are waited for.

    Attributes
    ----------
    at : int
        Number of the message that is waited for.
    """

    def __init__(self, works: Sequence[tuple[int, Any]]) -> None:
        self.works = works
        self.at = 0

    def finish(self) -> Failure | None:
        """Wait for every message once: gloo counts a completion off when it is waited for.

        A connection that closed is reported at once, so that the reason is in place before ours are closed.
        """
        for at, (peer, work) in enumerate(self.works):
            self.at = at
            reason = finish(work)
            if reason is not None:
                return Failure(reason, (peer,))
        return None

    def late(self, stop: int) -> list[int]:
        """Return whose messages before number `stop` are not complete, once every connection is closed."""
        at = self.at
        rest = [peer for peer, work in self.works[at + 1 : stop] if finish(work, 0.0) is not None]
        return [self.works[at][0], *rest]


@dataclass(eq=False)
class GlooTransfer(LayerTransfer):
    """One layer's receives and sends: what the backend's ``transfer`` returns.

    Parameters
    ----------
    plan : TransferPlan
        Of this rank.
    progress : Progress or None
        Its messages while they are in flight: each holds a connection, a buffer and memory of the layer, so they are
        dropped as soon as the layer is finished either way.
    num_receives : int
        So many of them are receives; the sends follow.
    group : GlooGroup or None
        The connections, while messages are in flight.
    outcome : Future or None
        Of the waits, from the first time that somebody asks for it: a thread that waits beside one that works takes the
        interpreter from it, message by message.
    failure : Failure or None
        Why posting stopped early, or what its wait or abort ended with.
    """

    progress: Progress | None = None
    num_receives: int = 0
    group: GlooGroup | None = None
    outcome: Future[Failure | None] | None = None
    failure: Failure | None = None

    def post(
        self,
        group: GlooGroup,
        receives: Messages,
        landing: torch.Tensor,
        sends: Messages,
        outgoing: Iterator[torch.Tensor],
    ) -> None:
        """Post every message; a failure is kept for the wait.

        Once one message is posted there must be a handle to abort, whatever happens to the next: a connection that
        closed meanwhile, or a device that fails.

        Parameters
        ----------
        group : GlooGroup
            The connections.
        receives, sends : Messages
            Of this rank.
        landing : torch.Tensor
            The landing slot, uint8.
        outgoing : iterator of torch.Tensor
            The bytes of each send; taking one may copy rows, while the sends before it are on their way.
        """
        works: list[tuple[int, Any]] = []
        self.progress, self.num_receives = Progress(works), len(receives)
        self.failure = Failure("posting was interrupted")
        try:
            # Receives first: gloo sends nothing before the other end has said that it is ready.
            for peer, place, tag, offset, nbytes in zip(
                receives.peers, receives.group_ranks, receives.tags, receives.offsets, receives.nbytes, strict=True
            ):
                works.append((peer, group.receive(landing[offset : offset + nbytes], place, tag)))
            for peer, place, tag, buffer in zip(sends.peers, sends.group_ranks, sends.tags, outgoing, strict=True):
                works.append((peer, group.send(buffer, place, tag)))
        except RuntimeError as error:
            self.failure = Failure(first_line(error))
            return
        self.group = group
        self.failure = None

    @property
    def waiting_for(self) -> str:
        """Whose message is waited for, as text."""
        progress = self.progress
        if progress is None or not progress.works:
            return name_ranks([])
        peer = name_ranks([progress.works[progress.at][0]])
        return peer if progress.at < self.num_receives else f"{peer} to take what was sent"

    def over(self, limit_s: float) -> bool:
        """Wait for its end, whichever it is, at most `limit_s` seconds; say whether it has come."""
        group, progress = self.group, self.progress
        if group is None or progress is None or self.failure is not None:
            return True
        outcome = self.outcome = self.outcome or group.submit(progress.finish)
        if not ended(outcome, limit_s):
            return False
        self.failure = outcome.result()
        return True

    def complete(self) -> TransferReceipt:
        """Drop the messages, all of which are complete."""
        self.progress = self.group = self.outcome = None
        return super().complete()

    def give_up(self, reason: str) -> None:
        """Drop the messages, not all of which are complete; their connections are closed."""
        self.progress = self.group = self.outcome = None
        self.failure = self.failure or Failure(reason)


def await_end(transfer: GlooTransfer, group: GlooGroup, context: BackendContext, timeout_s: float) -> TransferReceipt:
    """Wait until every message of a layer is complete.

    Parameters
    ----------
    transfer : GlooTransfer
        In flight.
    group : GlooGroup
        The connections, which are closed when the limit is over.
    context : BackendContext
        Says whether the layer was called off.
    timeout_s : float
        Limit, seconds.

    Raises
    ------
    TransferError
        gloo reports a failure, or the wait was called off.
    StalledError
        The limit is over.
    """
    where = f"layer {transfer.layer}, phase wait"
    wait = Wait(context, timeout_s, label=NAME, where=where)
    while not transfer.over(min(LOOK_EVERY_S, wait.deadline.left_s)):
        try:
            wait.check(transfer.waiting_for)
        except StalledError:
            late = _sever_and_ask(transfer, group)
            seconds = wait.deadline.elapsed_s
            transfer.failure = Failure(f"its limit of {timeout_s:g} s was over")
            raise stalled_error(NAME, seconds, where, late) from None
    failure = transfer.failure
    if failure is None:
        return transfer.complete()
    look = context.cancelled()  # what happened elsewhere explains more than what gloo saw of it
    if look is not None:
        raise cancelled_error(NAME, look, where)
    raise failed_error(NAME, failure.reason, where, failure.peers)


def _sever_and_ask(transfer: GlooTransfer, group: GlooGroup) -> str:
    """Find out who is late, which takes closing the connections: over an open one, asking is waiting."""
    progress, outcome = transfer.progress, transfer.outcome
    group.sever()
    if progress is None or outcome is None:  # another thread gave the transfer up at this very moment
        return "nobody any more"
    ended(outcome, _WAKE_S)  # the thread is out of what it waited for, or stuck in it
    if progress.at < transfer.num_receives:
        return name_ranks(progress.late(transfer.num_receives))
    return f"{name_ranks(progress.late(len(progress.works)))} to take what was sent"
