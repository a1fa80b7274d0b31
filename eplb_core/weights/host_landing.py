"""A host's own landing memory: checked against the weights it is for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch

from eplb_core.errors import ConfigError
from eplb_core.weights.layout import Layout, _key, _listed
from eplb_core.weights.tensor import overlapping, spans_of, view_rows

Landing: TypeAlias = Sequence[Sequence[torch.Tensor]] | tuple[Literal["if possible"], Sequence[Sequence[torch.Tensor]]]
"""What a host gives as ``landing=``."""

IF_POSSIBLE = "if possible"

logger = logging.getLogger("eplb_core")


def take_landing(
    given: Any, layout: Layout, *, name: str, backend: str, landing_layout: str, staging_layers: int
) -> list[list[torch.Tensor]] | None:
    """Return a host's own landing rows, checked; None where the core's own memory is used.

    Parameters
    ----------
    given : sequence of sequence of torch.Tensor, or ("if possible", such a sequence), or None
        At most `staging_layers` slots; see `check_landing`. With "if possible", rows that the backend or the layers
        cannot use are left unused, and why is logged.
    layout : Layout
        The registered tensors.
    name, backend : str
        Names of the communicator and of its backend.
    landing_layout : str
        Declared by the backend.
    staging_layers : int
        Slots that the communicator needs.

    Raises
    ------
    ConfigError
        The rows do not fit, or the backend packs its landing memory (EPLB-C010).
    """
    if given is None:
        return None
    optional = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str) and given[0] == IF_POSSIBLE
    if isinstance(given, str):
        raise _unfit("landing", f"it is {given!r} without rows: give ({IF_POSSIBLE!r}, rows)")
    try:
        if landing_layout != "rows":
            raise ConfigError("EPLB-C010", problem=f"landing= was given, and {backend} packs its landing memory")
        rows = check_landing(given[1] if optional else given, layout, most_slots=staging_layers)
    except ConfigError as error:
        if not optional:
            raise
        logger.info("%s: the host's landing memory is not used: %s", name, error.fields["problem"])
        return None
    logger.info("%s: %d of %d landing slots are the host's own", name, len(rows), staging_layers)
    return rows


def check_landing(
    landing: Sequence[Sequence[torch.Tensor]], layout: Layout, *, most_slots: int | None = None
) -> list[list[torch.Tensor]]:
    """Check a host's own landing memory and view it as uint8 rows, ``[num_slots][num_tensors]``; else EPLB-C010.

    Notes
    -----
    Tensors are dense like weights, all on the weights' device or all on the CPU. Each has as many rows, of as many
    bytes, as the weight of that index in **every** layer; dtype and shape are free. ``most_slots`` None takes any
    number of slots.
    """
    slots = _listed(landing, "landing", _unfit)
    if most_slots is not None and not 1 <= len(slots) <= most_slots:
        raise _unfit("landing", f"it has {len(slots)} slots where staging_layers is {most_slots}")
    views: list[list[torch.Tensor]] = []
    for slot, values in enumerate(slots):
        tensors = _listed(values, f"landing slot {slot}", _unfit)
        for layer, layer_rows in enumerate(layout.rows):
            if len(tensors) != len(layer_rows):
                other = f"it holds {len(tensors)} tensors where layer {layer} has {len(layer_rows)}"
                raise _unfit(f"landing slot {slot}", other)
        views.append([])
        for index, tensor in enumerate(tensors):
            _, view = view_rows(tensor, _slot(slot, index), _unfit)
            first = views[0][0] if views[0] else view
            if view.device not in {layout.device, torch.device("cpu")}:
                raise _unfit(_slot(slot, index), f"it is on {view.device}, the weights are on {layout.device}")
            if view.device != first.device:
                raise _unfit(_slot(slot, index), f"it is on {view.device}, {_slot(0, 0)} on {first.device}")
            for layer, layer_rows in enumerate(layout.rows):
                if view.shape != layer_rows[index].shape:
                    weight = layer_rows[index].shape
                    other = _key(layer, layout.shared.names[layer][index])
                    problem = (
                        f"it has {view.shape[0]} rows of {view.shape[1]} bytes, {other} {weight[0]} of {weight[1]}"
                    )
                    raise _unfit(_slot(slot, index), problem)
            views[-1].append(view)
    _refuse_shared_landing(views, layout)
    return views


def _slot(slot: int, index: int) -> str:
    return f"landing slot {slot} tensor {index}"


def _unfit(key: str, problem: str) -> ConfigError:
    return ConfigError("EPLB-C010", problem=f"{key} does not fit: {problem}")


def _refuse_shared_landing(views: list[list[torch.Tensor]], layout: Layout) -> None:
    """Landing memory of tensors that move must be disjoint, and no live weight."""
    lands = {int(index) for geometry in layout.geometries for index in geometry.moving}
    spans = []
    if views[0][0].device == layout.device:  # addresses of two devices may be equal and mean nothing
        spans += [
            span
            for layer, geometry in enumerate(layout.geometries)
            for index in geometry.moving.tolist()
            for span in spans_of(layout.rows[layer][index], layer, index)
        ]
    spans += [
        span
        for slot, slot_views in enumerate(views)
        for index in sorted(lands)
        for span in spans_of(slot_views[index], layout.num_layers + slot, index)
    ]
    for span, other in overlapping(spans):
        slot = other.layer - layout.num_layers
        shares = (
            _slot(slot, other.number)
            if slot >= 0
            else _key(other.layer, layout.shared.names[other.layer][other.number])
        )
        raise _unfit(_slot(span.layer - layout.num_layers, span.number), f"it shares memory with {shares}")
