"""What runs in place of vLLM's functions: each takes vLLM's own first, and calls it for communicators not ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.eplb.eplb_utils import device_stream
from vllm.distributed.eplb.rebalance_execute import (
    _map_new_expert_indices_with_rank_mapping,
    _map_old_expert_indices_with_rank_mapping,
)
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from eplb_core.errors import EplbError
from eplb_vllm.communicator import CoreCommunicator
from eplb_vllm.cycle import RearrangeFailedError
from eplb_vllm.mover import CoreTransfer
from eplb_vllm.settings import read_settings

Original = Callable[..., Any]
Tensors = Sequence[torch.Tensor]

_seen: list[Any] = []
"""The VllmConfig of this process. vLLM builds the communicators of an elastic switch where none is current."""


def create_eplb_communicator(
    original: Original,
    group_coordinator: Any,
    backend: str,
    expert_weights: Sequence[Tensors],
    expert_buffer: Tensors,
) -> Any:
    """Build ours where ``additional_config["eplb_core"]`` is there, vLLM's own where it is not."""
    current = get_current_vllm_config_or_none()
    if current is not None:
        _seen[:] = [current]
    settings = None
    for config in _seen:
        settings = read_settings(config.additional_config, config.parallel_config.eplb_config, backend)
    if settings is None:
        return original(group_coordinator, backend, expert_weights, expert_buffer)
    layers = _seen[0].compilation_config.static_forward_context.values()
    experts = [layer for layer in layers if hasattr(layer, "get_expert_weights")]
    return CoreCommunicator(group_coordinator, settings, expert_weights, expert_buffer, experts)


# --- synchronous -----------------------------------------------------------------------------------------------------


def rearrange_expert_weights_inplace(
    original: Original,
    old_global_expert_indices: torch.Tensor,
    new_global_expert_indices: torch.Tensor,
    expert_weights: Sequence[Tensors],
    expert_buffer: Tensors,
    ep_group: Any,
    communicator: Any,
    is_profile: bool = False,
    rank_mapping: dict[int, int] | None = None,
) -> None:
    """Move all layers now. After a failure the new map becomes the one that holds, which is what vLLM commits then."""
    if not isinstance(communicator, CoreCommunicator):
        original(
            old_global_expert_indices,
            new_global_expert_indices,
            expert_weights,
            expert_buffer,
            ep_group,
            communicator,
            is_profile,
            rank_mapping,
        )
        return
    if is_profile:
        return
    old, new = _mapped(old_global_expert_indices, new_global_expert_indices, rank_mapping, ep_group.size())
    try:
        with gpu_sync_allowed():
            communicator.mover.rearrange(old.cpu().numpy(), new.cpu().numpy(), expert_weights)
    except RearrangeFailedError as failed:
        if rank_mapping is not None or failed.final:  # vLLM goes on to another number of ranks, or nothing is sure
            communicator.publish()
            raise failed.error from None
        communicator.failed(failed.error, "The placement that holds is committed; the next rearrangement starts there.")
        new_global_expert_indices.copy_(torch.from_numpy(failed.physical_to_logical_map))
    else:
        communicator.publish()


