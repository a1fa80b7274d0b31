"""Deciding where experts should live; moving them there is the core's work and needs nothing of this package."""

from __future__ import annotations

from eplb_core.balancing.alignment import align as align
from eplb_core.balancing.alignment import rows_received as rows_received
from eplb_core.balancing.placement import rebalance_experts as rebalance_experts
from eplb_core.balancing.rank_load import balancedness as balancedness
from eplb_core.balancing.routing import RoutingTables as RoutingTables
from eplb_core.balancing.routing import routing_tables as routing_tables

__all__ = ["RoutingTables", "align", "balancedness", "rebalance_experts", "routing_tables", "rows_received"]
