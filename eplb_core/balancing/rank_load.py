"""How a load falls on the ranks under a placement."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core.balancing.arguments import FloatArray, checked_load, checked_map, count_replicas
from eplb_core.errors import PlanError


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
    loads = checked_load(load)
    placement = checked_map("physical_to_logical_map", physical_to_logical_map, num_ranks)
    if len(placement) != len(loads):
        raise PlanError("EPLB-P001", problem=f"it has {len(placement)} layers, the load {len(loads)}")
    num_layers, num_logical_experts = loads.shape
    if placement.max(initial=-1) >= num_logical_experts:
        raise PlanError(
            "EPLB-P001", problem=f"it names expert {placement.max()}, the load has {num_logical_experts} experts"
        )
    num_replicas = count_replicas(placement, num_logical_experts)
    layers = np.arange(num_layers)[:, None]
    carried = np.where(placement >= 0, loads[layers, placement] / np.maximum(num_replicas[layers, placement], 1), 0.0)
    of_ranks = carried.reshape(num_layers, num_ranks, placement.shape[1] // num_ranks).sum(axis=2)
    return mean_over_maximum(of_ranks)


def mean_over_maximum(of_ranks: FloatArray) -> FloatArray:
    """Return balancedness from loads of ranks [num_layers, num_ranks]; a layer without load is perfect."""
    heaviest = of_ranks.max(axis=1)
    even = np.ones(len(of_ranks))
    np.divide(of_ranks.mean(axis=1), heaviest, out=even, where=heaviest > 0)
    return even
