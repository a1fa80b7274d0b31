"""Placement: which physical expert holds which logical one, given how loaded the logical experts are."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.errors import PlanError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def rebalance_experts(
    load: npt.ArrayLike,
    num_physical_experts: int,
    *,
    num_ranks: int,
    num_groups: int = 1,
    num_nodes: int = 1,
) -> IntArray:
    """Place experts by hierarchical expert-parallel load balancing (``policy="default"``).

    In three steps, for all layers at once: groups of experts are packed onto nodes, so that routing limited to groups
    stays on few nodes; on each node, replicas go one by one to the expert whose replicas carry most; the physical
    experts of a node are packed onto its ranks. Packing is greedy: heaviest first, onto the lightest bin with room.

    When the groups cannot be spread evenly over the nodes, or the ranks are not, the global form is used: one group,
    one node.

    Parameters
    ----------
    load : array_like, real [num_layers, num_logical_experts]
        How busy each logical expert was, for instance in tokens; finite and not negative, in any unit.
    num_physical_experts : int
        Slots over all ranks; at least the number of logical experts, and a multiple of `num_ranks`.
    num_ranks : int
        Ranks of the expert-parallel group; those of a node are consecutive.
    num_groups : int
        Groups of consecutive logical experts, of equal size, that the router picks from.
    num_nodes : int
        Nodes that the ranks are on.

    Returns
    -------
    IntArray
        ``physical_to_logical_map``, int64 [num_layers, num_physical_experts]. The same input gives the same map on
        every machine.

    Raises
    ------
    PlanError
        EPLB-P006: the sizes or the load allow no placement.

    Notes
    -----
    The algorithm is the one DeepSeek published as EPLB (github.com/deepseek-ai/EPLB, and section 3.4 of the DeepSeek-V3
    technical report, arXiv:2412.19437). One rule is added: of experts whose replicas carry equally much, the one with
    fewest replicas comes first, so that a layer without load does not give all its replicas to expert 0.
    """
    loads = _checked_load(load)
    num_layers, num_logical_experts = loads.shape
    _check_sizes(num_logical_experts, num_physical_experts, num_ranks, num_groups, num_nodes)
    if num_groups % num_nodes or num_ranks % num_nodes:
        num_groups = num_nodes = 1

    # Groups onto nodes. A running sum adds in one order on every machine; a vectorised one rounds by its width.
    by_group = loads.reshape(num_layers, num_groups, num_logical_experts // num_groups)
    group_order = _pack(np.cumsum(by_group, axis=2)[:, :, -1], num_nodes)
    members = np.arange(num_logical_experts).reshape(num_groups, -1)
    experts = members[group_order].reshape(num_layers * num_nodes, num_logical_experts // num_nodes)

    # Replicas within nodes.
    layer_of_row = np.repeat(np.arange(num_layers), num_nodes)[:, None]
    node_load = loads[layer_of_row, experts]
    replicas, num_replicas = _replicate(node_load, num_physical_experts // num_nodes)

    # Physical experts onto the ranks of their node.
    replica_load = np.take_along_axis(node_load / num_replicas, replicas, axis=1)
    slots = np.take_along_axis(replicas, _pack(replica_load, num_ranks // num_nodes), axis=1)
    return np.take_along_axis(experts, slots, axis=1).reshape(num_layers, num_physical_experts)


def balancedness(load: npt.ArrayLike, physical_to_logical_map: npt.ArrayLike, num_ranks: int) -> FloatArray:
    """Say how evenly a placement spreads a load over the ranks.

    Parameters
    ----------
    load : array_like, real [num_layers, num_logical_experts]
        As in `rebalance_experts`. An expert's load is split evenly over its replicas; that of an expert which the map
        holds nowhere counts for no rank.
    physical_to_logical_map : array_like, integer [num_layers, num_physical_experts]
        -1 is an empty slot.
    num_ranks : int
        Ranks that share the slots evenly, in order.

    Returns
    -------
    FloatArray
        float64 [num_layers], mean over maximum of the ranks' loads: 1 is perfect, ``1 / num_ranks`` is all on one rank.
        A layer without load is perfect.

    Raises
    ------
    PlanError
        EPLB-P001 or EPLB-P006: map or load do not fit.
    """
    loads = _checked_load(load)
    placement = _checked_map("physical_to_logical_map", physical_to_logical_map, num_ranks)
    if len(placement) != len(loads):
        raise PlanError("EPLB-P001", problem=f"it has {len(placement)} layers, the load {len(loads)}")
    num_layers, num_logical_experts = loads.shape
    if placement.max(initial=-1) >= num_logical_experts:
        raise PlanError(
            "EPLB-P001", problem=f"it names expert {placement.max()}, the load has {num_logical_experts} experts"
        )
    num_replicas = _count(placement, num_logical_experts)
    layers = np.arange(num_layers)[:, None]
    carried = np.where(placement >= 0, loads[layers, placement] / np.maximum(num_replicas[layers, placement], 1), 0.0)
    of_ranks = carried.reshape(num_layers, num_ranks, placement.shape[1] // num_ranks).sum(axis=2)
    heaviest = of_ranks.max(axis=1)
    even = np.ones(num_layers)
    np.divide(of_ranks.mean(axis=1), heaviest, out=even, where=heaviest > 0)
    return even


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
    old = _checked_map("old_map", old_map, num_ranks)
    new = _checked_map("new_map", new_map, num_ranks)
    if old.shape != new.shape:
        raise PlanError("EPLB-P001", problem=f"old_map is {list(old.shape)}, new_map {list(new.shape)}")
    if num_nodes < 1 or num_ranks % num_nodes:
        raise PlanError("EPLB-P006", problem=f"{num_ranks} ranks do not spread evenly over {num_nodes} nodes")
    num_layers, num_slots = new.shape
    num_local = num_slots // num_ranks
    num_logical_experts = int(max(old.max(initial=-1), new.max(initial=-1))) + 1
    assign = _assign_exactly if find_spec("scipy") else _assign_greedily
    aligned = np.empty((num_layers, num_nodes, num_ranks // num_nodes, num_local), np.int64)
    for layer, (old_nodes, new_nodes) in enumerate(
        zip(old.reshape(aligned.shape), new.reshape(aligned.shape), strict=True)
    ):
        # A node is a block of ranks, and each rank of a node a block of one rank.
        traded = new_nodes[_trade_places(old_nodes, new_nodes, num_logical_experts, assign)]
        for node, (old_ranks, new_ranks) in enumerate(zip(old_nodes, traded, strict=True)):
            order = _trade_places(old_ranks[:, None], new_ranks[:, None], num_logical_experts, assign)
            aligned[layer, node] = _keep_rows(old_ranks, new_ranks[order])
    return aligned.reshape(new.shape)


def _pack(weights: FloatArray, num_bins: int) -> IntArray:
    """Return, for each row of `weights` [n, items], the items in the order of the bins they are packed into."""
    num_rows, num_items = weights.shape
    capacity = num_items // num_bins
    if capacity == 1:  # nothing to choose, so nothing has to move
        return np.broadcast_to(np.arange(num_items), weights.shape)
    rows = np.arange(num_rows)
    heaviest_first = np.argsort(-weights, axis=1, kind="stable")
    sorted_weights = np.take_along_axis(weights, heaviest_first, axis=1)
    packed = np.empty((num_rows, num_bins, capacity), np.int64)
    bin_weights = np.zeros((num_rows, num_bins))
    fill = np.zeros((num_rows, num_bins), np.int64)
    for i in range(num_items):  # all rows at once
        lightest = bin_weights.argmin(axis=1)
        place = fill[rows, lightest]
        packed[rows, lightest, place] = heaviest_first[:, i]
        fill[rows, lightest] = place + 1
        bin_weights[rows, lightest] += np.where(place + 1 == capacity, np.inf, sorted_weights[:, i])
    return packed.reshape(num_rows, num_items)


def _replicate(load: FloatArray, num_slots: int) -> tuple[IntArray, IntArray]:
    """Return which expert each slot [n, num_slots] is a replica of, and how many each expert [n, experts] has."""
    num_rows, num_experts = load.shape
    rows = np.arange(num_rows)
    replicas = np.empty((num_rows, num_slots), np.int64)
    replicas[:, :num_experts] = np.arange(num_experts)
    num_replicas = np.ones((num_rows, num_experts), np.int64)
    carried = load.copy()
    for slot in range(num_experts, num_slots):
        busiest = carried == carried.max(axis=1, keepdims=True)
        chosen = np.where(busiest, num_replicas, num_slots + 1).argmin(axis=1)
        replicas[:, slot] = chosen
        num_replicas[rows, chosen] += 1
        carried[rows, chosen] = load[rows, chosen] / num_replicas[rows, chosen]
    return replicas, num_replicas


def _trade_places(
    old: IntArray, new: IntArray, num_logical_experts: int, assign: Callable[[FloatArray], IntArray]
) -> IntArray:
    """Return the order of the blocks of `new` [blocks, ranks, slots] in which fewest rows come from other blocks."""
    num_blocks = len(new)
    if num_blocks == 1:
        return np.zeros(1, np.int64)
    # A rank receives an expert once, however many of its slots hold it, so a block needs as many as its ranks do.
    held = _count(old.reshape(num_blocks, -1), num_logical_experts) > 0
    needed = _count(new.reshape(-1, new.shape[2]), num_logical_experts) > 0
    needed_by_block = needed.reshape(*new.shape[:2], num_logical_experts).sum(axis=1, dtype=np.float64)
    saved = held.astype(np.float64) @ needed_by_block.T
    # Among equals a block stays where it is: all such preferences together weigh less than one row.
    return assign(saved * (num_blocks + 1) + np.eye(num_blocks))


def _assign_exactly(score: FloatArray) -> IntArray:
    """Return for each row of `score` [n, n] a column of its own, so that the sum is largest."""
    from scipy.optimize import linear_sum_assignment

    columns: IntArray = linear_sum_assignment(score, maximize=True)[1]
    return columns


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


def _count(slots: IntArray, num_logical_experts: int) -> IntArray:
    """Return how many slots of each row hold each expert, [rows, num_logical_experts]."""
    rows = np.broadcast_to(np.arange(len(slots))[:, None], slots.shape)
    filled = slots >= 0
    flat = rows[filled] * num_logical_experts + slots[filled]
    return np.bincount(flat, minlength=len(slots) * num_logical_experts).reshape(len(slots), num_logical_experts)


def _checked_load(load: npt.ArrayLike) -> FloatArray:
    loads: npt.NDArray[Any] = np.asarray(load)
    if loads.ndim != 2 or loads.dtype.kind not in "biuf" or loads.shape[1] == 0:
        raise PlanError(
            "EPLB-P006",
            problem=f"load must be real [num_layers, num_logical_experts], not {loads.dtype} {list(loads.shape)}",
        )
    loads = loads.astype(np.float64)
    with np.errstate(over="ignore"):  # refused just below
        total = loads.sum(axis=1)
    if not np.isfinite(total).all() or (loads < 0).any():
        raise PlanError("EPLB-P006", problem="load holds values that are negative, not finite or too large to add up")
    return loads


def _checked_map(name: str, value: npt.ArrayLike, num_ranks: int) -> IntArray:
    placement: npt.NDArray[Any] = np.asarray(value)
    if placement.ndim != 2 or placement.dtype.kind not in "iu":
        raise PlanError(
            "EPLB-P001",
            problem=f"{name} must be integer [num_layers, num_physical_experts], "
            f"not {placement.dtype} {list(placement.shape)}",
        )
    if num_ranks < 1 or placement.shape[1] == 0 or placement.shape[1] % num_ranks:
        raise PlanError(
            "EPLB-P001", problem=f"the {placement.shape[1]} slots of {name} do not spread over {num_ranks} ranks"
        )
    placement = placement.astype(np.int64)
    if placement.min(initial=-1) < -1:
        raise PlanError("EPLB-P001", problem=f"{name} holds {placement.min()}; -1 is the only negative value")
    return placement


def _check_sizes(
    num_logical_experts: int, num_physical_experts: int, num_ranks: int, num_groups: int, num_nodes: int
) -> None:
    if min(num_ranks, num_groups, num_nodes) < 1:
        problem = f"num_ranks={num_ranks}, num_groups={num_groups} and num_nodes={num_nodes} must be positive"
    elif num_physical_experts < num_logical_experts:
        problem = f"{num_physical_experts} physical experts cannot hold {num_logical_experts} logical ones"
    elif num_physical_experts % num_ranks:
        problem = f"{num_physical_experts} physical experts do not spread evenly over {num_ranks} ranks"
    elif num_logical_experts % num_groups:
        problem = f"{num_logical_experts} logical experts do not form {num_groups} groups of equal size"
    else:
        return
    raise PlanError("EPLB-P006", problem=problem)
