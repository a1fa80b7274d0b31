"""Routing tables: what an engine's router needs to know of a placement, worked out from the map."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.balancing.arguments import checked_map, count_replicas
from eplb_core.errors import PlanError


class RoutingTables(NamedTuple):
    """A placement from the router's side.

    Parameters
    ----------
    logical_to_physical_map : IntArray
        int64 [num_layers, num_logical_experts, max_replicas]: the slots that hold an expert, ascending, then -1.
    logical_replica_count : IntArray
        int64 [num_layers, num_logical_experts]: how many they are.
    """

    logical_to_physical_map: IntArray
    logical_replica_count: IntArray


def routing_tables(
    physical_to_logical_map: npt.ArrayLike, num_logical_experts: int | None = None, max_replicas: int | None = None
) -> RoutingTables:
    """Turn a map round: which slots hold each logical expert, and how many they are.

    Parameters
    ----------
    physical_to_logical_map : array_like, integer [num_layers, num_physical_experts]
        -1 is an empty slot, and stands in no table.
    num_logical_experts : int or None
        Rows of a table; None is the largest expert of the map and one.
    max_replicas : int or None
        Columns of a table, for engines whose tables keep their shape (``num_redundant_experts + 1`` is the most there
        can be when every expert is held); None is the most that an expert of this map has.

    Returns
    -------
    RoutingTables

    Raises
    ------
    PlanError
        EPLB-P001: no map, an expert beyond `num_logical_experts`, or one with more than `max_replicas` replicas.

    Examples
    --------
    >>> tables = routing_tables([[0, 1, 2, 0]])
    >>> tables.logical_to_physical_map.tolist()
    [[[0, 3], [1, -1], [2, -1]]]
    >>> tables.logical_replica_count.tolist()
    [[2, 1, 1]]
    """
    placement = checked_map("physical_to_logical_map", physical_to_logical_map, 1)
    largest = int(placement.max(initial=-1))
    experts = largest + 1 if num_logical_experts is None else num_logical_experts
    if largest >= experts:
        raise PlanError("EPLB-P001", problem=f"it names expert {largest}, there are {experts}")
    counts = count_replicas(placement, experts)
    most = int(counts.max(initial=0))
    width = most if max_replicas is None else max_replicas
    if most > width:
        layer, expert = np.argwhere(counts == most)[0]
        problem = f"expert {expert} of layer {layer} has {most} replicas, at most {width} fit"
        raise PlanError("EPLB-P001", problem=problem)
    # Slots sorted by expert, in order among equals: the place within its expert's run is the column of a slot.
    slots = np.argsort(placement, axis=1, kind="stable")
    of_slots = np.take_along_axis(placement, slots, axis=1)
    empty = (placement < 0).sum(axis=1, keepdims=True)
    starts = empty + np.cumsum(counts, axis=1) - counts
    layer, column = np.nonzero(of_slots >= 0)
    expert = of_slots[layer, column]
    table = np.full((len(placement), experts, width), -1, np.int64)
    table[layer, expert, column - starts[layer, expert]] = slots[layer, column]
    return RoutingTables(table, counts)
