"""One layer's rows of one peer: where they are in its memory, and where they land in ours."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core.backend import Buffers, MoveColumns, TransferPlan
from eplb_vmread.memory import Parts
from eplb_vmread.metadata import Peer


def parts_of(plan: TransferPlan, source: int, peer: Peer, buffers: Buffers) -> tuple[Parts, Parts]:
    """Return the parts of a peer's memory to read, and those of ours to read them into, alike in number and bytes.

    Parameters
    ----------
    plan : TransferPlan
        Of this rank.
    source : int
        The peer's rank.
    peer : Peer
        Its memory.
    buffers : Buffers
        Landing memory.
    """
    moves = plan.receives
    mine = moves.peer == source
    nbytes = moves.nbytes[mine]
    starts = peer.rows[plan.layer][moves.tensor[mine]] + moves.peer_row[mine] * nbytes
    landing = _landing(plan.slot, moves, buffers)[mine]
    return np.stack([starts, nbytes], axis=1), np.stack([landing, nbytes], axis=1)


def _landing(slot: int, moves: MoveColumns, buffers: Buffers) -> npt.NDArray[np.int64]:
    """Return the address of each row that is received."""
    if buffers.landing_rows is None:
        return np.asarray(moves.landing_offset + buffers.landing[slot].data_ptr(), np.int64)
    bases = np.array([rows.data_ptr() for rows in buffers.landing_rows[slot]], np.int64)
    return np.asarray(bases[moves.tensor] + moves.row * moves.nbytes, np.int64)
