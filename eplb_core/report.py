"""What a rearrangement did: the report that comes back from it, and rides on every error that leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rides on every error, and errors are import-light
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class StagingStats:
    """Bytes of a `StagingAllocator`.

    Parameters
    ----------
    nbytes_in_use : int
        Taken by the blocks that are out, what the pool rounds up included.
    nbytes_peak : int
        The most that `nbytes_in_use` has been.
    nbytes_pool : int
        Held beside those: released blocks that wait for their event, and what the allocator's own pool caches.
    nbytes_rounding : int
        What rounding adds to `nbytes_in_use`; 0 where the allocator cannot tell.
    """

    nbytes_in_use: int
    nbytes_peak: int
    nbytes_pool: int
    nbytes_rounding: int = 0


@dataclass(frozen=True, eq=False)
class RearrangeReport:
    """What holds after a rearrangement, whole or failed.

    Parameters
    ----------
    committed_layers : tuple of int
        Layers that moved something and whose rows this rank has on the new placement.
    physical_to_logical_map : ndarray, int64, [num_moe_layers, num_physical_experts]
        The placement of the bytes that now hold: rows of `decided_layers` are on the old one until they are committed.
        Equal on all live ranks, but for `decided_layers` and `layers_in_doubt`. -1 where a row is empty, or belongs to
        a rank that takes no part.
    nbytes_received, nbytes_sent : int
        Bytes of rows that this rank took from, and gave to, other ranks.
    nbytes_local : int
        Bytes of rows that moved within this rank.
    nbytes_supplied : int
        Bytes of rows that sources of this rank supplied.
    unmet : tuple of (int, int, tuple of int)
        (layer, logical expert, slots) of what the last rearrangement was asked for and no live row and no source had,
        with ``missing="report"``; those slots stay as they are.
    seconds : float
        From begin to end on this rank.
    seconds_by_phase : Mapping[str, float]
        Seconds of this rank's thread in "agree", "connect", "transfer", "source", "wait", "vote" and "commit".
    backend : str
        Backend that moved them.
    epoch, generation : int
        Numbers of the rearrangement.
    quarantined_nbytes : int
        Landing memory that an undrained transfer may still write, kept out of use for the life of the process.
    decided_layers : tuple of int
        Layers that were voted and are not yet copied on this rank. Every rank commits them, also after a failure of a
        later layer: ``commit(layer)`` stays allowed, ``rebuild`` and ``close`` do it at the latest.
    layers_in_doubt : tuple of int
        After the store was lost: layers that this rank voted on without learning the outcome. Its weights and the map
        have them on the old placement; other ranks may have them on the new one, until ``rebuild`` settles them.
    staging : StagingStats
        Bytes of landing and send memory, in use and at the peak, as the staging allocator counts them.
    """

    committed_layers: tuple[int, ...]
    physical_to_logical_map: npt.NDArray[np.int64]
    nbytes_received: int = 0
    nbytes_sent: int = 0
    nbytes_local: int = 0
    nbytes_supplied: int = 0
    unmet: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    seconds: float = 0.0
    seconds_by_phase: Mapping[str, float] = field(default_factory=dict)
    backend: str = ""
    epoch: int = 0
    generation: int = 0
    quarantined_nbytes: int = 0
    decided_layers: tuple[int, ...] = ()
    layers_in_doubt: tuple[int, ...] = ()
    staging: StagingStats = field(default_factory=lambda: StagingStats(0, 0, 0))
