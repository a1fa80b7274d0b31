"""How a host gives a rearrangement up that did not fail: one layer, this rank's refusal, or all that is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from eplb_core.errors import EplbError, PlanError, error_for
from eplb_core.wire.ballots import Ballot, Decision

if TYPE_CHECKING:
    from eplb_core.rearrange.epoch import Epoch
    from eplb_core.rearrange.failure import FailurePath
    from eplb_core.rearrange.layers import MovingLayers
    from eplb_core.rearrange.state import CommunicatorState

CANCELLED = "the host cancelled the rearrangement"


class GivingUp:
    """Leaves layers as they are, the same ones on every rank.

    Parameters
    ----------
    epoch : Epoch
        The epoch of the rearrangement.
    state : CommunicatorState
        Told which placement holds.
    moving : MovingLayers
        Layers in flight, and decided.
    failure : FailurePath
        Drains what is in flight.
    """

    def __init__(self, epoch: Epoch, state: CommunicatorState, moving: MovingLayers, failure: FailurePath) -> None:
        self._epoch = epoch
        self._state = state
        self._moving = moving
        self._failure = failure
        self._members, self._watch = epoch.entered
        self._cancelled = False

    def discard(self, layer: int) -> None:
        """Drop a decided layer; see `Rearrangement.discard`."""
        if self._moving.decided.pop(layer, None) is None:
            raise PlanError("EPLB-P004", problem=f"discard({layer}) of a layer that is not staged")
        self._state.held.note_discarded(layer)

    def abandon(self, following: int, error: EplbError) -> NoReturn:
        """Abort the next layer on every rank, drain, and raise what stands; collective."""
        vote = self._members.vote(str(following), f"layer {following}, phase vote")
        self._moving.votes.append(vote)
        self._failure.abandon(following, vote.abort(error), None)

    def refuse(self, following: int, reason: str) -> EplbError:
        """Refuse the next layer for a reason of this rank's host; return the error that all ranks get; collective."""
        where = f"layer {following}, generation {self._members.generation}"
        try:
            self.abandon(following, error_for("EPLB-T007", rank=self._epoch.rank, where=where, reason=reason))
        except EplbError as error:
            return error

    def cancel(self, following: int | None, commit: Callable[[int], None]) -> None:
        """Drain, drop what no rank has committed, and end; see `Rearrangement.cancel`.

        Parameters
        ----------
        following : int or None
            The next layer to be staged; None when all were, or the rearrangement is over.
        commit : callable
            Commits a decided layer.
        """
        if self._cancelled:
            return
        if following is not None:
            try:
                self.abandon(following, error_for("EPLB-T021", reason=CANCELLED))
            except EplbError as error:
                if error.code != "EPLB-T021" and self._state.poisoned is not None:
                    raise
        elsewhere = self._committed_anywhere()
        for layer in list(self._moving.decided):
            if layer in elsewhere:
                commit(layer)
            else:
                self.discard(layer)
        self._members.keys.forget_later(self._moving.votes)
        self._state.ended(self._state.open)
        self._cancelled = True

    def _committed_anywhere(self) -> frozenset[int]:
        """Ask all members which layers they committed: what one has, all must have."""
        vote = self._members.vote("cancel", f"generation {self._members.generation}, phase cancel")
        self._moving.votes.append(vote)

        def union(ballots: Mapping[int, Ballot]) -> Decision:
            layers = {int(layer) for ballot in ballots.values() for layer in ballot.content["committed"]}
            return Decision(True, self._members.rank, content={"committed": sorted(layers)})

        vote.cast(Ballot(True, content={"committed": sorted(self._state.held.committed)}), union)
        decision = self._watch.decide(vote)
        if not decision.commit:
            raise decision.error or error_for("EPLB-T007", rank=decision.by, where=vote.where, reason="not said")
        return frozenset(int(layer) for layer in decision.content["committed"])
