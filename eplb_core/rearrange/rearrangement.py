"""One rearrangement: for each layer transfer, wait, vote and commit, all members in step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from eplb_core.backend import Event
from eplb_core.errors import CommitError, EplbError, PlanError
from eplb_core.errors.texts import describe
from eplb_core.rearrange.failure import FailurePath
from eplb_core.rearrange.layers import MovingLayer, MovingLayers
from eplb_core.voting.departure import vanish
from eplb_core.voting.vote import Vote, all_agree
from eplb_core.wire.ballots import Ballot, Decision

if TYPE_CHECKING:
    from eplb_core.plan import PlacementPlan
    from eplb_core.rearrange.epoch import Epoch
    from eplb_core.rearrange.state import CommunicatorState

Voting = Callable[[Vote, Ballot], Decision]
"""Decides about a landed layer in another way: casts the ballot and returns the decision."""


class Rearrangement:
    """An agreed rearrangement. `Communicator.begin` makes it; every rank makes the same calls in the same order.

    Parameters
    ----------
    epoch : Epoch
        The epoch in which it was agreed.
    plan : PlacementPlan
        The moves of all layers.
    state : CommunicatorState
        Keeps the outcome of each layer.

    Attributes
    ----------
    layers : tuple of int
        Ascending: every layer that moves anything on any rank.
    """

    def __init__(self, epoch: Epoch, plan: PlacementPlan, state: CommunicatorState) -> None:
        self.layers = plan.layers
        self._epoch = epoch
        self._state = state
        self._members, self._watch = epoch.entered
        self._moving = MovingLayers(epoch, plan, state)
        self._failure = FailurePath(epoch, state, self._moving, lambda **told: self._tell("abort", **told))
        self._next_stage = 0

    # --- the host's calls --------------------------------------------------------------------------------------------

    def stage(self, layer: int, voting: Voting | None = None) -> None:
        """Bring one layer's rows into landing memory on every rank and decide about it; blocks.

        With two staging layers it also starts the next layer's transfer, which then runs beside this layer's vote.

        Parameters
        ----------
        layer : int
            The next of `layers`; every rank stages in that order.
        voting : callable or None
            ``voting(vote, ballot) -> Decision`` replaces the vote's own wait; the same on every rank.

        Raises
        ------
        PlanError
            Out of order, or ``staging_layers`` layers are staged and uncommitted (EPLB-P004).
        TransferError
            The layer was aborted: nobody commits it, and all live ranks raise the same error. Layers decided before it
            are the host's to commit: ``.report.decided_layers``.
        """
        with self._state.calling():
            self._check_stage(layer)
            self._stage(layer, voting=voting)

    def commit(self, layer: int) -> None:
        """Copy a decided layer's rows into the live rows of this rank; local, on the caller's current stream.

        May be called from another thread than the one that stages the next layer, and after a later layer failed.

        Raises
        ------
        PlanError
            The layer is not decided, or committed already (EPLB-P004).
        CommitError
            A copy failed: this rank's weights are invalid, and its peers see it as gone.
        """
        with self._state.committing():
            self._state.check_open()
            self._commit(layer)

    def discard(self, layer: int) -> None:
        """Drop a decided layer instead of committing it; the same on every rank. Its rows stay as they are.

        Raises
        ------
        PlanError
            The layer is not decided, or committed already (EPLB-P004).
        """
        with self._state.committing():
            self._state.check_open()
            if self._moving.decided.pop(layer, None) is None:
                raise PlanError("EPLB-P004", problem=f"discard({layer}) of a layer that is not staged")
            self._state.held.note_discarded(layer)

    def end(self) -> None:
        """End the rearrangement, after every layer is committed.

        Raises
        ------
        PlanError
            Layers are left (EPLB-P004).
        """
        with self._state.calling():
            self._end()

    def run(self) -> None:
        """Stage and commit every layer, then end; this is `Communicator.rearrange`.

        Notes
        -----
        The copies of a layer's commit, and the start of the transfer that takes its slot, run while the next layer's
        vote is under way.
        """
        with self._state.calling():
            before: int | None = None

            def commit_before() -> None:
                if before is not None:
                    self._commit(before)
                    self._moving.start_next()

            try:
                for layer in self.layers:
                    self._stage(layer, meanwhile=commit_before)
                    before = layer
                    if self._moving.slots == 1:
                        commit_before()
                        before = None
            except KeyboardInterrupt:  # after the last layer's decision; before it, the layer's abort has ended all
                self._state.ended(self)
                raise
            finally:
                self.commit_decided()
            self._end()

    # --- for a load balancer, which decides in its own way -----------------------------------------------------------

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
        self._failure.abandon(number, self._members.vote(str(number), f"layer {number}, phase vote").abort(error), None)

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

    # --- steps of a layer --------------------------------------------------------------------------------------------

    def _check_stage(self, layer: int) -> None:
        self._state.check_usable()
        if self._state.open is not self:
            raise PlanError("EPLB-P004", problem=f"stage({layer}) of a rearrangement that is over")
        if self._next_stage >= len(self.layers):
            raise PlanError("EPLB-P004", problem=f"stage({layer}) after every layer was staged")
        expected = self.layers[self._next_stage]
        if layer != expected:
            raise PlanError("EPLB-P004", problem=f"stage({layer}) where layer {expected} is next")
        if len(self._moving.decided) >= self._moving.slots:
            problem = f"stage({layer}) while layer(s) {list(self._moving.decided)} are staged and uncommitted"
            raise PlanError("EPLB-P004", problem=problem)

    def _stage(self, number: int, *, meanwhile: Callable[[], None] | None = None, voting: Voting | None = None) -> None:
        layer, counts = self._moving.prepare(number), self._state.counts
        with self._failure.guard(layer, self._following()):
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
                self._failure.interrupted(layer, interrupt)
                raise
        with self._failure.guard(layer, self._following()), counts.phase("vote"):
            decision = self._watch.decide(layer.vote) if voting is None else voting(layer.vote, ballot)
        if not decision.commit:
            self._failure.abandon(number, decision, None)
        self._moving.note_decided(layer)
        self._next_stage += 1

    def _following(self) -> int | None:
        """Return the layer after the one being staged, or None."""
        after = self.layers[self._next_stage + 1 : self._next_stage + 2]
        return after[0] if after else None

    def _land(self, layer: MovingLayer) -> None:
        """Wait for a layer's rows."""
        if layer.failure is not None:
            raise layer.failure
        counts = self._state.counts
        layer.phase = "wait"
        with counts.phase("wait"):
            receipt = self._epoch.hooks.wait(layer.handle, self._epoch.timeout_s)
        layer.landed = True
        layer.phase = "vote"
        counts.nbytes_received += receipt.nbytes_received
        counts.nbytes_sent += receipt.nbytes_sent
        counts.nbytes_local += layer.copies.nbytes_local

    def _evidence(self, layer: MovingLayer) -> Mapping[str, bytes]:
        return self._epoch.hooks.observe(self._event("vote", layer.number)) if self._epoch.hooks.observed else {}

    # --- the end of a layer ------------------------------------------------------------------------------------------

    def commit_decided(self) -> None:
        """Commit the layers that are decided and not yet committed."""
        for number in list(self._moving.decided):
            self._commit(number)

    def let_go(self) -> None:
        """Drop references to memory."""
        self._moving.started.clear()
        self._moving.decided.clear()

    def _commit(self, number: int) -> None:
        # It leaves the list first, so that it is copied once whatever happens, a signal handler or a failed copy.
        layer = self._moving.decided.pop(number, None)
        if layer is None:
            raise PlanError("EPLB-P004", problem=f"commit({number}) without stage({number})")
        self._moving.copying[number] = layer
        state = self._state
        with state.counts.phase("commit"):
            try:
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

    def _end(self) -> None:
        self._state.check_open()
        left = [*self._moving.decided, *self._moving.copying, *self.layers[self._next_stage :]]
        if left:
            raise PlanError("EPLB-P004", problem=f"end() before layer(s) {left} were staged and committed")
        self._members.keys.forget_later(self._moving.votes)
        self._state.ended(self)

    def _tell(self, kind: Any, layer: int, **more: Any) -> None:
        self._epoch.hooks.tell(self._event(kind, layer, **more))

    def _event(self, kind: Any, layer: int, ok: bool = True, reason: str = "", evidence: Any = None) -> Event:
        members = self._members
        return Event(kind, members.name, members.epoch, members.generation, layer, ok, reason, evidence or {})
