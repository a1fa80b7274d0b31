"""The steps of a layer on this rank: transfer, wait, vote and commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from eplb_core.backend import Event
from eplb_core.errors import CommitError, PlanError
from eplb_core.errors.texts import describe
from eplb_core.rearrange.failure import FailurePath
from eplb_core.rearrange.layers import MovingLayer, MovingLayers
from eplb_core.rearrange.sourcing import read_all
from eplb_core.voting.departure import vanish
from eplb_core.voting.vote import Vote, all_agree
from eplb_core.wire.ballots import Ballot, Decision

if TYPE_CHECKING:
    from eplb_core.rearrange.epoch import Epoch
    from eplb_core.rearrange.state import CommunicatorState

Voting = Callable[[Vote, Ballot], Decision]
"""Decides about a landed layer in another way: casts the ballot and returns the decision."""


class LayerSteps:
    """Takes one layer of a rearrangement from the start of its transfer to its commit.

    Parameters
    ----------
    epoch : Epoch
        The epoch of the rearrangement.
    state : CommunicatorState
        Keeps the outcome of each layer.
    moving : MovingLayers
        Layers in flight, and decided.

    Attributes
    ----------
    failure : FailurePath
        Leaves the rearrangement when a step fails.
    """

    def __init__(self, epoch: Epoch, state: CommunicatorState, moving: MovingLayers) -> None:
        self._epoch = epoch
        self._state = state
        self._moving = moving
        self._members, self._watch = epoch.entered
        self.failure = FailurePath(epoch, state, moving, lambda **told: self._tell("abort", **told))

    def stage(
        self,
        number: int,
        following: int | None,
        *,
        meanwhile: Callable[[], None] | None = None,
        voting: Voting | None = None,
    ) -> None:
        """Bring one layer's rows into landing memory, and decide about it with all members.

        Parameters
        ----------
        number : int
            The layer.
        following : int or None
            The layer after it.
        meanwhile : callable or None
            What to do between this rank's ballot and the decision.
        voting : callable or None
            Replaces the vote's own wait.
        """
        layer, counts = self._moving.prepare(number), self._state.counts
        with self.failure.guard(layer, following):
            self._moving.start(layer)
            if self._moving.slot_is_free:
                self._moving.start_next()
            self._watch.attend(layer.vote)
            self._land(layer)
            with counts.phase("vote"):
                ballot = Ballot(True, evidence=self._evidence(layer))
                if voting is None:
                    layer.vote.cast(ballot, lambda ballots: self.tally(layer.number, ballots))
        if meanwhile is not None:
            try:
                meanwhile()
            except CommitError:
                raise
            except BaseException as interrupt:  # only Ctrl-C: exceptions of observers are logged at a commit
                self.failure.interrupted(layer, interrupt)
                raise
        with self.failure.guard(layer, following), counts.phase("vote"):
            decision = self._watch.decide(layer.vote) if voting is None else voting(layer.vote, ballot)
        if not decision.commit:
            self.failure.abandon(number, decision, None)
        self._moving.note_decided(layer)

    def _land(self, layer: MovingLayer) -> None:
        """Wait for a layer's rows."""
        if layer.failure is not None:
            raise layer.failure
        counts = self._state.counts
        layer.phase = "wait"
        if layer.fills:
            setup = self._epoch.setup
            with counts.phase("source"):
                counts.nbytes_supplied += read_all(
                    setup.sources, layer.number, self._epoch.rank, layer.fills, self._epoch.backend.progress
                )
        with counts.phase("wait"):
            receipt = self._epoch.hooks.wait(layer.handle, self._epoch.timeout_s)
        layer.landed = True
        layer.phase = "vote"
        counts.nbytes_received += receipt.nbytes_received
        counts.nbytes_sent += receipt.nbytes_sent
        counts.nbytes_local += layer.copies.nbytes_local

    def _evidence(self, layer: MovingLayer) -> Mapping[str, bytes]:
        return self._epoch.hooks.observe(self._event("vote", layer.number)) if self._epoch.hooks.observed else {}

    def tally(self, number: int, ballots: Mapping[int, Ballot]) -> Decision:
        """Decide about a layer by the ballots of all members, after the observers of this rank have seen them."""
        if self._epoch.hooks.observed:
            shown: dict[str, dict[int, bytes]] = {}
            for rank, ballot in ballots.items():
                for name, value in ballot.evidence.items():
                    shown.setdefault(name, {})[rank] = value
            try:
                self._epoch.hooks.observe(self._event("tally", number, evidence=shown))
            except Exception as error:
                refusal = self._watch.diagnose(error, self._moving.started[number].vote, f"layer {number}, phase vote")
                return Decision(False, self._members.rank, refusal.error, refusal.fatal)
        return all_agree(self._members.rank)(ballots)

    def commit(self, number: int, *, by_host: bool = False) -> None:
        """Copy a decided layer's rows into the live rows of this rank, unless the host has done so."""
        # It leaves the list first, so that it is copied once whatever happens, a signal handler or a failed copy.
        layer = self._moving.decided.pop(number, None)
        if layer is None:
            raise PlanError("EPLB-P004", problem=f"commit({number}) without stage({number})")
        self._moving.copying[number] = layer
        state = self._state
        with state.counts.phase("commit"):
            try:
                if not by_host:
                    layer.copies.run()
                state.slot_events[layer.slot] = self._epoch.setup.streams.mark()
            except BaseException as error:  # Ctrl-C in the middle of a copy leaves the layer torn as well
                reason = describe(error)
                dead = CommitError("EPLB-T006", layer=number, rank=self._epoch.rank, reason=reason)
                vanish(self._members)
                self._moving.decided.clear()  # copies that were made in part cannot be repeated
                state.invalid = dead
                state.poison(dead, f"layer {number}, phase commit")
                raise dead from error
            finally:
                del self._moving.copying[number]
        state.held.note_committed(number)
        self._tell("commit", number)

    def _tell(self, kind: Any, layer: int, **more: Any) -> None:
        self._epoch.hooks.tell(self._event(kind, layer, **more))

    def _event(self, kind: Any, layer: int, ok: bool = True, reason: str = "", evidence: Any = None) -> Event:
        members = self._members
        return Event(kind, members.name, members.epoch, members.generation, layer, ok, reason, evidence or {})
