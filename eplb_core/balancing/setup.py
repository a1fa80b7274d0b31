"""What a load balancer is built from, checked before it begins."""

from __future__ import annotations

import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.balancing.core_access import CoreAccess
from eplb_core.balancing.policy import check_slots
from eplb_core.communicator import Communicator
from eplb_core.config import EPLBConfig
from eplb_core.errors import ConfigError
from eplb_core.plan import check_maps


def check_arguments(config: object, communicator: object, on_commit: object, num_expert_groups: object) -> None:
    """Refuse arguments of other types, and a communicator that was not built for a worker (EPLB-C015)."""
    problem = ""
    if not isinstance(config, EPLBConfig):
        problem = f"config= should be EPLBConfig, got {type(config).__name__}"
    elif not isinstance(communicator, Communicator):
        problem = f"communicator= should be Communicator, got {type(communicator).__name__}"
    elif on_commit is not None and not callable(on_commit):
        problem = f"on_commit= should be callable, got {type(on_commit).__name__}"
    elif isinstance(num_expert_groups, bool) or not isinstance(num_expert_groups, int) or num_expert_groups < 1:
        problem = f"num_expert_groups= should be a number of groups, got {num_expert_groups!r}"
    elif config.use_async and not communicator.config.use_async:
        problem = "use_async=True, and the communicator was built with use_async=False"
    if problem:
        raise ConfigError("EPLB-C015", problem=problem)


def checked_placement(core: CoreAccess, given: npt.ArrayLike) -> IntArray:
    """Return a map of the shape of the registered weights; any other is refused (EPLB-P001)."""
    checked, _ = check_maps(
        given,
        given,
        num_layers=core.num_layers,
        world_size=core.world_size,
        num_local_physical_experts=core.num_local_physical_experts,
    )
    return checked


def config_for(config: EPLBConfig, num_logical_experts: int, placement: IntArray) -> EPLBConfig:
    """Return a configuration with the redundant experts of a group of another size."""
    return config.model_copy(update={"num_redundant_experts": max(0, placement.shape[1] - num_logical_experts)})


def checked_experts(config: EPLBConfig, num_logical_experts: int, placement: IntArray) -> int:
    """Return the number of logical experts; one that does not fit the slots or the map is refused (EPLB-C015)."""
    checked = check_slots(config, num_logical_experts, placement.shape[1])
    if placement.max(initial=-1) >= checked:
        problem = f"the map names expert {placement.max()}, and there are {checked}"
        raise ConfigError("EPLB-C015", problem=problem)
    return checked
