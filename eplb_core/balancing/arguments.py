"""What is given to the functions of placement: checked, and brought into one form."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.errors import PlanError

FloatArray = npt.NDArray[np.float64]


def checked_load(load: npt.ArrayLike) -> FloatArray:
    """Return a load as float64 [num_layers, num_logical_experts]; anything else is refused (EPLB-P006)."""
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


def checked_map(name: str, value: npt.ArrayLike, num_ranks: int) -> IntArray:
    """Return a map as int64 [num_layers, num_physical_experts]; anything else is refused (EPLB-P001)."""
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


def count_replicas(slots: IntArray, num_logical_experts: int) -> IntArray:
    """Return how many slots of each row hold each expert, [rows, num_logical_experts]."""
    rows = np.broadcast_to(np.arange(len(slots))[:, None], slots.shape)
    filled = slots >= 0
    flat = rows[filled] * num_logical_experts + slots[filled]
    return np.bincount(flat, minlength=len(slots) * num_logical_experts).reshape(len(slots), num_logical_experts)
