"""A plan of some layers, as a plan of all: the others move nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from eplb_core.arrays import IntArray, frozen

if TYPE_CHECKING:
    from eplb_core.plan.placement import PlacementPlan


def among_all(plan: PlacementPlan, numbers: Sequence[int], num_layers: int) -> PlacementPlan:
    """Return the same moves as those of some layers among all.

    Parameters
    ----------
    plan : PlacementPlan
        Made of the maps of these layers alone, at the cost of these.
    numbers : sequence of int
        Ascending: the i-th layer of the plan becomes ``numbers[i]``.
    num_layers : int
        Layers in all.
    """
    at, world_size = np.asarray(numbers, np.int64), plan.world_size

    def renumbered(copies: IntArray) -> IntArray:
        layer, rank = np.divmod(copies[:, 0], world_size)
        return frozen(np.column_stack([at[layer] * world_size + rank, copies[:, 1:]]))

    return replace(
        plan,
        layers=tuple(at[list(plan.layers)].tolist()),
        layer=frozen(at[plan.layer]),
        layer_starts=frozen(plan.layer_starts[np.searchsorted(at, np.arange(num_layers + 1))]),
        local=renumbered(plan.local),
        duplicate=renumbered(plan.duplicate),
        sourced=frozen(np.column_stack([at[plan.sourced[:, 0]], plan.sourced[:, 1:]])),
    )
