"""From two maps to moves: which rows go where, in one canonical order, the same on every rank."""

from __future__ import annotations

from eplb_core.backend.transfer import MoveColumns, TransferPlan
from eplb_core.plan.in_place import CommitPlan
from eplb_core.plan.maps import check_maps
from eplb_core.plan.placement import PlacementPlan, plan_moves
from eplb_core.plan.rules import TransferRules
from eplb_core.plan.translation import translate_map

__all__ = [
    "CommitPlan",
    "MoveColumns",
    "PlacementPlan",
    "TransferPlan",
    "TransferRules",
    "check_maps",
    "plan_moves",
    "translate_map",
]
