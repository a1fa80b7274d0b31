"""Maps of one group in the numbers of another: ranks leave, come, or change their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.errors import PlanError


def translate_map(
    physical_to_logical_map: npt.ArrayLike,
    rank_mapping: Mapping[int, int] | Sequence[int],
    num_local_physical_experts: int,
    world_size: int | None = None,
) -> IntArray:
    """Write a map of one group in the numbers of another.

    Parameters
    ----------
    physical_to_logical_map : array-like of int, [num_moe_layers, num_physical_experts]
        Logical expert of every slot of the old group.
    rank_mapping : mapping of int to int, or sequence of int
        New rank of every old rank; -1 for one that leaves.
    num_local_physical_experts : int
        Slots of a rank, in both groups.
    world_size : int or None
        Ranks of the new group; None takes one more than the highest new rank.

    Returns
    -------
    IntArray
        int64 ``[num_moe_layers, world_size * num_local_physical_experts]``; slots of ranks that are new are -1.

    Raises
    ------
    PlanError
        The map or the mapping does not fit (EPLB-P001).

    Examples
    --------
    Of three ranks the first leaves, and one comes:

    >>> translate_map([[0, 1, 2, 3, 0, 2]], {0: -1, 1: 0, 2: 1}, 2, world_size=3).tolist()
    [[2, 3, 0, 2, -1, -1]]
    """
    old = np.asarray(physical_to_logical_map)
    local = num_local_physical_experts
    mapping = checked_mapping(rank_mapping)
    highest = max(mapping.values(), default=-1)
    size = highest + 1 if world_size is None else world_size
    if highest >= size:
        raise PlanError("EPLB-P001", problem=f"rank_mapping names rank {highest} in a group of {size}")
    if old.ndim != 2 or old.dtype.kind not in "iu" or old.shape[1] != len(mapping) * local:
        problem = f"the map is {old.dtype} {list(old.shape)}, and {len(mapping)} ranks have {local} slots each"
        raise PlanError("EPLB-P001", problem=problem)
    new = np.full((len(old), size * local), -1, np.int64)
    for before, after in mapping.items():
        if after >= 0:
            new[:, after * local : (after + 1) * local] = old[:, before * local : (before + 1) * local]
    return new


def checked_mapping(rank_mapping: object) -> dict[int, int]:
    """Return old to new ranks; what is no such mapping is refused (EPLB-P001)."""
    pairs = rank_mapping.items() if isinstance(rank_mapping, Mapping) else None
    if (
        pairs is None
        and isinstance(rank_mapping, (Sequence, np.ndarray))
        and not isinstance(rank_mapping, (str, bytes))
    ):
        pairs = dict(enumerate(rank_mapping)).items()
    try:
        mapping = {int(before): int(after) for before, after in pairs or ()}
    except (TypeError, ValueError):
        mapping = {}
    kept = [after for after in mapping.values() if after >= 0]
    problem = ""
    if not mapping:
        problem = f"rank_mapping is {rank_mapping!r}, and should give the new rank of every old one"
    elif sorted(mapping) != list(range(len(mapping))):
        problem = f"rank_mapping is for ranks {sorted(mapping)}, and should be for 0 to {len(mapping) - 1}"
    elif min(mapping.values()) < -1 or len(set(kept)) != len(kept):
        problem = f"rank_mapping {mapping} gives a number twice, or one below -1"
    if problem:
        raise PlanError("EPLB-P001", problem=problem)
    return mapping
