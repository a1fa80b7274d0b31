"""One rearrangement: layer by layer transfer, wait, vote and commit, all members in step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from eplb_core.backend import Event, TransferPlan
from eplb_core.control.store import StoreGone
from eplb_core.errors import CommitError, PlanError, StoreLostError, error_for
from eplb_core.memory.commit import NOTHING, CommitCopies, commit_copies
from eplb_core.plan.rank_plan import RankShares
from eplb_core.voting.vote import Vote
from eplb_core.wire.ballots import Ballot, Decision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eplb_core.plan import PlacementPlan
    from eplb_core.rearrange.epoch import Session
    from eplb_core.rearrange.state import Ledger

_DRAIN_LIMIT_S = 5.0


@dataclass(eq=False)
class StagedLayer:
    """A layer between the start of its transfer and its commit."""

    number: int
    slot: int
    vote: Vote
    copies: CommitCopies = NOTHING
    handle: object = None
    failure: Exception | None = None
    landed: bool = False
    phase: str = "transfer"

    @property
    def where(self) -> str:
        """Where it is, for texts."""
        return f"layer {self.number}, phase {self.phase}"


class Generation:
    """An agreed rearrangement. `Communicator.begin` makes it; every rank makes the same calls in the same order.

    Parameters
    ----------
    session : Session
        Connected and agreed.
    plan : PlacementPlan
        The moves of all layers.
    ledger : Ledger
        Where the outcome of each layer is kept.

    Attributes
    ----------
    layers : tuple of int
        Ascending: every layer that moves anything on any rank.
    """

    def __init__(self, session: Session, plan: PlacementPlan, ledger: Ledger) -> None:
        self.layers = plan.layers
        self._session = session
        self._council = session.council
        self._plan = plan
        self._ledger = ledger
        config = session.assembly.config
        self._slots = config.staging_layers
        work_out = partial(
            plan.shares,
            rank=session.rank,
            landing_layout=session.backend.landing_layout,
            coalesce_nbytes=session.coalesce_nbytes,
            batched=session.assembly.info.batched,
            max_ops_per_batch=config.max_ops_per_batch,
            migration_batching=config.enable_migration_batching,
        )
        self._shares = RankShares(plan, session.assembly.layout.geometries, work_out)
        self._next_start = 0
        self._next_stage = 0
        self._started: dict[int, StagedLayer] = {}
        self._uncommitted: dict[int, StagedLayer] = {}
        self._votes: list[Vote] = []

    # --- the host's calls --------------------------------------------------------------------------------------------

    def stage(self, layer: int) -> None:
        """Bring one layer's rows into landing memory on every rank and decide about it; blocks.

        With two staging layers it also starts the next layer's transfer, which then runs beside this layer's vote.

        Parameters
        ----------
        layer : int
            The next of `layers`; every rank stages in that order.

        Raises
        ------
        PlanError
            Out of order, or ``staging_layers`` layers are staged and uncommitted (EPLB-P004).
        TransferError
            The layer was aborted: nobody commits it, and all live ranks raise the same error. Layers decided before it
            are committed when this leaves, and ``.report`` says which.
        """
        with self._ledger.reporting():
            self._check_stage(layer)
            staged = self._start_up_to(layer)
            if len(self._uncommitted) + 1 < self._slots:
                self._start_one()
            self._land(staged)
            self._decide(staged)

    def commit(self, layer: int) -> None:
        """Copy a staged layer's rows into the live rows of this rank; local, on the caller's current stream.

        Raises
        ------
        PlanError
            The layer is not staged (EPLB-P004).
        CommitError
            A copy failed: this rank's weights are invalid, and its peers see it as gone.
        """
        with self._ledger.reporting():
            self._ledger.check_open()
            staged = self._uncommitted.get(layer)
            if staged is None:
                raise PlanError("EPLB-P004", problem=f"commit({layer}) without stage({layer})")
            self._commit(staged)

    def end(self) -> None:
        """End the generation, after every layer is committed.

        Raises
        ------
        PlanError
            Layers are left (EPLB-P004).
        """
        with self._ledger.reporting():
            self._ledger.check_open()
            left = [*self._uncommitted, *self.layers[self._next_stage :]]
            if left:
                raise PlanError("EPLB-P004", problem=f"end() before layer(s) {left} were staged and committed")
            self._council.forget_later(self._votes)
            self._ledger.ended(self)

    def run(self) -> None:
        """Do all layers: what `Communicator.rearrange` is made of.

        The copies of a layer's commit, and the start of the transfer that takes its slot, run while the next layer's
        vote is under way.
        """
        with self._ledger.reporting():
            before: StagedLayer | None = None
            for layer in self.layers:
                staged = self._start_up_to(layer)
                if before is None and self._slots > 1:
                    self._start_one()
                self._land(staged)
                if before is not None:
                    self._commit(before)
                    self._start_one()
                self._decide(staged)
                if self._slots == 1:
                    self._commit(staged)
                else:
                    before = staged
            if before is not None:
                self._commit(before)
            self.end()

    # --- steps of a layer --------------------------------------------------------------------------------------------

    def _check_stage(self, layer: int) -> None:
        self._ledger.check_usable()
        if self._next_stage >= len(self.layers):
            raise PlanError("EPLB-P004", problem=f"stage({layer}) after every layer was staged")
        expected = self.layers[self._next_stage]
        if layer != expected:
            raise PlanError("EPLB-P004", problem=f"stage({layer}) where layer {expected} is next")
        if len(self._uncommitted) >= self._slots:
            problem = f"stage({layer}) while layer(s) {list(self._uncommitted)} are staged and uncommitted"
            raise PlanError("EPLB-P004", problem=problem)

    def _start_up_to(self, layer: int) -> StagedLayer:
        if layer not in self._started:
            self._start_one()
        return self._started[layer]

    def _start_one(self) -> None:
        """Start the next layer's transfer, if there is one; a failure is kept for its own vote."""
        if self._next_start >= len(self.layers):
            return
        layer = self.layers[self._next_start]
        vote = self._council.vote(str(layer), f"layer {layer}, phase vote")
        staged = StagedLayer(layer, self._next_start % self._slots, vote)
        self._next_start += 1
        self._started[layer] = staged
        self._votes.append(vote)
        with self._ledger.phase("transfer"):
            try:
                self._transfer(staged)
            except Exception as error:
                staged.failure = error

    def _transfer(self, staged: StagedLayer) -> None:
        session, layer = self._session, staged.number
        # The copies out of this slot may still run on the device; they end before anything lands in it again.
        session.assembly.streams.settle(self._ledger.take_slot_events(staged.slot))
        share = self._shares.of(layer)
        plan = TransferPlan(self._council.generation, self._ledger.next_sequence(), layer, staged.slot, *share)
        staged.copies = commit_copies(
            self._ledger.row_views(layer),
            session.assembly.layout.geometries[layer],
            self._plan.commit_plan(layer, session.rank),
            plan.receives,
            session.landing,
            staged.slot,
        )
        staged.handle = session.hooks.transfer(plan)

    def _land(self, staged: StagedLayer) -> None:
        """Wait for a layer's rows and cast the ballot."""
        session = self._session
        self._council.attend(staged.vote)
        with self._guard(staged):
            if staged.failure is not None:
                raise staged.failure
            staged.phase = "wait"
            with self._ledger.phase("wait"):
                receipt = session.hooks.wait(staged.handle, session.timeout_s)
            staged.landed = True
            staged.phase = "vote"
            self._ledger.count_bytes(receipt.nbytes_received, receipt.nbytes_sent, staged.copies.nbytes_local)
            with self._ledger.phase("vote"):
                evidence: Mapping[str, bytes] = {}
                if session.hooks.observed:
                    evidence = session.hooks.observe(self._event("vote", staged.number))
                staged.vote.cast(Ballot(True, evidence=evidence), lambda ballots: self._tally(staged, ballots))

    def _decide(self, staged: StagedLayer) -> None:
        """Wait for a layer's decision and obey it."""
        with self._guard(staged), self._ledger.phase("vote"):
            decision = self._council.decide(staged.vote)
        if not decision.commit:
            self._abandon(staged.number, decision, None)
        self._accept(staged)

    def _accept(self, staged: StagedLayer) -> None:
        """Take note that a layer is decided: from here on it must be committed, whatever else happens."""
        del self._started[staged.number]
        self._uncommitted[staged.number] = staged
        self._next_stage += 1
        self._ledger.decided(staged.number)

    def finish_decided(self) -> None:
        """Commit the layers that are decided and not yet committed, as a failure must before it leaves."""
        for staged in list(self._uncommitted.values()):
            self._commit(staged)

    def _commit(self, staged: StagedLayer) -> None:
        session = self._session
        with self._ledger.phase("commit"):
            try:
                staged.copies.run()
                self._ledger.slot_events[staged.slot] = session.assembly.streams.mark()
            except BaseException as error:  # Ctrl-C in the middle of a copy leaves the layer torn as well
                reason = f"{type(error).__name__}: {error}"
                dead = CommitError("EPLB-T006", layer=staged.number, rank=session.rank, reason=reason)
                self._council.vanish()
                self._uncommitted.clear()  # copies that came half way cannot be made again
                self._ledger.invalid = dead
                self._ledger.poison(dead, f"layer {staged.number}, phase commit")
                raise dead from error
            del self._uncommitted[staged.number]
            session.hooks.tell(self._event("commit", staged.number))

    def _tally(self, staged: StagedLayer, ballots: Mapping[int, Ballot]) -> Decision:
        session = self._session
        if session.hooks.observed:
            shown: dict[str, dict[int, bytes]] = {}
            for rank, ballot in ballots.items():
                for name, value in ballot.evidence.items():
                    shown.setdefault(name, {})[rank] = value
            try:
                session.hooks.observe(self._event("tally", staged.number, evidence=shown))
            except Exception as error:
                named, fatal = self._council.diagnose(error, staged.vote, staged.vote.where)
                return Decision(False, session.rank, named, fatal)
        return self._council.tally(ballots)

    # --- failures ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _guard(self, staged: StagedLayer) -> Iterator[None]:
        """Turn whatever a step raises into the abort of its layer on every rank."""
        try:
            yield
        except StoreGone as gone:
            self._store_lost(gone, staged.where)
        except Exception as error:
            self._fail(staged, error, staged.where)
        except BaseException as interrupt:  # Ctrl-C: the members must not wait for this rank
            reason = type(interrupt).__name__
            stopped = error_for("EPLB-T007", rank=self._session.rank, where=staged.where, reason=reason)
            with suppress(StoreGone):  # then the others find out for themselves
                if staged.vote.abort(stopped, fatal=True).commit:
                    self._accept(staged)
            self._ledger.poison(stopped, staged.where, undrained=not self._drain(reason))
            self.finish_decided()
            raise

    def _fail(self, staged: StagedLayer, error: Exception, where: str) -> NoReturn:
        try:
            named, fatal = self._council.diagnose(error, staged.vote, where)
            decision = staged.vote.abort(named, fatal=fatal)
            layer = staged.number
            if decision.commit:
                # Every ballot was in before, this rank's too: the layer holds. What failed since stops the next one.
                self._accept(staged)
                if self._next_stage == len(self.layers):
                    self.finish_decided()
                    self._ledger.poison(named, where)
                    raise named from error
                layer = self.layers[self._next_stage]
                decision = self._council.vote(str(layer), f"layer {layer}, phase vote").abort(named, fatal=fatal)
        except StoreGone as gone:
            self._store_lost(gone, where)
        self._abandon(layer, decision, error)

    def _abandon(self, layer: int, decision: Decision, cause: Exception | None) -> NoReturn:
        """Leave the generation: drain what is in flight, finish what was decided, and raise the common error."""
        session = self._session
        reason = str(decision.error or "no reason given")
        drained = self._drain(reason)
        where = f"layer {layer}, generation {self._council.generation}"
        error = decision.error or error_for("EPLB-T007", rank=decision.by, where=where, reason=reason)
        self.finish_decided()
        usable = False
        try:
            usable = not decision.fatal and self._all_drained(layer, drained)
        except StoreGone:
            usable = False
        if not usable:
            self._ledger.poison(error, where, undrained=not drained)
        self._council.forget_later(self._votes)
        self._ledger.ended(self)
        session.hooks.tell(self._event("abort", layer, ok=False, reason=reason))
        raise error from cause

    def _drain(self, reason: str) -> bool:
        drained = True
        for staged in self._started.values():
            if staged.failure is not None:
                drained = False  # nobody knows how far it came
            elif not staged.landed:
                try:
                    drained = bool(self._session.backend.abort(staged.handle, reason)) and drained
                except Exception as error:
                    self._ledger.note(f"abort of layer {staged.number} raised {error!r}")
                    drained = False
        return drained

    def _all_drained(self, layer: int, drained: bool) -> bool:
        vote = self._council.vote(f"{layer}/drain", f"layer {layer}, phase drain")
        self._votes.append(vote)
        self._council.attend(vote)
        vote.cast(Ballot(drained), self._council.tally)
        limit_s = min(_DRAIN_LIMIT_S, self._session.timeout_s)
        return self._council.decide(vote, timeout_s=limit_s, pump=self._session.backend.progress).commit

    def _store_lost(self, gone: StoreGone, where: str) -> NoReturn:
        doubtful = [s for s in self._started.values() if s.vote.balloted and s.vote.decision is None]
        drained = self._drain("the store is lost")
        self.finish_decided()
        dead = ", ".join(f"rank {rank}" for rank in self._council.dead)
        detail = f"Gone: {dead}." if dead else ""
        layers = [staged.number for staged in doubtful] or "none"
        error = StoreLostError("EPLB-T005", where=where, problem=str(gone), layers=layers, detail=detail)
        self._ledger.poison(error, where, undrained=not drained, doubtful=doubtful)
        self._ledger.ended(self)
        raise error from gone

    def _event(self, kind: Any, layer: int, ok: bool = True, reason: str = "", evidence: Any = None) -> Event:
        session = self._session
        return Event(
            kind, session.assembly.name, session.epoch, self._council.generation, layer, ok, reason, evidence or {}
        )
