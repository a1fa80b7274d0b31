"""Tensors of a communicator that sleeps: remembered without keeping their memory, and registered again later."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eplb_core.errors import ConfigError
from eplb_core.weights.layout import Layout, build_layout

if TYPE_CHECKING:
    import torch

Asleep = list[list[Any]]
"""A weak reference, or a list of them, for each tensor."""


def put_to_sleep(layout: Layout) -> Asleep:
    """Let the memory of registered tensors go, and return how to find them again while the host has them."""
    asleep = [[_reference(tensor) for tensor in layer] for layer in layout.weights]
    layout.let_go()
    return asleep


def awakened(
    before: Layout, asleep: Asleep, weights: Sequence[Sequence[torch.Tensor | Sequence[torch.Tensor]]] | None
) -> Layout:
    """Return the layout of the tensors that wake: those that were put to sleep, or others of the same shape.

    Raises
    ------
    ConfigError
        They are gone, or another number of layers or experts, or elsewhere (EPLB-C010).
    MetadataError
        One cannot be registered (EPLB-M001).
    """
    if weights is None:
        weights = [[tensor for one in layer if (tensor := _referent(one)) is not None] for layer in asleep]
        if [len(layer) for layer in weights] != [len(layer) for layer in asleep]:
            raise ConfigError("EPLB-C010", problem="the registered tensors are gone: resume(weights=...)")
    expected = before.num_layers, before.num_local_physical_experts, str(before.device)
    layout = None
    if len(weights) == before.num_layers:
        layout = build_layout(weights, [list(layer) for layer in before.shared.names] or None)
        if (layout.num_layers, layout.num_local_physical_experts, str(layout.device)) == expected:
            return layout
    found = f"{len(weights)} layers"
    if layout is not None:
        found += f" of {layout.num_local_physical_experts} experts on {layout.device}"
    wanted = f"{expected[0]} layers of {expected[1]} experts on {expected[2]}"
    raise ConfigError("EPLB-C010", problem=f"resume() was given {found}, where {wanted} went to sleep")


def _reference(tensor: Any) -> Any:
    if isinstance(tensor, (list, tuple)):
        return [weakref.ref(one) for one in tensor]
    return weakref.ref(tensor)


def _referent(reference: Any) -> Any:
    if not isinstance(reference, list):
        return reference()
    tensors = [one() for one in reference]
    return None if any(tensor is None for tensor in tensors) else tensors