def _mapped(
    old: torch.Tensor, new: torch.Tensor, rank_mapping: dict[int, int] | None, ep_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring both maps to the number of ranks of this group, as vLLM does."""
    if rank_mapping is None:
        return old, new
    if len(rank_mapping) == ep_size:
        return old, _map_new_expert_indices_with_rank_mapping(new, rank_mapping)
    return _map_old_expert_indices_with_rank_mapping(old, rank_mapping, ep_size), new


# --- in the background -----------------------------------------------------------------------------------------------


def run_rebalance_experts(
    original: Original,
    model_state: Any,
    eplb_state: Any,
    physical_to_logical_map_cpu: torch.Tensor,
    stream: torch.Stream,
) -> torch.Tensor:
    """Have vLLM's policy make the new map, then agree on the rearrangement."""
    new: torch.Tensor = original(model_state, eplb_state, physical_to_logical_map_cpu, stream)
    communicator = model_state.communicator
    if isinstance(communicator, CoreCommunicator):
        # This stream has waited for vLLM's event; begin() marks it, and no row is read before.
        with device_stream(stream):
            communicator.mover.begin(physical_to_logical_map_cpu.numpy(), new.numpy())
    return new


def transfer_layer(  # noqa: PLR0913 - vLLM's own parameters
    original: Original,
    old_layer_indices: torch.Tensor,
    new_layer_indices: torch.Tensor,
    expert_weights: Tensors,
    expert_weights_buffer: Tensors,
    ep_group: Any,
    communicator: Any,
    is_profile: bool = False,
    stream: torch.Stream | None = None,
    rank_mapping: dict[int, int] | None = None,
    layer_idx: int = 0,
    enable_migration_batching: bool = False,
    migration_batches: Any = None,
) -> Any:
    """Bring one layer's rows into landing memory; a failure is part of what is returned."""
    if not isinstance(communicator, CoreCommunicator):
        return original(
            old_layer_indices,
            new_layer_indices,
            expert_weights,
            expert_weights_buffer,
            ep_group,
            communicator,
            is_profile,
            stream,
            rank_mapping,
            layer_idx,
            enable_migration_batching,
            migration_batches,
        )
    old, new = _mapped(old_layer_indices[None], new_layer_indices[None], rank_mapping, ep_group.size())
    with device_stream(stream):
        return communicator.mover.stage(layer_idx, old[0].cpu().numpy(), new[0].cpu().numpy(), expert_weights)


def move_from_buffer(
    original: Original,
    expert_weights: Tensors,
    expert_weights_buffers: Tensors,
    transfer_metadata: Any,
    new_indices: Any,
    ep_rank: int,
) -> None:
    """Commit the layer that landed."""
    if not isinstance(transfer_metadata, CoreTransfer):
        original(expert_weights, expert_weights_buffers, transfer_metadata, new_indices, ep_rank)
        return
    if transfer_metadata.error is not None:
        raise transfer_metadata.error
    with gpu_sync_allowed():
        transfer_metadata.commit()


def _move_to_workspace(original: Original, model_state: Any, ep_rank: int) -> None:
    """Pass a layer over that failed, on every rank at this step: no map changes. Otherwise do as vLLM does.

    Notes
    -----
    The cycle is not cut short. `rebalanced` says to vLLM's main thread which collectives to join, and to its worker,
    which reads it later, whether to go on; were it False in mid-cycle, the next cycle could set it again before the
    worker looks, and ranks would part. So the worker asks for every layer that is left, and is told at once.
    """
    result, communicator = model_state.pending_result, model_state.communicator
    transfer = None if result is None else result.transfer_metadata
    if not isinstance(transfer, CoreTransfer):
        original(model_state, ep_rank)
        return
    if transfer.error is None:
        original(model_state, ep_rank)
        communicator.publish()
        return
    if result.layer_idx == model_state.model.num_moe_layers - 1:
        model_state.rebalanced = False
    model_state.pending_result = None
    result.consumed_event.record()
    if transfer.is_first:
        communicator.failed(
            transfer.error,
            f"Layers from {transfer.layer} on keep their placement on every rank; the next rearrangement starts there.",
        )


def drain_async(original: Original, self: Any) -> None:
    """Drain as vLLM does, then drop what it has not applied."""
    original(self)
    for model_state in self.model_states.values():
        if isinstance(model_state.communicator, CoreCommunicator):
            try:
                model_state.communicator.mover.cancel()
            except EplbError as error:
                model_state.communicator.failed(error, "What was drained is dropped; the next rearrangement rebuilds.")


def update_communicator(original: Original, self: Any, model_config: Any, communicator: Any) -> None:
    """Take the new communicator, and close the old one, which vLLM only lets go of."""
    before = self.model_states[model_config.compute_hash()].communicator
    original(self, model_config, communicator)
    if isinstance(before, CoreCommunicator) and before is not communicator:
        before.close_later()
