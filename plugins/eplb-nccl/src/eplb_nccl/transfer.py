"""One layer's operations in flight, and the tag that keeps them apart from the host's own messages."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from eplb_core.backend import BackendContext, Buffers, TransferPlan, TransferReceipt
from eplb_core.backend.toolkit import row_batches
from eplb_core.errors import error_for
from eplb_nccl.group import Operation, Posted
from eplb_nccl.hooks import NAME


@dataclass(eq=False)
class LayerTransfer:
    """What `transfer` returns."""

    layer: int
    slot: int
    nbytes_received: int
    nbytes_sent: int
    posted: list[Posted] = field(default_factory=list)
    failure: str | None = None
    """Why posting stopped early, or its wait."""
    receipt: TransferReceipt | None = None
    """Set when everything is complete."""

    @classmethod
    def of(cls, plan: TransferPlan) -> LayerTransfer:
        """Make the handle of a plan, of which nothing is posted yet."""
        return cls(plan.layer, plan.slot, int(plan.receives.nbytes.sum()), int(plan.sends.nbytes.sum()))

    def complete(self) -> TransferReceipt:
        """Drop the operations, all of which are complete."""
        self.posted = []
        self.receipt = TransferReceipt(self.nbytes_received, self.nbytes_sent)
        return self.receipt

    def give_up(self, reason: str) -> list[Posted]:
        """Hand over the operations, not all of which are complete."""
        self.failure = self.failure or reason
        posted, self.posted = self.posted, []
        return posted


def operations_of(
    plan: TransferPlan, buffers: Buffers, context: BackendContext, place: Mapping[int, int]
) -> list[list[Operation]]:
    """Return this rank's operations batch by batch, receives first; both ends list a pair's rows alike.

    Raises
    ------
    TransferError
        EPLB-T001, when the plan does not fit what was registered.
    """
    return [
        [Operation(move.peer, place[move.peer], move.is_send, move.buffer) for move in batch]
        for batch in row_batches(plan, buffers, context, NAME)
    ]


def tag_of(context: BackendContext, topic: str) -> int:
    """Return the tag under which both ends post what belongs to a topic of this epoch."""
    return zlib.crc32(f"{context.name}/{context.epoch}/{topic}".encode()) & 0x3FFF_FFFF


def own(handle: object) -> LayerTransfer:
    """Return a handle that is one of ours; EPLB-P004 for anything else."""
    if not isinstance(handle, LayerTransfer):
        raise error_for("EPLB-P004", problem=f"{handle!r} is no transfer of {NAME}")
    return handle
