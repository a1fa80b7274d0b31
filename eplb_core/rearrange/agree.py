"""Agreeing: the ranks find out, before a byte moves, whether they were all given the same rearrangement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eplb_core.backend import Event
from eplb_core.errors import EplbError, PlanError, error_for
from eplb_core.plan import PlacementPlan, check_maps, plan_moves
from eplb_core.plan.maps import map_digest
from eplb_core.wire.ballots import Ballot

if TYPE_CHECKING:
    from eplb_core.rearrange.epoch import Session
    from eplb_core.voting.members import Council


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

    old: npt.NDArray[np.int64]
    new: npt.NDArray[np.int64]
    plan: PlacementPlan


def propose(session: Session, old_map: npt.ArrayLike, new_map: npt.ArrayLike) -> Proposal | EplbError:
    """Check the maps and plan the moves; what is wrong is returned, for this rank's ballot to carry.

    Bad arguments of one rank must hang nobody, so nothing is raised here.
    """
    layout, world_size = session.assembly.layout, session.control.world_size
    try:
        old, new = check_maps(
            old_map,
            new_map,
            num_layers=layout.num_layers,
            world_size=world_size,
            num_local_physical_experts=layout.num_local_physical_experts,
        )
        members = session.members if len(session.members) < world_size else None
        plan = plan_moves(old, new, world_size=world_size, members=members, nodes=session.connection.nodes)
    except EplbError as error:
        detail = f"{error.detail} Found by rank {session.rank}.".strip()
        return error_for(error.code, *error.values, detail=detail, **error.fields)
    except Exception as error:  # of an array of the host's own kind, say
        problem = f"reading them failed with {type(error).__name__}: {error}"
        return error_for("EPLB-P001", problem=problem, detail=f"Found by rank {session.rank}.")
    return Proposal(old, new, plan)


def agree(session: Session, proposal: Proposal | EplbError) -> Proposal:
    """Vote on the proposals of all members; collective.

    Parameters
    ----------
    session : Session
        Connected.
    proposal : Proposal or EplbError
        This rank's, or why it has none.

    Returns
    -------
    Proposal
        This rank's, which is everyone's.

    Raises
    ------
    EplbError
        The same on every rank: whose maps differ, or what is wrong with the arguments of one.
    """
    council = session.council
    where = f"generation {council.generation}, phase agree"
    vote = council.vote("agree", where)
    council.attend(vote)
    if isinstance(proposal, Proposal):
        refusal = _compare(council, proposal, where) or _observe(session, where)
    else:
        refusal = proposal
    if refusal is None:
        vote.cast(Ballot(True), council.tally)
        decision = council.decide(vote)
    else:
        decision = vote.abort(refusal)
    if decision.commit:
        council.forget()
    council.forget_later([vote], extra=[_first_key(council)])
    if not decision.commit or isinstance(proposal, EplbError):
        error = decision.error or error_for("EPLB-T007", rank=decision.by, where=where, reason="no reason given")
        raise error from (refusal if refusal is not error else None)
    return proposal


def _compare(council: Council, proposal: Proposal, where: str) -> EplbError | None:
    """Compare this rank's maps with the first ones stored."""
    mine = {"old maps": map_digest(proposal.old).hex(), "new maps": map_digest(proposal.new).hex()}
    rank, theirs = _first_maps(council, mine)
    differing = [what for what, digest in mine.items() if theirs.get(what) != digest]
    if not differing:
        return None
    detail = f"Rank {council.rank} and rank {rank} differ ({where}); nothing was moved."
    return PlanError("EPLB-P003", what=" and ".join(differing), detail=detail)


def _first_maps(council: Council, mine: Mapping[str, str]) -> tuple[int, Mapping[str, str]]:
    """Store digests of this rank's maps unless another rank was first; return whose stand there, and what."""
    body = json.dumps([council.rank, mine]).encode()
    sealed = council.seal("maps", body, rank=0, generation=council.generation)
    value = council.client.put_first(_first_key(council), sealed)
    rank, theirs = json.loads(council.open(value, "maps", rank=0, generation=council.generation))
    return int(rank), dict(theirs)


def _first_key(council: Council) -> str:
    return f"{council.generation}/agree/first"


def _observe(session: Session, where: str) -> EplbError | None:
    if not session.hooks.observed:
        return None
    council = session.council
    try:
        session.hooks.observe(Event("agree", council.name, council.epoch, council.generation, None, True))
    except EplbError as error:
        return error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return error_for("EPLB-T007", rank=session.rank, where=where, reason=reason)
    return None
