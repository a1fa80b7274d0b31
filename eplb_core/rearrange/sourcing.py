"""Experts that no live rank holds: which of them sources supply, what stays unmet, and how their rows land.

Which rank has which source is known to that rank alone. So every ballot on a proposal says which of its own needs that
rank can supply, and the decision says it of all: all ranks then make the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from eplb_core.arrays import IntArray, aligned
from eplb_core.errors import PlanError, TransferError
from eplb_core.errors.texts import describe
from eplb_core.plan.members import held_nowhere
from eplb_core.plan.replicas import Experts
from eplb_core.sources.provider import SourceProvider

if TYPE_CHECKING:
    from collections.abc import Callable

    from eplb_core.backend import MoveColumns
    from eplb_core.memory.landing import LandingMemory
    from eplb_core.plan import PlacementPlan
    from eplb_core.weights.layout import LayerGeometry
    from eplb_core.wire.ballots import Ballot

Unmet = tuple[tuple[int, int, tuple[int, ...]], ...]
"""(layer, logical expert, slots) of every expert that is wanted and that nobody has."""


@dataclass(frozen=True)
class Fill:
    """One row of this rank that a source supplies.

    Parameters
    ----------
    tensor, expert : int
        Index of its tensor, and logical expert.
    target : torch.Tensor
        Where it lands, uint8 ``[nbytes]``.
    """

    tensor: int
    expert: int
    target: torch.Tensor


def supplied_here(sources: Sequence[SourceProvider], plan: PlacementPlan, rank: int) -> str:
    """Return which of a rank's unserved needs its sources hold: a bit each, in hexadecimal; empty for none."""
    own = plan.sourced[plan.sourced[:, 1] == rank]
    if not sources or not len(own):
        return ""
    held = np.array([source_of(sources, layer, expert) is not None for layer, _, expert, _ in own.tolist()])
    return np.packbits(held).tobytes().hex() if held.any() else ""


def supplied_anywhere(plan: PlacementPlan, ballots: Mapping[int, Ballot]) -> dict[str, str]:
    """Return what every rank's ballot says, by rank, those that supply nothing left out."""
    told = {str(rank): str(ballot.content.get("supplied", "")) for rank, ballot in ballots.items()}
    return {rank: bits for rank, bits in told.items() if bits} if len(plan.sourced) else {}


def unserved(plan: PlacementPlan, supplied: Mapping[str, str]) -> IntArray:
    """Return the needs that nobody supplies, ``[n, 4]`` as `PlacementPlan.sourced`."""
    needs = plan.sourced
    met = np.zeros(len(needs), bool)
    for rank, bits in supplied.items():
        own = np.flatnonzero(needs[:, 1] == int(rank))
        met[own] = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8), count=len(own)).astype(bool)
    return needs[~met]


def refusal_of(left: IntArray, old: IntArray, layers: Sequence[int] | None, num_rows: int) -> PlanError:
    """Make the error for needs that nobody supplies (EPLB-P002); the rows of `old` are of `layers`, or of all."""
    layer, rank, expert, row = left.T
    whole = old
    if layers is not None:
        whole = np.full((max(layers) + 1, old.shape[1]), -1)
        whole[list(layers)] = old
    return held_nowhere(Experts(layer, rank, expert, row), whole, num_rows)


def without_unmet(
    old: IntArray, new: IntArray, left: IntArray, layers: Sequence[int] | None, num_rows: int
) -> tuple[IntArray, Unmet]:
    """Return the new map in which slots of unmet experts keep what they hold, and the list of them.

    Notes
    -----
    Every slot of the rank that wants the expert stays, for each is a copy of the one that does not come. The rows of
    the maps are of `layers`, or of all.
    """
    row_of = range(int(left[:, 0].max()) + 1) if layers is None else {layer: row for row, layer in enumerate(layers)}
    kept, found = new.copy(), dict[tuple[int, int], list[int]]()
    for layer, rank, expert, _ in left.tolist():
        slots = rank * num_rows + np.flatnonzero(new[row_of[layer], rank * num_rows : (rank + 1) * num_rows] == expert)
        kept[row_of[layer], slots] = old[row_of[layer], slots]
        found.setdefault((layer, expert), []).extend(slots.tolist())
    return kept, tuple((layer, expert, tuple(sorted(slots))) for (layer, expert), slots in sorted(found.items()))


def source_of(sources: Sequence[SourceProvider], layer: int, expert: int) -> SourceProvider | None:
    """Return the first source that holds an expert."""
    for source in sources:
        try:
            if source.holds(layer, expert):
                return source
        except Exception as error:
            reason = f"its holds() failed with {describe(error)}"
            raise TransferError(
                "EPLB-T024", source=source, layer=layer, tensor="all", expert=expert, rank="this", reason=reason
            ) from error
    return None


def fills_of(
    needs: IntArray, geometry: LayerGeometry, receives: MoveColumns, landing: LandingMemory, slot: int
) -> tuple[list[Fill], list[tuple[int, int]]]:
    """Lay out where a rank's sourced rows of a layer land: behind the received ones where those are packed.

    Notes
    -----
    ``needs`` is ``[n, 4]``, as `PlacementPlan.sourced`, of this rank and layer. A rank receives or is supplied each row
    at most once, so what a slot has room for suffices. The second list is (tensor, row) of each fill.
    """
    moving = geometry.moving.tolist()
    fills, places = [], []
    sizes = aligned(geometry.nbytes)
    end = int((receives.landing_offset + receives.nbytes).max(initial=0))
    end += -end % 64
    for _, _, expert, row in needs.tolist():
        for tensor in moving:
            nbytes = int(geometry.nbytes[tensor])
            if landing.is_grid:
                target = landing.grid_row(slot, geometry, tensor, row)
            else:
                target = landing.slots[slot][end : end + nbytes]
                end += int(sizes[tensor])
            fills.append(Fill(tensor, expert, target))
            places.append((tensor, row))
    return fills, places


def read_all(
    sources: Sequence[SourceProvider], layer: int, rank: int, fills: Sequence[Fill], progress: Callable[[], None]
) -> int:
    """Read rows into landing memory, and return their bytes.

    Raises
    ------
    TransferError
        A source failed (EPLB-T024).
    """
    nbytes = 0
    for fill in fills:
        source = source_of(sources, layer, fill.expert)
        try:
            if source is None:
                raise LookupError("no source holds it any more")
            on_host = fill.target.device.type == "cpu"
            row = fill.target if on_host else torch.empty(fill.target.shape, dtype=torch.uint8)
            source.read(layer, fill.tensor, fill.expert, row.numpy())
            if not on_host:
                fill.target.copy_(row)
        except Exception as error:
            raise TransferError(
                "EPLB-T024",
                source=source,
                layer=layer,
                tensor=fill.tensor,
                expert=fill.expert,
                rank=rank,
                reason=describe(error),
            ) from error
        nbytes += fill.target.numel()
        progress()  # other ranks may be reading from this one meanwhile
    return nbytes
