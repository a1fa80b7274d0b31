"""Ranks that take part in a rearrangement; rows of the others are lost, and no plan may need them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eplb_core.arrays import IntArray
from eplb_core.errors import PlanError
from eplb_core.plan.replicas import Experts


def without_absent(before: IntArray, after: IntArray, members: Sequence[int]) -> IntArray:
    """Return `before`, ``[num_layers, world_size, num_rows]``, with the rows of absent ranks empty."""
    world_size = before.shape[1]
    present = np.zeros(world_size, bool)
    for rank in members:
        if not 0 <= rank < world_size:
            raise PlanError("EPLB-P007", problem=f"member {rank} is not a rank of a world of {world_size}")
        present[rank] = True
    asked = np.argwhere((after >= 0).any(axis=2) & ~present)
    if len(asked):
        layer, rank = asked[0].tolist()
        experts = after[layer, rank]
        detail = f"The new map puts expert {experts[experts >= 0][0]} on it."
        raise PlanError("EPLB-P005", layer=layer, rank=rank, detail=detail)
    return np.where(present[:, None], before, -1)


def held_nowhere(missing: Experts, old: IntArray, num_rows: int) -> PlanError:
    """Return the error for experts that are needed and that no member holds."""
    layer, expert, rank = (int(column[0]) for column in (missing.layer, missing.expert, missing.rank))
    detail = []
    absent = np.unique(np.flatnonzero(old[layer] == expert) // num_rows).tolist()
    if absent:
        detail.append(f"Only ranks {absent} hold it in the old map, and they are not members.")
    if len(missing.layer) > 1:
        detail.append(f"{len(missing.layer) - 1} more needs cannot be served.")
    return PlanError("EPLB-P002", layer=layer, expert=expert, rank=rank, detail=" ".join(detail))
