"""The placement that comes next: loads are exchanged, the policy is asked once, and all ranks know what it said."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from eplb_core.balancing.load_exchange import LoadExchange
from eplb_core.balancing.policy import Group, NewPlacement, Policy, new_placement
from eplb_core.errors import EplbError, error_for
from eplb_core.errors.texts import describe

if TYPE_CHECKING:
    from eplb_core.arrays import IntArray
    from eplb_core.balancing.arguments import FloatArray
    from eplb_core.balancing.core_access import CoreAccess
    from eplb_core.balancing.handover import Handover
    from eplb_core.balancing.load_exchange import Pause
    from eplb_core.balancing.load_window import LoadSnapshot
    from eplb_core.balancing.progress import Progress

logger = logging.getLogger("eplb_core")


class Placing:
    """One rank's part in placing experts, in one epoch after another.

    Parameters
    ----------
    core : CoreAccess
        The communicator.
    policy : Policy
        Asked on the lowest member.
    num_logical_experts : int
        Logical experts of each layer.
    num_expert_groups : int
        Groups of consecutive logical experts that the router picks from.
    progress : Progress
        Is told what was placed.
    """

    def __init__(
        self,
        core: CoreAccess,
        policy: Policy,
        *,
        num_logical_experts: int,
        num_expert_groups: int,
        progress: Progress,
    ) -> None:
        self._core = core
        self._policy = policy
        self._num_logical_experts = num_logical_experts
        self._num_expert_groups = num_expert_groups
        self._progress = progress
        self._exchange: LoadExchange | None = None
        self._said_not_worth_it = False
        self.draining: frozenset[int] = frozenset()
        """Members that are to hold nothing; the lowest member's count."""

    def begin_epoch(self) -> None:
        """The members have met anew: they count their exchanges from the start."""
        self._exchange = None

    def run(self, snapshot: LoadSnapshot, handover: Handover, pause: Pause) -> IntArray | None:
        """Exchange loads and return the placement to come; None when nothing is to move. Collective.

        Raises
        ------
        EplbError
            A load or the policy was refused, on all ranks; or what `pause` raises.
        StoreGone
            The store did not answer.
        """
        if self._exchange is None:
            self._exchange = self._new_exchange()
        version, old_map = handover.versioned_map()
        load = self._load(snapshot)
        round_ = self._exchange.run(snapshot.step, version, load, partial(self._place, old_map), pause)
        handover.rearranged_at(round_.step)
        if round_.placement is None:
            raise round_.refusal or error_for("EPLB-P006", problem="no reason given")
        self._progress.placed(round_.placement, round_.step)
        self._log(round_.placement, len(old_map))
        return round_.placement.physical_to_logical_map if round_.placement.num_moved_layers else None

    def _new_exchange(self) -> LoadExchange:
        core = self._core
        return LoadExchange(
            core.open_client(core.timeout_s),
            core.members,
            core.key,
            num_layers=core.num_layers,
            num_logical_experts=self._num_logical_experts,
            num_physical_experts=core.world_size * core.num_local_physical_experts,
        )

    def _load(self, snapshot: LoadSnapshot) -> FloatArray | EplbError:
        try:
            return snapshot.of_logical_experts(self._core.settle)
        except EplbError as error:  # every rank is to hear it
            return error
        except Exception as error:  # a device's, say; the others would wait for this rank's load until their limit
            reason = describe(error)
            named = error_for("EPLB-T007", rank=self._core.rank, where="the load balancer, phase load", reason=reason)
            named.__cause__ = error
            return named

    def _place(self, old_map: IntArray, load: FloatArray) -> NewPlacement:
        core = self._core
        leaving = self.draining.intersection(core.members.members)
        stay = tuple(rank for rank in core.members.members if rank not in leaving)
        group = Group(core.world_size, stay, core.nodes, self._num_expert_groups, tuple(sorted(leaving)))
        return new_placement(self._policy, load, old_map, group)

    def _log(self, new: NewPlacement, num_layers: int) -> None:
        if self._core.rank != self._core.members.members[0]:
            return
        if new.num_moved_layers:
            self._said_not_worth_it = False
            logger.info(
                "EPLB moves %d of %d layers: balancedness %.3f to %.3f, %d rows between ranks (%d unaligned).",
                new.num_moved_layers,
                num_layers,
                new.balancedness_before,
                new.balancedness_after,
                new.num_rows,
                new.num_rows_unaligned,
            )
        elif not self._said_not_worth_it:
            self._said_not_worth_it = True
            logger.info(
                "EPLB moves nothing: with balancedness %.3f, no layer would gain what the policy %r calls worth it. "
                "This is said once, until something moves.",
                new.balancedness_before,
                self._policy.name,
            )


def log_balancedness(core: CoreAccess, progress: Progress, step: int) -> None:
    """Say at its interval, on the lowest rank, what is known without asking anyone; called in every step."""
    balancedness = progress.balancedness
    if balancedness is None or step % core.config.log_balancedness_interval or not core.is_lowest_member:
        return
    logger.info(
        "%s: step %d: balancedness %.3f (mean over maximum of tokens per rank, load up to step %d)",
        core.communicator.name,
        step,
        balancedness,
        progress.load_step,
    )
