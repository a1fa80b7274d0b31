"""Agree: before a byte moves, the ranks find out whether all were given the same rearrangement."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.backend import Event
from eplb_core.errors import EplbError, MetadataError, PlanError, error_for
from eplb_core.errors.texts import describe
from eplb_core.plan import PlacementPlan, check_maps, plan_moves
from eplb_core.plan.maps import map_digest
from eplb_core.voting.vote import all_agree
from eplb_core.wire.ballots import Ballot

if TYPE_CHECKING:
    from eplb_core.rearrange.epoch import Epoch
    from eplb_core.rearrange.held import HeldPlacement
    from eplb_core.voting.members import Members


@dataclass(frozen=True, eq=False)
class Proposal:
    """What this rank was asked to do.

    Parameters
    ----------
    old, new : ndarray, int64, [num_moe_layers, num_physical_experts]
        The maps, checked.
    plan : PlacementPlan
        Their moves.
    """

    old: IntArray
    new: IntArray
    plan: PlacementPlan


def propose(epoch: Epoch, held: HeldPlacement, old_map: npt.ArrayLike, new_map: npt.ArrayLike) -> Proposal | EplbError:
    """Check memory and maps, and plan the moves; an error is returned, not raised: this rank's ballot carries it.

    Notes
    -----
    A rank that raised here would leave the others waiting for its ballot.
    """
    layout, world_size = epoch.setup.layout, epoch.control.world_size
    members, _ = epoch.entered
    try:
        replaced = layout.first_replaced()
        if replaced is not None:
            layer, tensor, problem = replaced
            raise MetadataError("EPLB-M007", key=(layer, tensor), rank=epoch.rank, problem=problem)
        old, new = check_maps(
            old_map,
            new_map,
            num_layers=layout.num_layers,
            world_size=world_size,
            num_local_physical_experts=layout.num_local_physical_experts,
            num_experts=layout.shared.num_experts,
        )
        differs = held.first_difference(old, members.members)
        if differs is not None:
            layer, slot = differs
            given, holds = int(old[layer, slot]), int(held.map[layer, slot])
            raise PlanError("EPLB-P008", rank=epoch.rank, layer=layer, slot=slot, held=holds, given=given)
        present = members.members if len(members.members) < world_size else None
        plan = plan_moves(old, new, world_size=world_size, members=present, nodes=epoch.nodes)
    except EplbError as error:
        detail = f"{error.detail} Found by rank {epoch.rank}.".strip()
        return error_for(error.code, *error.values, detail=detail, **error.fields)
    except Exception as error:  # for instance from an array class of the host
        problem = f"reading them failed with {describe(error)}"
        return error_for("EPLB-P001", problem=problem, detail=f"Found by rank {epoch.rank}.")
    return Proposal(old, new, plan)


def agree(epoch: Epoch, proposal: Proposal | EplbError, torn: Callable[[EplbError], None]) -> Proposal:
    """Vote on the proposals of all members; collective.

    Parameters
    ----------
    epoch : Epoch
        An epoch whose members have met.
    proposal : Proposal or EplbError
        Proposal of this rank, or the error that kept it from making one.
    torn : callable
        Called with the reason when this rank leaves although the others go on: on Ctrl-C after the decision.

    Returns
    -------
    Proposal
        Proposal of this rank, equal to that of every other.

    Raises
    ------
    EplbError
        The same on every rank: which ranks' maps differ, or what is wrong with one rank's arguments.
    """
    members, watch = epoch.entered
    where = f"generation {members.generation}, phase agree"
    vote = members.vote("agree", where)
    watch.attend(vote)
    try:
        if isinstance(proposal, Proposal):
            refusal = _compare(members, proposal, where) or _observe(epoch, members, where)
        else:
            refusal = proposal
        if refusal is None:
            vote.cast(Ballot(True), all_agree(members.rank))
            decision = watch.decide(vote)
        else:
            decision = vote.abort(refusal)
    except BaseException as interrupt:
        if not isinstance(interrupt, Exception):  # Ctrl-C: the members must not wait for this rank
            reason = type(interrupt).__name__
            error = error_for("EPLB-T007", rank=members.rank, where=where, reason=reason)
            if vote.abort(error).commit:
                torn(error)
        raise
    if decision.commit:
        members.keys.forget()
    members.keys.forget_later([vote], extra=[_first_key(members)])
    if not decision.commit or isinstance(proposal, EplbError):
        error = decision.error or error_for("EPLB-T007", rank=decision.by, where=where, reason="no reason given")
        raise error from (refusal if refusal is not error else None)
    return proposal


def _compare(members: Members, proposal: Proposal, where: str) -> EplbError | None:
    """Compare this rank's maps with the first ones stored."""
    mine = {"old maps": map_digest(proposal.old).hex(), "new maps": map_digest(proposal.new).hex()}
    rank, theirs = _first_maps(members, mine)
    differing = [what for what, digest in mine.items() if theirs.get(what) != digest]
    if not differing:
        return None
    detail = f"Rank {members.rank} and rank {rank} differ ({where}); nothing was moved."
    return PlanError("EPLB-P003", what=" and ".join(differing), detail=detail)


def _first_maps(members: Members, mine: Mapping[str, str]) -> tuple[int, Mapping[str, str]]:
    """Store digests of this rank's maps unless another rank was first; return which rank was, and its digests."""
    body = json.dumps([members.rank, mine]).encode()
    sealed = members.seal("maps", body, rank=0, generation=members.generation)
    value = members.client.put_first(_first_key(members), sealed)
    rank, theirs = json.loads(members.open(value, "maps", rank=0, generation=members.generation))
    return int(rank), dict(theirs)


def _first_key(members: Members) -> str:
    return members.key(f"{members.generation}/agree/first")


def _observe(epoch: Epoch, members: Members, where: str) -> EplbError | None:
    if not epoch.hooks.observed:
        return None
    try:
        epoch.hooks.observe(Event("agree", members.name, members.epoch, members.generation, None, True))
    except EplbError as error:
        return error
    except Exception as error:
        reason = describe(error)
        return error_for("EPLB-T007", rank=epoch.rank, where=where, reason=reason)
    return None
