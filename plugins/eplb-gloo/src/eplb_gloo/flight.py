"""One layer's messages in flight: posted, waited for once, dropped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eplb_core.backend import TransferReceipt
from eplb_gloo.group import GlooGroup, brief, finish, timed_out
from eplb_gloo.messages import Messages


@dataclass(eq=False)
class LayerTransfer:
    """One layer's receives and sends: what the backend's ``transfer`` returns.

    Parameters
    ----------
    layer, slot : int
        Of the plan.
    nbytes_received, nbytes_sent : int
        Bytes of its messages.
    receives, sends : list of (int, Work)
        (peer, posted operation) in posting order; each holds a connection, a buffer and memory of the layer, so they
        are dropped as soon as the layer is finished either way.
    failure : str or None
        Why posting stopped early, or what its wait or abort ended with.
    receipt : TransferReceipt or None
        Set when everything is complete.
    """

    layer: int
    slot: int
    nbytes_received: int
    nbytes_sent: int
    receives: list[tuple[int, Any]] = field(default_factory=list)
    sends: list[tuple[int, Any]] = field(default_factory=list)
    failure: str | None = None
    receipt: TransferReceipt | None = None

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
        try:
            # Receives first: gloo sends nothing before the other end has said that it is ready.
            for peer, place, tag, offset, nbytes in zip(
                receives.peers, receives.group_ranks, receives.tags, receives.offsets, receives.nbytes, strict=True
            ):
                self.receives.append((peer, group.receive(landing[offset : offset + nbytes], place, tag)))
            for peer, place, tag, buffer in zip(sends.peers, sends.group_ranks, sends.tags, outgoing, strict=True):
                self.sends.append((peer, group.send(buffer, place, tag)))
        except RuntimeError as error:
            self.failure = brief(error)

    def complete(self) -> TransferReceipt:
        """Drop the messages, all of which are complete."""
        self.receives, self.sends = [], []
        self.receipt = TransferReceipt(self.nbytes_received, self.nbytes_sent)
        return self.receipt

    def give_up(self, reason: str) -> None:
        """Drop the messages, not all of which are complete; their connections are closed."""
        self.receives, self.sends = [], []
        self.failure = self.failure or reason


@dataclass(frozen=True)
class Failure:
    """Where a wait stopped.

    Parameters
    ----------
    reason : str
        What gloo says.
    peer : int or None
        Whose message it was.
    timed_out : bool
        The limit ran out.
    silent : sequence of int
        After a time-out: peers whose messages did not arrive, one entry per message.
    untaken : sequence of int
        After a time-out without such: peers that did not take what was sent.
    """

    reason: str
    peer: int | None = None
    timed_out: bool = False
    silent: Sequence[int] = ()
    untaken: Sequence[int] = ()


def finish_all(transfer: LayerTransfer, deadline_s: float) -> Failure | None:
    """Wait for every receive, then for every send, each once: gloo counts a completion off when it is waited for.

    Parameters
    ----------
    transfer : LayerTransfer
        In flight.
    deadline_s : float
        On the monotonic clock, seconds.

    Returns
    -------
    Failure or None
        None when all are complete. A connection that closed is reported at once, so that the reason is in place before
        ours are closed; after a time-out gloo has closed them all, and the rest is only asked for who is silent.
    """
    receives, sends = transfer.receives, transfer.sends
    for works in (receives, sends):
        for i, (peer, work) in enumerate(works):
            reason = finish(work, deadline_s - time.monotonic())
            if reason is None:
                continue
            if not timed_out(reason):
                return Failure(reason, peer)
            late = [peer, *(other for other, left in works[i + 1 :] if finish(left, 0.0) is not None)]
            if works is receives:
                return Failure(reason, peer, timed_out=True, silent=late)
            return Failure(reason, peer, timed_out=True, untaken=late)
    return None
