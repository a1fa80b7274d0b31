"""Alignment: a new placement relabelled so that as many experts as possible stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.balancing.arguments import FloatArray, checked_map, count_replicas
from eplb_core.balancing.breath import let_others_run
from eplb_core.errors import PlanError

Assign = Callable[[FloatArray], IntArray]
"""From a score [n, n] a column of its own for each row."""


def align(old_map: npt.ArrayLike, new_map: npt.ArrayLike, num_ranks: int, *, num_nodes: int = 1) -> IntArray:
    """Relabel a new placement so that as many experts as possible stay where they are.

    What one rank is to hold may as well be held by another: whole ranks of `new_map` trade places, and slots trade
    places within their rank. Which experts share a rank never changes, so neither does `balancedness`. With several
    nodes, whole nodes trade places first, to keep experts on their node, and ranks then only within a node.

    Parameters
    ----------
    old_map, new_map : array_like, integer [num_layers, num_physical_experts]
        ``physical_to_logical_map`` now and as it should become; -1 is an empty slot.
    num_ranks : int
        Ranks that share the slots evenly, in order.
    num_nodes : int
        Nodes that share the ranks evenly, in order. Give 1 when they do not.

    Returns
    -------
    IntArray
        int64, shape of `new_map`. An expert that stays on its rank keeps its row. It moves no more rows between ranks
        (with several nodes: between nodes) than `new_map` itself would.

    Raises
    ------
    PlanError
        EPLB-P001 or EPLB-P006: the maps do not fit together, or the sizes do not.

    Notes
    -----
    Who trades with whom is an assignment problem. With SciPy (``pip install eplb-core[align]``) it is solved exactly,
    by ``scipy.optimize.linear_sum_assignment``; without it greedily, the pair with most experts in common first. The
    two can differ, so where each rank aligns for itself all must have SciPy or none.
    """
    old = checked_map("old_map", old_map, num_ranks)
    new = checked_map("new_map", new_map, num_ranks)
    if old.shape != new.shape:
        raise PlanError("EPLB-P001", problem=f"old_map is {list(old.shape)}, new_map {list(new.shape)}")
    if num_nodes < 1 or num_ranks % num_nodes:
        raise PlanError("EPLB-P006", problem=f"{num_ranks} ranks do not spread evenly over {num_nodes} nodes")
    num_layers, num_slots = new.shape
    num_local = num_slots // num_ranks
    num_logical_experts = int(max(old.max(initial=-1), new.max(initial=-1))) + 1
    assign = assignment()
    aligned = np.empty((num_layers, num_nodes, num_ranks // num_nodes, num_local), np.int64)
    for layer, (old_nodes, new_nodes) in enumerate(
        zip(old.reshape(aligned.shape), new.reshape(aligned.shape), strict=True)
    ):
        let_others_run()
        # A node is a block of ranks, and each rank of a node a block of one rank.
        traded = new_nodes[_trade_places(old_nodes, new_nodes, num_logical_experts, assign)]
        for node, (old_ranks, new_ranks) in enumerate(zip(old_nodes, traded, strict=True)):
            order = _trade_places(old_ranks[:, None], new_ranks[:, None], num_logical_experts, assign)
            aligned[layer, node] = _keep_rows(old_ranks, new_ranks[order])
    return aligned.reshape(new.shape)


@cache
def assignment() -> Assign:
    """Return how blocks are assigned: exactly, where SciPy is installed; importing it takes a third of a second."""
    if not find_spec("scipy"):
        return _assign_greedily
    from scipy.optimize import linear_sum_assignment

    def exactly(score: FloatArray) -> IntArray:
        columns: IntArray = linear_sum_assignment(score, maximize=True)[1]
        return columns

    return exactly


def rows_received(old_map: npt.ArrayLike, new_map: npt.ArrayLike, num_ranks: int) -> IntArray:
    """Count the rows that ranks must receive from others to come from one placement to another.

    Parameters
    ----------
    old_map, new_map : array_like, integer [num_layers, num_physical_experts]
        ``physical_to_logical_map`` before and after; -1 is an empty slot.
    num_ranks : int
        Ranks that share the slots evenly, in order.

    Returns
    -------
    IntArray
        int64 [num_layers]. A rank receives an expert once, however many of its slots hold it, and never one that it
        has.

    Raises
    ------
    PlanError
        EPLB-P001: the maps do not fit together, or not the ranks.
    """
    old = checked_map("old_map", old_map, num_ranks)
    new = checked_map("new_map", new_map, num_ranks)
    if old.shape != new.shape:
        raise PlanError("EPLB-P001", problem=f"old_map is {list(old.shape)}, new_map {list(new.shape)}")
    num_logical_experts = int(max(old.max(initial=-1), new.max(initial=-1))) + 1
    by_rank = (len(old) * num_ranks, old.shape[1] // num_ranks)
    held = count_replicas(old.reshape(by_rank), num_logical_experts) > 0
    needed = count_replicas(new.reshape(by_rank), num_logical_experts) > 0
    received: IntArray = (needed & ~held).reshape(len(old), num_ranks * num_logical_experts).sum(axis=1)
    return received


def _trade_places(old: IntArray, new: IntArray, num_logical_experts: int, assign: Assign) -> IntArray:
    """Return the order of the blocks of `new` [blocks, ranks, slots] in which fewest rows come from other blocks."""
    num_blocks = len(new)
    if num_blocks == 1:
        return np.zeros(1, np.int64)
    # A rank receives an expert once, however many of its slots hold it, so a block needs as many as its ranks do.
    held = count_replicas(old.reshape(num_blocks, -1), num_logical_experts) > 0
    needed = count_replicas(new.reshape(-1, new.shape[2]), num_logical_experts) > 0
    needed_by_block = needed.reshape(*new.shape[:2], num_logical_experts).sum(axis=1, dtype=np.float64)
    saved = held.astype(np.float64) @ needed_by_block.T
    # Among equals a block stays where it is: all such preferences together weigh less than one row.
    return assign(saved * (num_blocks + 1) + np.eye(num_blocks))


def _assign_greedily(score: FloatArray) -> IntArray:
    """Return for each row of `score` [n, n] a column of its own, best pair first; never worse than the diagonal."""
    left = score.copy()
    columns = np.empty(len(score), np.int64)
    for _ in range(len(score)):
        row, column = np.unravel_index(left.argmax(), left.shape)
        columns[row] = column
        left[row, :] = left[:, column] = -1
    diagonal = np.arange(len(score))
    return columns if score[diagonal, columns].sum() > np.trace(score) else diagonal


def _keep_rows(old: IntArray, new: IntArray) -> IntArray:
    """Reorder each rank's slots in `new` [ranks, slots] so that what stays on the rank keeps its row."""
    old_occurrence, new_occurrence = _occurrence(old), _occurrence(new)
    # The k-th copy of an expert in `new` belongs in the row of the k-th copy in `old`.
    same = (old[:, :, None] == new[:, None, :]) & (old_occurrence[:, :, None] == new_occurrence[:, None, :])
    keeps, stays = same.any(axis=2), same.any(axis=1)
    kept = np.empty_like(new)
    kept[keeps] = old[keeps]
    kept[~keeps] = new[~stays]  # rank by rank, as many rows free as slots without a row
    return kept


def _occurrence(slots: IntArray) -> IntArray:
    """Return for each slot how many earlier slots of its rank hold the same expert."""
    earlier = np.tri(slots.shape[1], k=-1, dtype=bool)
    counts: IntArray = ((slots[:, :, None] == slots[:, None, :]) & earlier).sum(axis=2)
    return counts
