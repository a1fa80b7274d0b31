"""Maps from the host: checked, converted to one form, and digested."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.errors import PlanError


def check_maps(
    old: object,
    new: object,
    *,
    num_layers: int,
    world_size: int,
    num_local_physical_experts: int,
    num_experts: Sequence[int] | None = None,
) -> tuple[IntArray, IntArray]:
    """Check a pair of maps and convert them to one form.

    Parameters
    ----------
    old, new : array_like
        ``physical_to_logical_map`` before and after: integers ``[num_layers, world_size * num_local_physical_experts]``
        (numpy, CPU torch, nested lists), the logical expert of each slot, -1 for an empty one. Rank r owns the columns
        from ``r * num_local_physical_experts``.
    num_layers, world_size, num_local_physical_experts : int
        Sizes of what was registered. Without layers a map may have any number of columns.
    num_experts : sequence of int or None
        ``[num_layers]``, local physical experts of each layer, where they differ; the columns of a rank beyond them
        must be -1. None: every layer has `num_local_physical_experts`.

    Returns
    -------
    old, new : IntArray
        C-contiguous copies.

    Raises
    ------
    PlanError
        EPLB-P001; it names the map and what is wrong.
    """
    shape = (num_layers, world_size * num_local_physical_experts)
    whose = f"{num_layers} layers, {world_size} ranks x {num_local_physical_experts} local physical experts"
    counts = np.full(num_layers, num_local_physical_experts) if num_experts is None else np.asarray(num_experts)
    maps = _checked("old map", old, shape, whose), _checked("new map", new, shape, whose)
    for name, array in zip(("old map", "new map"), maps, strict=True):
        _check_counts(name, array, counts, num_local_physical_experts)
    return maps


def _checked(name: str, given: object, shape: tuple[int, int], whose: str) -> IntArray:
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors of a device
        raise PlanError("EPLB-P001", problem=f"the {name} cannot be read as an array: {error}") from error
    if not shape[0] and len(array.shape) and not len(array):
        return np.zeros((0, shape[1]), np.int64)
    if array.shape != shape:
        raise PlanError("EPLB-P001", problem=f"the {name} has shape {array.shape}, expected {shape} ({whose})")
    if array.dtype.kind not in "iu":
        raise PlanError("EPLB-P001", problem=f"the {name} holds {array.dtype}, expected integers")
    wrong = (array < -1) | (array > np.iinfo(np.int64).max)
    if wrong.any():
        layer, slot = np.argwhere(wrong)[0]
        raise PlanError(
            "EPLB-P001",
            problem=f"the {name} holds {array[layer, slot]} at layer {layer}, slot {slot}",
            detail="Logical experts are 0 or more, -1 is an empty slot.",
        )
    return np.array(array, np.int64, order="C")


def _check_counts(name: str, array: IntArray, num_experts: IntArray, num_local: int) -> None:
    """Refuse an expert in a column that stands for no row of its layer."""
    if (num_experts == num_local).all():
        return
    wrong = (array >= 0) & (np.arange(array.shape[1]) % num_local >= num_experts[:, None])
    if wrong.any():
        layer, slot = np.argwhere(wrong)[0].tolist()
        raise PlanError(
            "EPLB-P001",
            problem=f"the {name} puts expert {array[layer, slot]} at layer {layer}, slot {slot}, which is row "
            f"{slot % num_local} of rank {slot // num_local}, and the layer has {num_experts[layer]} rows on a rank",
            detail=f"Every rank has {num_local} columns in every layer; those beyond a layer's rows are -1.",
        )


def which_layers(asked: Any, num_layers: int) -> tuple[int, ...] | None:
    """Return the layers that a rearrangement is about, ascending; None is all.

    Raises
    ------
    PlanError
        EPLB-P001, there are no such layers, or one is named twice.
    """
    if asked is None:
        return None
    try:
        given = [index(asked)] if _is_number(asked) else [index(layer) for layer in asked]
    except TypeError as error:
        raise PlanError("EPLB-P001", problem=f"layers={asked!r} are no layer numbers: {error}") from error
    if not given or given != sorted(set(given)) or given[0] < 0 or given[-1] >= num_layers:
        problem = f"layers={given} must be ascending, each once, of {num_layers} layers"
        raise PlanError("EPLB-P001", problem=problem)
    return tuple(given)


def rows_of(given: object, asked: Any, num_layers: int) -> object:
    """Return the rows of a map that a rearrangement is about: it may have all rows, or just those.

    Parameters
    ----------
    given : array_like
        ``[num_physical_experts]`` of one layer; ``[number of layers asked, num_physical_experts]``; or of all layers.
    asked : sequence of int, or int, or None
        Layers; one that is a number goes with one row.
    num_layers : int
        Layers in all.
    """
    if asked is None:
        return given
    array = np.asarray(given)
    if _is_number(asked):
        return array[None] if array.ndim == 1 else array
    layers = list(asked)
    return array[layers] if array.ndim == 2 and len(array) == num_layers != len(layers) else array


def _is_number(asked: Any) -> bool:
    return hasattr(asked, "__index__") and not hasattr(asked, "__len__")


def map_digest(array: npt.ArrayLike) -> bytes:
    """Digest the shape of a map and its values as int64: 16 bytes, whatever its dtype and strides; else EPLB-P001."""
    values = np.asarray(array)
    if values.dtype.kind not in "iu":
        raise PlanError("EPLB-P001", problem=f"it holds {values.dtype}, not integers")
    if values.dtype == np.uint64 and values.size and int(values.max()) >= 1 << 63:
        raise PlanError("EPLB-P001", problem=f"{values.max()} does not fit int64")
    digest = hashlib.blake2b(repr(values.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(values, dtype="<i8").data)
    return digest.digest()
