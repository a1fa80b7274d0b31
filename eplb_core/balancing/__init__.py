"""Deciding where experts should live; moving them there is the core's work and needs nothing of this package."""

from __future__ import annotations

from eplb_core.balancing.placement import align as align
from eplb_core.balancing.placement import balancedness as balancedness
from eplb_core.balancing.placement import rebalance_experts as rebalance_experts

__all__ = ["align", "balancedness", "rebalance_experts"]
