"""A rearrangement whose layers a load balancer decides about, in its own way and from two threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from eplb_core.rearrange.rearrangement import Rearrangement

if TYPE_CHECKING:
    from eplb_core.errors import EplbError
    from eplb_core.rearrange.steps import Voting
    from eplb_core.voting.vote import Vote
    from eplb_core.wire.ballots import Ballot, Decision


class BackgroundMoves(Rearrangement):
    """What `eplb_core.balancing` runs; see `Rearrangement` for the parameters, and for what both have."""

    def stage_voting(self, layer: int, voting: Voting) -> None:
        """Stage a layer as `stage` does, and decide about it in another way; blocks.

        Parameters
        ----------
        layer : int
            The next of `layers`; every rank stages in that order.
        voting : callable
            ``voting(vote, ballot) -> Decision`` replaces the vote's own wait; the same on every rank.
        """
        with self._state.calling():
            self._check_stage(layer)
            self._stage(layer, voting=voting)

    def vote_beside(self, number: int, topic: str) -> Vote:
        """Make another vote about a layer; its keys are deleted when those of the layer's own vote are."""
        vote = self._members.vote(f"{number}/{topic}", f"layer {number}, phase {topic}")
        self._moving.votes.append(vote)
        return vote

    def is_decided(self, number: int) -> bool:
        """Is it known here that a layer is to be committed, and not done yet?"""
        return number in self._moving.decided

    def accept(self, number: int) -> None:
        """Note that a layer is decided, in place of a `stage` that does not return; from any thread."""
        layer = self._moving.started.get(number)
        if layer is not None:
            self._moving.note_decided(layer)

    def give_up(self, number: int, error: EplbError) -> NoReturn:
        """Abort the next layer to be staged on every rank, drain, and raise; collective."""
        self._giving_up.abandon(number, error)

    def tally(self, number: int, ballots: Mapping[int, Ballot]) -> Decision:
        """Decide about a layer by the ballots of all members, after the observers of this rank have seen them."""
        return self._steps.tally(number, ballots)
