"""The handle that `transfer` returns: one layer's plan, and its receipt once everything is complete."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from typing_extensions import Self

from eplb_core.backend.transfer import TransferPlan, TransferReceipt
from eplb_core.errors import error_for

T = TypeVar("T", bound="LayerTransfer")


@dataclass(eq=False)
class LayerTransfer:
    """One layer's transfer of this rank; backends add what they have in flight for it, with defaults.

    Parameters
    ----------
    plan : TransferPlan
        This rank's moves of the layer.

    Attributes
    ----------
    receipt : TransferReceipt or None
        Set when everything is complete.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> from eplb_core.backend import TransferPlan
    >>> rows, none = SimpleNamespace(nbytes=np.array([4, 4])), SimpleNamespace(nbytes=np.array([], int))
    >>> transfer = LayerTransfer(TransferPlan(generation=1, sequence=1, layer=3, slot=0, sends=none, receives=rows))
    >>> transfer.layer, transfer.receipt
    (3, None)
    >>> transfer.complete()
    TransferReceipt(nbytes_received=8, nbytes_sent=0)
    >>> LayerTransfer.own(transfer, "mine") is transfer
    True
    """

    plan: TransferPlan
    receipt: TransferReceipt | None = field(default=None, init=False)

    @property
    def layer(self) -> int:
        """Layer of the plan."""
        return self.plan.layer

    @property
    def slot(self) -> int:
        """Landing slot of the plan."""
        return self.plan.slot

    def complete(self) -> TransferReceipt:
        """Note that every send and receive is complete."""
        self.receipt = TransferReceipt(int(self.plan.receives.nbytes.sum()), int(self.plan.sends.nbytes.sum()))
        return self.receipt

    @classmethod
    def own(cls, handle: object, label: str) -> Self:
        """Return a handle that is of this class; EPLB-P004 for anything else."""
        if not isinstance(handle, cls):
            raise error_for("EPLB-P004", problem=f"{handle!r} is not a transfer of {label}")
        return handle
