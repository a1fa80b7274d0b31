"""Arguments and results of the hooks: metadata, receipts, and one layer's moves as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # discovery reads descriptors; it must not pay for numpy
    from eplb_core.arrays import IntArray


@dataclass(frozen=True)
class LocalMetadata:
    """Result of ``register_buffers``.

    Parameters
    ----------
    payload : bytes
        Opaque to the core, for this backend on other ranks; at most 1 MiB. Never a pickle.
    """

    payload: bytes


@dataclass(frozen=True)
class PeerMetadata:
    """A peer's metadata after the core has checked its envelope.

    Parameters
    ----------
    rank : int
        The peer.
    payload : bytes
        Its `LocalMetadata.payload`.
    """

    rank: int
    payload: bytes


@dataclass(frozen=True)
class ConnectReceipt:
    """Result of ``exchange_metadata``: the peers that this call made reachable."""

    peers: tuple[int, ...]


@dataclass(frozen=True)
class TransferReceipt:
    """Result of ``wait``.

    Parameters
    ----------
    nbytes_received, nbytes_sent : int
        Bytes of this rank's rows of the layer.
    """

    nbytes_received: int
    nbytes_sent: int


@dataclass(frozen=True, eq=False)
class MoveColumns:
    """Rows that cross ranks in one layer, as read-only columns of equal length [num_moves], int64.

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
    """Argument of ``transfer``: one layer's moves for one rank.

    Parameters
    ----------
    generation : int
        Number of the rearrangement, rising within an epoch.
    sequence : int
        Identifies a transfer within the epoch, and rises. It follows from generation and layer, so it is equal on every
        rank, whatever each has started before.
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
