"""How a rearrangement begins: members meet if they have not yet, agree, and link the backends of peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import numpy.typing as npt

from eplb_core.control.store import StoreGone
from eplb_core.errors import CommitError, EplbError, PeerLostError, PlanError, StalledError, error_for
from eplb_core.rearrange.agree import Proposal, agree, propose
from eplb_core.rearrange.link import all_pairs, link
from eplb_core.rearrange.lives import Lives
from eplb_core.rearrange.rearrangement import Rearrangement
from eplb_core.rearrange.state import CommunicatorState

R = TypeVar("R", bound=Rearrangement)


def connect(lives: Lives, state: CommunicatorState, timeout_s: float) -> None:
    """Connect to every member; collective. See `Communicator.connect`."""
    state.check_usable()
    with poisoning(lives, state, "connect"):
        if lives.enter(timeout_s, everyone=True):
            return
        epoch = lives.epoch
        members, _ = epoch.entered
        epoch.connects += 1
        others = [rank for rank in members.members if rank != members.rank]
        link(epoch, all_pairs(members.members), others, timeout_s, f"connect/{epoch.connects}", always=True)


def begin(
    lives: Lives,
    state: CommunicatorState,
    old_map: npt.ArrayLike,
    new_map: npt.ArrayLike,
    asked: Any = None,
    missing: str = "raise",
    kind: type[R] = Rearrangement,  # type: ignore[assignment]
) -> R:
    """Agree on a rearrangement; collective. See `Communicator.begin`."""
    state.check_usable()
    if state.open is not None:
        raise PlanError("EPLB-P004", problem="begin() while a rearrangement is open")
    if state.held.decided:
        problem = f"begin() while layer(s) {state.held.decided} are decided and not committed"
        raise PlanError("EPLB-P004", problem=problem)
    # Work that the caller has enqueued (loading weights, copies of the last commits) ends before any rank reads.
    streams = lives.epoch.setup.streams
    streams.wait_for([streams.mark(), *state.take_slot_events()])
    with poisoning(lives, state, "connect"):
        lives.enter(lives.epoch.timeout_s, everyone=False)
    epoch = lives.epoch
    members, _ = epoch.entered
    members.generation += 1
    epoch.connects = 0
    state.entered(members.epoch, members.generation)
    with state.counts.phase("agree"):
        proposal = _agree(lives, state, old_map, new_map, asked, missing)
    plan = proposal.plan
    state.counts.unmet = proposal.unmet
    state.held.agreed(
        f"{members.namespace}/{members.generation}", proposal.old, proposal.new, plan.layers, proposal.layers
    )
    state.held.keep_only(members.members)
    with state.counts.phase("connect"), poisoning(lives, state, "connect"):
        link(epoch, plan.pairs, plan.peers(members.rank), epoch.timeout_s)
    rearrangement = kind(epoch, plan, state)
    lives.last = state.open = rearrangement
    return rearrangement


@contextmanager
def poisoning(lives: Lives, state: CommunicatorState, where: str) -> Iterator[None]:
    """Refuse further use after a failure to connect: its outcome will not change."""
    try:
        yield
    except StoreGone as gone:
        _lost(lives, state, gone, where)
    except EplbError as error:
        if isinstance(error, CommitError):  # of a layer that was in doubt
            state.invalid = error
        state.poison(error, where)
        raise
    except BaseException as interrupt:  # Ctrl-C, or an unexpected error
        state.poison(error_for("EPLB-T007", rank=lives.rank, where=where, reason=repr(interrupt)), where)
        raise


def _agree(
    lives: Lives,
    state: CommunicatorState,
    old_map: npt.ArrayLike,
    new_map: npt.ArrayLike,
    asked: Any,
    missing: str,
) -> Proposal:
    epoch = lives.epoch
    where = f"generation {epoch.entered[0].generation}, phase agree"
    try:
        proposal = propose(epoch, state.held, old_map, new_map, asked, missing)
        if isinstance(proposal, Proposal):
            state.held.assume(proposal.old, proposal.layers)
        return agree(epoch, proposal, lambda error: state.poison(error, where))
    except StoreGone as gone:
        _lost(lives, state, gone, "agree")
    except EplbError as error:
        # The outcome is the same on all ranks; a lost one that comes back reads it. After a refusal all stay usable.
        if isinstance(error, (PeerLostError, StalledError)) or error.code == "EPLB-T016":
            state.poison(error, where)
        raise


def _lost(lives: Lives, state: CommunicatorState, gone: StoreGone, where: str) -> NoReturn:
    error = lives.store_lost(gone, where)
    state.poison(error, where)
    raise error from gone
