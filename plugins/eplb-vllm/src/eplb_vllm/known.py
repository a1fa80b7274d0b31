"""What this plugin knows of vLLM's EPLB code: names, parameters and fields of 0.33, compared with what is loaded."""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from typing import Any

VERSIONS = ">=0.33,<0.34"

_EPLB = "vllm.distributed.eplb"
COMMUNICATOR = f"{_EPLB}.eplb_communicator"
EXECUTE = f"{_EPLB}.rebalance_execute"
WORKER = f"{_EPLB}.async_worker"
STATE = f"{_EPLB}.eplb_state"

PATCHED = {
    "create_eplb_communicator": (
        "(group_coordinator, backend, expert_weights, expert_buffer)",
        (COMMUNICATOR, STATE),
    ),
    "rearrange_expert_weights_inplace": (
        (
            "(old_global_expert_indices, new_global_expert_indices, expert_weights, expert_buffer, ep_group,"
            " communicator, is_profile=False, rank_mapping=None)"
        ),
        (EXECUTE, STATE),
    ),
    "transfer_layer": (
        (
            "(old_layer_indices, new_layer_indices, expert_weights, expert_weights_buffer, ep_group, communicator,"
            " is_profile=False, stream=None, rank_mapping=None, layer_idx=0, enable_migration_batching=False,"
            " migration_batches=None)"
        ),
        (EXECUTE, WORKER),
    ),
    "move_from_buffer": (
        "(expert_weights, expert_weights_buffers, transfer_metadata, new_indices, ep_rank)",
        (EXECUTE, STATE),
    ),
    "run_rebalance_experts": (
        "(model_state, eplb_state, physical_to_logical_map_cpu, stream)",
        (WORKER,),
    ),
    "_move_to_workspace": (
        "(model_state, ep_rank)",
        (STATE,),
    ),
}
"""Functions that are replaced: parameters, and the modules that hold them under this name; its home is the first."""

METHODS = {
    "drain_async": "(self)",
    "update_communicator": "(self, model_config, communicator)",
}
"""Methods of ``EplbState`` that are replaced."""

_CALLED = {
    (EXECUTE, "_map_old_expert_indices_with_rank_mapping"): "(old_global_expert_indices, rank_mapping, new_ep_size)",
    (EXECUTE, "_map_new_expert_indices_with_rank_mapping"): "(new_global_expert_indices, rank_mapping)",
    (f"{_EPLB}.eplb_utils", "device_stream"): "(stream)",
    ("vllm.utils.gpu_sync_debug", "gpu_sync_allowed"): "(first_only=False)",
    ("vllm.utils.network_utils", "get_ip"): "()",
    ("vllm.config", "get_current_vllm_config_or_none"): "()",
}
"""Functions of vLLM that are called."""

_FIELDS = {
    (STATE, "EplbModelState"): {"communicator", "model", "pending_result", "rebalanced"},
    (EXECUTE, "AsyncEplbLayerResult"): {"consumed_event", "layer_idx", "transfer_metadata"},
}
"""Fields that are read or set."""

_ABSTRACT = {"add_recv", "add_send", "execute"}
"""Methods that a communicator of vLLM must have."""


def parameters(function: Any) -> str:
    """Write a function's parameters with their defaults, without annotations, as the tables of this module do."""
    listed = inspect.signature(function).parameters.values()
    written = (p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in listed)
    return f"({', '.join(written)})"


def first_difference() -> str | None:
    """Compare the vLLM that is loaded with what is known; say what differs first, or None.

    Notes
    -----
    Where a module holds another object than its home does, somebody else has patched it.
    """
    for name, (expected, modules) in PATCHED.items():
        home = _found(modules[0], name)
        for module in modules:
            if _found(module, name) is None:
                return f"{module}.{name} is missing"
            if _found(module, name) is not home:
                return f"{module}.{name} is not {modules[0]}.{name}: something else has replaced it"
        if parameters(home) != expected:
            return f"{modules[0]}.{name} takes {parameters(home)}, not {expected}"
    state = _found(STATE, "EplbState")
    for name, expected in METHODS.items():
        method = getattr(state, name, None)
        if method is None:
            return f"EplbState.{name} is missing"
        if parameters(method) != expected:
            return f"EplbState.{name} takes {parameters(method)}, not {expected}"
    return _difference_in_use()


def _difference_in_use() -> str | None:
    for (module, name), expected in _CALLED.items():
        function = _found(module, name)
        if function is None:
            return f"{module}.{name} is missing"
        if parameters(function) != expected:
            return f"{module}.{name} takes {parameters(function)}, not {expected}"
    for (module, name), fields in _FIELDS.items():
        cls = _found(module, name)
        has = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
        if not fields <= has:
            return f"{module}.{name} has no field {min(fields - has)}"
    abstract = set(getattr(_found(COMMUNICATOR, "EplbCommunicator"), "__abstractmethods__", ()))
    if abstract != _ABSTRACT:
        return f"EplbCommunicator asks for {sorted(abstract)}, not {sorted(_ABSTRACT)}"
    return None


def _found(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None
