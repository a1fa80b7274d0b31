"""One rearrangement in the background, as the worker does it: load, agree, and layer by layer to a decided commit."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from eplb_core.balancing.deliberation import Deliberation
from eplb_core.balancing.handover import UnderWay
from eplb_core.balancing.layer_moves import moves
from eplb_core.balancing.patience import Patience
from eplb_core.balancing.promise import Operation, Outcome
from eplb_core.balancing.vote_store import VoteStore
from eplb_core.control.store import StoreGone
from eplb_core.errors import EplbError, error_for
from eplb_core.errors.texts import describe
from eplb_core.voting.operations import Refusal
from eplb_core.voting.vote import all_agree
from eplb_core.wire.ballots import Ballot, Decision

if TYPE_CHECKING:
    from eplb_core.arrays import IntArray
    from eplb_core.balancing.core_access import CoreAccess
    from eplb_core.balancing.handover import Handover
    from eplb_core.balancing.progress import Progress
    from eplb_core.balancing.promise import PromiseBook
    from eplb_core.control.store import StoreClient
    from eplb_core.rearrange.background_moves import BackgroundMoves
    from eplb_core.voting.vote import Vote

logger = logging.getLogger("eplb_core")


class BackgroundRearrangement:
    """The worker's part in one rearrangement.

    Parameters
    ----------
    core : CoreAccess
        The communicator, used by this thread alone but for commits.
    book : PromiseBook
        Shared with the engine.
    handover : Handover
        Shared with the engine: the map, and what is not wanted any more.
    progress : Progress
        Is told what is done.
    """

    def __init__(
        self,
        core: CoreAccess,
        book: PromiseBook,
        handover: Handover,
        progress: Progress,
    ) -> None:
        self._core = core
        self._book = book
        self._handover = handover
        self._progress = progress
        self._for_engine: StoreClient | None = None
        """A connection of the engine's own, for what it may have to settle while this thread's is held."""
        self._committed_at: int | None = None  # S of the last layer decided

    def run(self, new_map: IntArray) -> None:
        """Bring all layers to a placement that every rank knows; collective.

        Raises
        ------
        EplbError
            It failed, on every rank; what is decided is still the engine's to commit. EPLB-T021: it was called off.
        """
        old_map = self._handover.map()
        self._progress.enter("agree")
        self._engine_client()  # opening one may wait for a name server: not while a promise is about to be made
        rearrangement = self._begin(old_map, new_map)
        under_way = self._handover.under_way = UnderWay(rearrangement, new_map)
        try:
            started_s = time.monotonic()
            for verb, layer in moves(rearrangement.layers, self._core.communicator.config.staging_layers):
                if verb == "await copies":
                    self._await_engine(layer)
                    self._go_on(rearrangement, layer)
                elif verb == "await slots":
                    self._await_slots(rearrangement, layer)
                else:
                    self._pace(old_map, new_map, rearrangement.layers, layer, started_s)
                    started_s = time.monotonic()
                    self._stage(under_way, layer)
            self._await_engine(None)
            if self._handover.stopping:
                return  # what is due is committed by whoever closes
            self._progress.enter("end")
            rearrangement.end()
        except BaseException as error:
            self._settle_promises(under_way, error)
            self._leave_decided_layers_to_the_engine()
            raise
        self._forget()

    def _go_on(self, rearrangement: BackgroundMoves, committed: int) -> None:
        """Give up between two layers when the rest is not wanted any more."""
        unwanted = self._handover.called_off
        if unwanted is not None:
            following = rearrangement.layers[rearrangement.layers.index(committed) + 1]
            rearrangement.give_up(following, unwanted)

    def _begin(self, old_map: IntArray, new_map: IntArray) -> BackgroundMoves:
        refusal = self._handover.called_off
        return self._core.begin(old_map, new_map, refusal)

    # --- a layer ------------------------------------------------------------------------------------------------------

    def _stage(self, under_way: UnderWay, layer: int) -> None:
        rearrangement, progress = under_way.rearrangement, self._progress
        progress.enter("stage", layer)
        deliberations: list[Deliberation] = []

        def voting(vote: Vote, ballot: Ballot) -> Decision:
            progress.enter("vote", layer)
            votes = VoteStore(
                vote, rearrangement.vote_beside(layer, "landed"), self._core.rank, self._core.members.client
            )
            under_way.votes[layer] = votes.over(self._engine_client())
            where = f"layer {layer}, phase vote"
            deliberation = Deliberation(
                self._core,
                self._book,
                layer,
                votes,
                partial(rearrangement.tally, layer),
                for_ready=partial(self._patience, self._committed_at, where),
                for_decision=partial(self._patience, None, where),
                giving_up=lambda: self._handover.called_off,
            )
            deliberations.append(deliberation)
            return deliberation.decide(ballot)

        rearrangement.stage_voting(layer, voting)
        (deliberation,) = deliberations
        outcome = deliberation.outcome
        if outcome is None or outcome.step is None:
            raise error_for("EPLB-T007", rank=self._core.rank, where=f"layer {layer}", reason="no outcome is known")
        progress.counter_offset = max(progress.counter_offset, deliberation.counter_offset)
        if deliberation.counter_offset:
            self._warn_of_offset(deliberation.counter_offset)
        self._committed_at = outcome.step
        # From here on the engine may commit it: the core has noted that it is decided.
        self._book.learn(layer, outcome)
        if self._book.take_unwanted(layer):  # what was due when the host dropped it, the engine discards
            rearrangement.discard(layer)

    def _warn_of_offset(self, offset: int) -> None:
        logger.warning(
            "The ranks' forward steps are %d more apart than their all-to-alls explain: step() is not called once per "
            "forward step on every rank, so layers are not committed between the same passes.",
            offset,
        )

    def _pace(
        self, old_map: IntArray, new_map: IntArray, layers: tuple[int, ...], layer: int, started_s: float
    ) -> None:
        """Do not let transfers follow each other faster than configured; all ranks wait alike."""
        limit_gbps = self._core.config.max_bandwidth_gbps
        place = layers.index(layer)
        if limit_gbps is None or place == 0:
            return
        before = layers[place - 1]
        nbytes = most_rows_received(old_map[before], new_map[before], self._core.world_size)
        until_s = started_s + nbytes * self._core.nbytes_of_expert(before) * 8e-9 / limit_gbps
        self._progress.enter("pace", layer)
        while time.monotonic() < until_s and self._handover.called_off is None:
            time.sleep(min(0.05, max(0.0, until_s - time.monotonic())))

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _await_engine(self, layer: int | None) -> None:
        """Wait until this rank's engine committed a layer, or all, as long as that takes; it may be idle."""
        self._progress.enter("engine", layer)
        while not self._handover.await_commits(layer):
            if self._handover.stopping:
                return
            if self._core.watch.cancelled() is not None:  # a member is gone: the next vote tells all
                return

    def _await_slots(self, rearrangement: BackgroundMoves, layer: int) -> None:
        """Wait until every rank's engine committed the layer before: nobody waits for rows of one that idles."""
        self._progress.enter("slots", layer)
        vote = rearrangement.vote_beside(layer, "slots")
        vote.cast(Ballot(True), all_agree(self._core.rank))
        patience = self._patience(self._committed_at, vote.where)

        def pause() -> Refusal | None:
            found = self._core.watch.look(vote)
            if found is not None:
                return found
            unwanted = self._handover.called_off
            if unwanted is not None:
                return Refusal(unwanted, fatal=False)
            worn_out = patience.worn_out(vote.missing)
            time.sleep(1e-3)
            return None if worn_out is None else Refusal(worn_out)

        vote.wait(pause)  # if it was aborted, the layer's own vote says why to all

    def _patience(self, step: int | None, where: str) -> Patience:
        return Patience(self._book, self._progress, step, self._core.timeout_s, where)

    def _settle_promises(self, under_way: UnderWay, error: BaseException) -> None:
        """Learn what stands of a layer whose vote was left by an exception: else the engine waits at it in vain."""
        reason = error_for("EPLB-T007", rank=self._core.rank, where="the load balancer", reason=describe(error))
        for layer in list(self._book.promised):
            votes = under_way.votes[layer].over(self._core.members.client)
            try:
                stands: Outcome = votes.execute(Operation("put", "decision", Outcome(None, self._core.rank, reason)))
            except (StoreGone, EplbError):
                return  # the engine asks with its own connection, and says so
            if stands.step is not None:
                under_way.rearrangement.accept(layer)
            self._book.learn(layer, stands)

    def _leave_decided_layers_to_the_engine(self) -> None:
        """Layers that were decided before a failure are committed at their step, by every rank's engine."""
        self._progress.enter("engine")
        while not self._handover.await_commits() and not self._handover.stopping:
            if self._core.watch.cancelled() is not None:
                return  # a member is gone: the rebuild commits them
        if not (self._book.due or self._book.promised):  # whose engine would have nothing to settle it by
            self._forget()

    def _engine_client(self) -> StoreClient:
        if self._for_engine is None:
            self._for_engine = self._core.open_client(self._core.timeout_s)
        return self._for_engine

    def _forget(self) -> None:
        self._handover.under_way = None
        self._book.forget()


def most_rows_received(old_row: IntArray, new_row: IntArray, world_size: int) -> int:
    """Return how many rows the rank with most of them receives in one layer."""
    return max(
        len(set(new.tolist()) - set(old.tolist()) - {-1})
        for old, new in zip(np.split(old_row, world_size), np.split(new_row, world_size), strict=True)
    )
