"""A function in the shape of SGLang's expert location updater, over eplb-core.

It takes what SGLang's ``update`` hands to the function that moves the weights. It was tried against a stand-in of that
call's signature, not against SGLang. ``examples/sglang_seam.md`` says where it goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

import eplb_core as eplb

IntArray = npt.NDArray[np.int64]
Weights = Mapping[int, Sequence[torch.Tensor]]
"""Model layer to that layer's expert tensors, first axis the local physical expert."""


class Location(Protocol):
    """What is read of SGLang's ``ExpertLocationMetadata``."""

    @property
    def physical_to_logical_map_cpu(self) -> torch.Tensor:
        """``[num_layers_of_the_model, num_physical_experts]``, dense layers included."""


def communicator_over(
    routed_experts_weights_of_layer: Weights, config: eplb.EPLBConfig, control: eplb.ControlPlane
) -> eplb.Communicator:
    """Build the communicator once, after the weights are loaded, over all layers that have experts."""
    layers = sorted(routed_experts_weights_of_layer)
    return eplb.Communicator(config, [list(routed_experts_weights_of_layer[layer]) for layer in layers], control)


def update_expert_weights(
    comm: eplb.Communicator,
    *,
    routed_experts_weights_of_layer: Weights,
    old_expert_location_metadata: Location,
    new_expert_location_metadata: Location,
    update_layer_ids: Sequence[int],
    nnodes: int,  # noqa: ARG001 - SGLang hands it on
    rank: int,  # noqa: ARG001
) -> dict[int, tuple[int, ...]]:
    """Bring a chunk of layers to their new placement; collective and synchronous.

    Parameters
    ----------
    comm : Communicator
        Of `communicator_over`.
    routed_experts_weights_of_layer : Mapping
        Model layer to its expert tensors, the same keys as when the communicator was built.
    old_expert_location_metadata, new_expert_location_metadata : Location
        Placement that holds, and that is wanted, of all layers of the model.
    update_layer_ids : sequence of int
        Model layers of this chunk; the others stay.
    nnodes, rank : int
        Unused: the core knows which ranks share a host, and which rank this is.

    Returns
    -------
    dict of int to tuple of int
        For each layer, the logical experts that no row of any rank holds. Their rows are left as they are: read them
        from disk, then call ``comm.reloaded(held_rows(...))``.

    Raises
    ------
    EplbError
        The layers of ``comm.report.committed_layers`` have moved on every rank, the others on none.
    """
    chunk = sorted(update_layer_ids)
    if not chunk:
        return {}
    numbers = {layer: number for number, layer in enumerate(sorted(routed_experts_weights_of_layer))}
    old, new = held_rows(old_expert_location_metadata, chunk), held_rows(new_expert_location_metadata, chunk)
    missing: dict[int, tuple[int, ...]] = {}
    for layer, old_row, new_row in zip(chunk, old, new, strict=True):
        nowhere = ~np.isin(new_row, old_row)
        if nowhere.any():
            missing[layer] = tuple(np.unique(new_row[nowhere]).tolist())
            new_row[nowhere] = -1  # an empty slot: nothing moves there
    comm.begin(old, new, layers=[numbers[layer] for layer in chunk]).run()
    return missing


def held_rows(metadata: Location, layers: Sequence[int]) -> IntArray:
    """Return the rows of a placement that belong to layers with experts, ``[len(layers), num_physical_experts]``."""
    rows: IntArray = metadata.physical_to_logical_map_cpu[list(layers)].numpy().astype(np.int64)
    return rows
