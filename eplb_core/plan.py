"""From a pair of maps to the moves of every layer, in one canonical order, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MoveColumns:
    """Rows that cross ranks in one layer, as columns of equal length [num_moves], int64.

    Ordered by (layer, src, dst, tensor, source row), which both ends of a move share.

    Parameters
    ----------
    peer : IntArray
        The other rank.
    tensor : IntArray
        Index of the tensor within its layer.
    row : IntArray
        Row on this rank: the source row of a send, the destination row of a receive.
    peer_row : IntArray
        Row on the peer: the destination row of a send, the source row of a receive.
    nbytes : IntArray
        Bytes of the row.
    landing_offset : IntArray
        Where the row lands, in bytes from the start of the **receiver's** slot.
    message : IntArray
        Number of the message within its (source, destination) pair; rows with one number travel together, and are
        contiguous in landing memory in this order.
    batch : IntArray
        Number of the batch, for backends that declare ``batched``; 0 for all others.
    """

    peer: IntArray
    tensor: IntArray
    row: IntArray
    peer_row: IntArray
    nbytes: IntArray
    landing_offset: IntArray
    message: IntArray
    batch: IntArray

    def __len__(self) -> int:
        return len(self.peer)


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """One layer's moves for one rank: what ``transfer`` is given.

    Parameters
    ----------
    generation : int
        Number of the rearrangement, rising within an epoch.
    sequence : int
        Rises by one with every `transfer` of an epoch, the same on every rank.
    layer : int
        Index of the MoE layer.
    slot : int
        Landing slot, 0 to ``staging_layers - 1``. The layer that was last in it is decided everywhere and its copies
        on this rank are done, so its landing and send leases are free.
    sends, receives : MoveColumns
        This rank's share; both may be empty.
    num_batches : int
        Batches of the whole layer over all ranks (0 when nothing moves).
    """

    generation: int
    sequence: int
    layer: int
    slot: int
    sends: MoveColumns
    receives: MoveColumns
    num_batches: int = 1
