"""Placement: which physical expert holds which logical one, given how loaded the logical experts are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.balancing.arguments import FloatArray, checked_load
from eplb_core.balancing.breath import let_others_run
from eplb_core.errors import PlanError

_ROUNDS_AT_A_TIME = 16
"""Rounds of a greedy choice, over all layers at once, before other threads are let in; each takes some 10 us."""


def rebalance_experts(
    load: npt.ArrayLike,
    num_physical_experts: int,
    *,
    num_ranks: int,
    num_groups: int = 1,
    num_nodes: int = 1,
    active: npt.ArrayLike | None = None,
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
    active : array_like of bool [num_ranks] or None
        Ranks that may hold experts; the slots of dead and draining ones are -1. None: all. Nodes of which unequally
        many ranks are active count as one.

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
    loads = checked_load(load)
    if active is not None:
        sizes = num_physical_experts, num_ranks, num_groups, num_nodes
        return _on_active_ranks(loads, np.asarray(active), *sizes)
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


def _on_active_ranks(
    loads: FloatArray, active: npt.NDArray[Any], num_slots: int, num_ranks: int, num_groups: int, num_nodes: int
) -> IntArray:
    """Place experts on some ranks only; the slots of the others are empty."""
    if active.shape != (num_ranks,) or active.dtype != bool:
        problem = (
            f"active= is {active.dtype} {list(active.shape)}, where a bool for each of {num_ranks} ranks is needed"
        )
        raise PlanError("EPLB-P006", problem=problem)
    if not active.any() or num_slots % num_ranks:
        problem = f"{int(active.sum())} of {num_ranks} ranks are active, with {num_slots} slots in all"
        raise PlanError("EPLB-P006", problem=problem)
    local, count = num_slots // num_ranks, int(active.sum())
    if num_ranks % num_nodes:
        num_nodes = 1
    per_node = np.add.reduceat(active.astype(np.int64), np.arange(0, num_ranks, num_ranks // num_nodes))
    even = per_node[per_node > 0]
    nodes = len(even) if (even == even[0]).all() else 1
    placed = rebalance_experts(loads, count * local, num_ranks=count, num_groups=num_groups, num_nodes=nodes)
    everywhere = np.full((len(loads), num_slots), -1, np.int64)
    everywhere[:, np.repeat(active, local)] = placed
    return everywhere


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
        if i % _ROUNDS_AT_A_TIME == 0:
            let_others_run()
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
        if slot % _ROUNDS_AT_A_TIME == 0:
            let_others_run()
        busiest = carried == carried.max(axis=1, keepdims=True)
        chosen = np.where(busiest, num_replicas, num_slots + 1).argmin(axis=1)
        replicas[:, slot] = chosen
        num_replicas[rows, chosen] += 1
        carried[rows, chosen] = load[rows, chosen] / num_replicas[rows, chosen]
    return replicas, num_replicas


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
