"""Before the first step, the ranks compare what their hosts gave them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eplb_core.errors import ConfigError, EplbError, PlanError
from eplb_core.plan.maps import map_digest

if TYPE_CHECKING:
    from eplb_core.arrays import IntArray
    from eplb_core.config import EPLBConfig

_FIELDS = (
    "step_interval",
    "window_size",
    "num_redundant_experts",
    "use_async",
    "policy",
    "on_failure",
    "fallback",
    "max_bandwidth_gbps",
)
"""Of the configuration: with different ones, the ranks would not do the same at the same step."""


def given_here(config: EPLBConfig, placement: IntArray, **arguments: int) -> dict[str, Any]:
    """Return what must be the same on all ranks, for a ballot.

    Parameters
    ----------
    config : EPLBConfig
        Configuration of this rank's load balancer.
    placement : IntArray, [num_moe_layers, num_physical_experts]
        The map that it was given.
    **arguments : int
        Others of its arguments, by name.

    Returns
    -------
    dict
        Goes into JSON.
    """
    fields = {name: getattr(config, name) for name in _FIELDS}
    return fields | arguments | {"physical_to_logical_map": map_digest(placement).hex()}


def difference(given: Mapping[int, Mapping[str, Any]]) -> EplbError | None:
    """Say what first differs between the lowest rank and another, by what each was given; None when nothing does."""
    lowest = min(given)
    for name, value in given[lowest].items():
        for rank in sorted(given):
            other = given[rank].get(name)
            if other == value:
                continue
            if name == "physical_to_logical_map":
                detail = f"Rank {rank} and rank {lowest} differ (the load balancer, phase connect)."
                return PlanError("EPLB-P003", what="maps", detail=detail)
            problem = f"{name} is {value!r} on rank {lowest}, and {other!r} on rank {rank}"
            return ConfigError("EPLB-C015", problem=problem)
    return None
