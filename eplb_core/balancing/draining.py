"""Emptying ranks that are about to leave: from the next rearrangement on, no expert needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from eplb_core.balancing.arguments import count_replicas
from eplb_core.errors import PlanError

if TYPE_CHECKING:
    from eplb_core.balancing.core_access import CoreAccess
    from eplb_core.balancing.handover import Handover
    from eplb_core.balancing.placing import Placing


class Draining:
    """Base of `LoadBalancer`: ranks that are to hold nothing any more."""

    _core: CoreAccess
    _placing: Placing
    _num_logical_experts: int
    _handover: Handover

    def drain(self, ranks: Sequence[int]) -> None:
        """Empty some ranks, on every rank after the same step: the next rearrangement leaves them no expert alone.

        Until then, and afterwards where an expert has other rows as well, they serve on; `drained` says when they may
        leave.

        Parameters
        ----------
        ranks : sequence of int
            The ranks that are to leave; none ends the draining.

        Raises
        ------
        PlanError
            One is no member, or the slots of the others are too few (EPLB-P006).
        """
        core, chosen = self._core, frozenset(int(rank) for rank in ranks)
        members = core.members.members
        left = (len(members) - len(chosen)) * core.num_local_physical_experts
        problem = ""
        if not chosen <= set(members):
            problem = f"drain({sorted(chosen)}) names ranks that are not among the members {list(members)}"
        elif left < self._num_logical_experts:
            problem = f"drain({sorted(chosen)}) leaves {left} slots for {self._num_logical_experts} logical experts"
        if problem:
            raise PlanError("EPLB-P006", problem=problem)
        self._placing.draining = chosen

    @property
    def drained(self) -> bool:
        """Has every expert of every layer a row outside of the ranks that are being drained, by the map that holds?"""
        held, local = self._handover.map(), self._core.num_local_physical_experts
        stays = ~np.isin(np.arange(held.shape[1]) // max(local, 1), sorted(self._placing.draining))
        return bool((count_replicas(held[:, stays], self._num_logical_experts) > 0).all())
