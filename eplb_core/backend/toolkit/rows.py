"""A plan's rows as tensors, batch by batch: where each is read, or where it lands."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from eplb_core.errors import error_for

if TYPE_CHECKING:  # the contract is read without torch
    import torch

    from eplb_core.backend.memory import Buffers
    from eplb_core.backend.protocol import BackendContext
    from eplb_core.backend.transfer import TransferPlan


class RowMove(NamedTuple):
    """One row to send or to receive."""

    peer: int
    """Rank of the other end."""
    is_send: bool
    buffer: torch.Tensor
    """uint8 ``[nbytes]``, contiguous: the live row to send, or its place in landing memory."""


def row_batches(plan: TransferPlan, buffers: Buffers, context: BackendContext, label: str) -> list[list[RowMove]]:
    """Return this rank's rows batch by batch, for message transports; both ends list a pair's rows in the same order.

    Parameters
    ----------
    plan : TransferPlan
        This rank's moves of the layer.
    buffers : Buffers
        Live rows and landing memory.
    context : BackendContext
        Says who the members are.
    label : str
        Leading word of the backend's errors.

    Returns
    -------
    list of list of RowMove
        Receives before sends within a batch, each in the plan's order; one batch for backends that are not ``batched``.

    Raises
    ------
    TransferError
        EPLB-T001 with ``state="refused"``: a row or peer is not among what was registered.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> import torch
    >>> from eplb_core.backend import Buffers, MoveColumns, TransferPlan
    >>> live, landing = torch.arange(8, dtype=torch.uint8).view(2, 4), torch.zeros(8, dtype=torch.uint8)
    >>> one, none = [np.array([value]) for value in (1, 0, 1, 0, 4, 0, 0, 0)], [np.array([], int)] * 8
    >>> plan = TransferPlan(1, 1, 0, 0, MoveColumns(*one), MoveColumns(*none))
    >>> context = SimpleNamespace(rank=0, members=(0, 1))
    >>> row_batches(plan, Buffers([[live]], [landing], None, 0), context, "mine")
    [[RowMove(peer=1, is_send=True, buffer=tensor([4, 5, 6, 7], dtype=torch.uint8))]]
    """
    batches: dict[int, list[RowMove]] = {}
    for is_send, columns in ((False, plan.receives), (True, plan.sends)):
        for peer, tensor, row, nbytes, offset, batch in zip(
            columns.peer.tolist(),
            columns.tensor.tolist(),
            columns.row.tolist(),
            columns.nbytes.tolist(),
            columns.landing_offset.tolist(),
            columns.batch.tolist(),
            strict=True,
        ):
            if is_send:
                buffer = buffers.rows[plan.layer][tensor][row]
            elif buffers.landing_rows is not None:
                buffer = buffers.landing_rows[plan.slot][tensor][row]
            else:
                buffer = buffers.landing[plan.slot][offset : offset + nbytes]
            if buffer.numel() != nbytes or peer not in context.members or peer == context.rank:
                detail = f"(the plan of layer {plan.layer} does not fit what was registered)."
                raise error_for("EPLB-T001", label=label, state="refused", detail=detail)
            batches.setdefault(batch, []).append(RowMove(peer, is_send, buffer))
    return [batches[number] for number in sorted(batches)]
