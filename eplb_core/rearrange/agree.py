"""Agree: before a byte moves, the ranks find out whether all were given the same rearrangement."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.backend import Event
from eplb_core.errors import EplbError, MetadataError, PlanError, error_for
from eplb_core.errors.texts import describe
from eplb_core.plan import PlacementPlan, check_maps, plan_moves
from eplb_core.plan.maps import map_digest, rows_of, which_layers
from eplb_core.plan.renumber import among_all
from eplb_core.rearrange.sourcing import Unmet, refusal_of, supplied_anywhere, supplied_here, unserved, without_unmet
from eplb_core.voting.vote import all_agree
from eplb_core.wire.ballots import Ballot, Decision

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
    layers : tuple of int or None
        The layers that the rows of the maps are of; None is all.
    missing : {"raise", "report"}
        What is to become of experts that no live rank and no source has.
    supplied : str
        This rank's answer, as `supplied_here` writes it.
    unmet : tuple
        What nobody supplies, once that is agreed; then `new` has these slots as `old` has them.
    """

    old: IntArray
    new: IntArray
    plan: PlacementPlan
    layers: tuple[int, ...] | None = None
    missing: str = "raise"
    supplied: str = ""
    unmet: Unmet = ()


def propose(
    epoch: Epoch,
    held: HeldPlacement,
    old_map: npt.ArrayLike,
    new_map: npt.ArrayLike,
    asked: Any = None,
    missing: str = "raise",
) -> Proposal | EplbError:
    """Check memory and maps, and plan the moves; an error is returned, not raised: this rank's ballot carries it.

    Parameters
    ----------
    epoch : Epoch
        An epoch whose members have met.
    held : HeldPlacement
        What the rows hold.
    old_map, new_map : array-like of int
        As the host gave them.
    asked : sequence of int, or int, or None
        Layers that the maps are of, or the one layer; None is all.

    Notes
    -----
    A rank that raised here would leave the others waiting for its ballot.
    """
    layout, world_size = epoch.setup.layout, epoch.control.world_size
    members, _ = epoch.entered
    try:
        if missing not in ("raise", "report"):
            raise PlanError("EPLB-P007", problem=f"missing={missing!r} is neither 'raise' nor 'report'")
        replaced = layout.first_replaced()
        if replaced is not None:
            layer, tensor, problem = replaced
            raise MetadataError("EPLB-M007", key=(layer, tensor), rank=epoch.rank, problem=problem)
        layers = which_layers(asked, layout.num_layers)
        old, new = check_maps(
            rows_of(old_map, asked, layout.num_layers),
            rows_of(new_map, asked, layout.num_layers),
            num_layers=layout.num_layers if layers is None else len(layers),
            world_size=world_size,
            num_local_physical_experts=layout.num_local_physical_experts,
            num_experts=_counts(layout.shared.num_experts, layers),
        )
        differs = held.first_difference(old, members.members, layers)
        if differs is not None:
            row, slot = differs
            layer = row if layers is None else layers[row]
            given, holds = int(old[row, slot]), int(held.map[layer, slot])
            raise PlanError("EPLB-P008", rank=epoch.rank, layer=layer, slot=slot, held=holds, given=given)
        plan = _planned(epoch, old, new, layers)
        supplied = supplied_here(epoch.setup.sources, plan, epoch.rank)
    except EplbError as error:
        detail = f"{error.detail} Found by rank {epoch.rank}.".strip()
        return error_for(error.code, *error.values, detail=detail, **error.fields)
    except Exception as error:  # for instance from an array class of the host
        problem = f"reading them failed with {describe(error)}"
        return error_for("EPLB-P001", problem=problem, detail=f"Found by rank {epoch.rank}.")
    return Proposal(old, new, plan, layers, missing, supplied)


def _counts(num_experts: Sequence[int] | None, layers: tuple[int, ...] | None) -> Sequence[int] | None:
    return num_experts if layers is None or num_experts is None else [num_experts[layer] for layer in layers]


def _planned(epoch: Epoch, old: IntArray, new: IntArray, layers: tuple[int, ...] | None) -> PlacementPlan:
    members, world_size = epoch.entered[0].members, epoch.control.world_size
    present = members if len(members) < world_size else None
    plan = plan_moves(old, new, world_size=world_size, members=present, nodes=epoch.nodes, missing="source")
    return plan if layers is None else among_all(plan, layers, epoch.setup.layout.num_layers)


def _settled(epoch: Epoch, proposal: Proposal, supplied: Mapping[str, str]) -> Proposal:
    """Return a proposal whose plan has only what can be had."""
    left = unserved(proposal.plan, supplied)
    if not len(left):
        return proposal
    old, layers, num_rows = proposal.old, proposal.layers, proposal.plan.num_local_physical_experts
    new, unmet = without_unmet(old, proposal.new, left, layers, num_rows)
    return replace(proposal, new=new, plan=_planned(epoch, old, new, layers), unmet=unmet)


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
            mine = cast("Proposal", proposal)
            content = {"supplied": mine.supplied} if mine.supplied else {}
            vote.cast(Ballot(True, content=content), lambda ballots: _tally(members.rank, mine, ballots))
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
    return _settled(epoch, proposal, {str(r): str(bits) for r, bits in decision.content.get("supplied", {}).items()})


def _tally(rank: int, mine: Proposal, ballots: Mapping[int, Ballot]) -> Decision:
    """Commit when every ballot says so, and what no live rank holds is supplied, or to be reported."""
    decision = all_agree(rank)(ballots)
    if not decision.commit or not len(mine.plan.sourced):
        return decision
    supplied = supplied_anywhere(mine.plan, ballots)
    left = unserved(mine.plan, supplied)
    if len(left) and mine.missing == "raise":
        return Decision(False, rank, refusal_of(left, mine.old, mine.layers, mine.plan.num_local_physical_experts))
    return Decision(True, rank, content={"supplied": supplied})


def _compare(members: Members, proposal: Proposal, where: str) -> EplbError | None:
    """Compare this rank's maps with the first ones stored."""
    mine = {"old maps": map_digest(proposal.old).hex(), "new maps": map_digest(proposal.new).hex()}
    if proposal.layers is not None:
        mine["layers"] = ",".join(map(str, proposal.layers))
    mine["values of missing="] = proposal.missing
    rank, theirs = _first_maps(members, mine)
    differing = [
        what for what in sorted(mine.keys() | theirs.keys(), reverse=True) if theirs.get(what) != mine.get(what)
    ]
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
