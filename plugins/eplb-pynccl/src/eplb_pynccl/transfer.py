"""One layer's batches in flight, made from its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eplb_core.backend import BackendContext, Buffers, TransferPlan, TransferReceipt
from eplb_core.backend.toolkit import row_batches
from eplb_core.errors import error_for
from eplb_pynccl.connection import Batch, Operation
from eplb_pynccl.hooks import NAME


@dataclass(eq=False)
class LayerTransfer:
    """What `transfer` returns."""

    layer: int
    slot: int
    nbytes_received: int
    nbytes_sent: int
    batches: list[Batch] = field(default_factory=list)
    receipt: TransferReceipt | None = None
    """Set when everything is complete."""

    @classmethod
    def of(cls, plan: TransferPlan) -> LayerTransfer:
        """Make the handle of a plan, of which nothing is queued yet."""
        return cls(plan.layer, plan.slot, int(plan.receives.nbytes.sum()), int(plan.sends.nbytes.sum()))

    def complete(self) -> TransferReceipt:
        """Drop the batches, all of which are complete."""
        self.batches = []
        self.receipt = TransferReceipt(self.nbytes_received, self.nbytes_sent)
        return self.receipt


def batches_of(plan: TransferPlan, buffers: Buffers, context: BackendContext, place: Mapping[int, int]) -> list[Batch]:
    """Return this rank's operations batch by batch; both ends list a pair's rows alike.

    Raises
    ------
    TransferError
        EPLB-T001, when the plan does not fit what was registered.
    """
    return [
        Batch(
            [
                Operation(peer, place[peer], is_send, buffer.data_ptr(), buffer.numel())
                for peer, is_send, buffer in batch
            ]
        )
        for batch in row_batches(plan, buffers, context, NAME)
    ]


def own(handle: object) -> LayerTransfer:
    """Return a handle that is one of ours; EPLB-P004 for anything else."""
    if not isinstance(handle, LayerTransfer):
        raise error_for("EPLB-P004", problem=f"{handle!r} is no transfer of {NAME}")
    return handle
