"""How a worker decides about a landed layer: the promise protocol in the place of the core's own vote."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from eplb_core.balancing.layer_vote import LayerVote
from eplb_core.balancing.promise import Outcome
from eplb_core.balancing.vote_store import Landed, VoteStore
from eplb_core.wire.ballots import Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eplb_core.balancing.core_access import CoreAccess
    from eplb_core.balancing.patience import Patience
    from eplb_core.balancing.promise import PromiseBook
    from eplb_core.errors import EplbError
    from eplb_core.voting.operations import Refusal
    from eplb_core.wire.ballots import Ballot

RUN_AHEAD = 2
"""Steps by which a host's engine may be ahead of its device, and so of the other engines, beyond the one of a step."""

_LONGEST_PAUSE_S = 1e-3

Tally = Callable[[Mapping[int, "Ballot"]], Decision]


class BackgroundVote(LayerVote):
    """A `LayerVote` whose landed ballots carry what the core and its observers say, and the engine's step.

    Parameters
    ----------
    book, layer, rank, members, landed
        See `LayerVote`.
    tally : callable
        Looks at the landed ballots of all.

    Attributes
    ----------
    counter_offset : int
        By how many steps more than can be explained the last rank to land was ahead of the first to promise. Landing
        comes before promising, so engines that count the same passes cannot be that far apart; a small offset hides.
    """

    def __init__(
        self,
        book: PromiseBook,
        layer: int,
        rank: int,
        members: Sequence[int],
        landed: Landed,
        tally: Tally,
    ) -> None:
        super().__init__(book, layer, rank, members, landed)
        self.counter_offset = 0
        self._tally_landed = tally
        self._latest = landed.step

    def refusal(self, ballots: Mapping[int, Landed]) -> Outcome | None:
        missing = super().refusal(ballots)
        if missing is not None:
            return missing
        self._latest = max(landed.step for landed in ballots.values())
        decision = self._tally_landed({rank: landed.ballot for rank, landed in ballots.items()})
        return None if decision.commit else Outcome(None, decision.by, decision.error, decision.fatal)

    def ready_value(self) -> int:
        return self._latest

    def note_ready(self, value: Outcome) -> None:
        self._latest = value.step or 0

    def note_promises(self, promises: Mapping[int, int]) -> None:
        slowest = min(promises.values()) - self.book.margin
        self.counter_offset = max(0, self._latest - slowest - 1 - RUN_AHEAD)


class Deliberation:
    """Decides about one landed layer; what `BackgroundMoves.stage_voting` takes.

    Parameters
    ----------
    core : CoreAccess
        The communicator.
    book : PromiseBook
        Shared with the engine.
    layer : int
        Number of the layer that has landed.
    votes : VoteStore
        Its keys, over the worker's connection.
    tally : callable
        See `BackgroundVote`.
    for_ready, for_decision : callable
        Make the `Patience` of the two waits.
    giving_up : callable
        Says why this rank does not want the layer any more, if so.

    Attributes
    ----------
    outcome : Outcome or None
        What was decided, once it is known here.
    """

    def __init__(
        self,
        core: CoreAccess,
        book: PromiseBook,
        layer: int,
        votes: VoteStore,
        tally: Tally,
        *,
        for_ready: Callable[[], Patience],
        for_decision: Callable[[], Patience],
        giving_up: Callable[[], EplbError | None],
    ) -> None:
        self._core = core
        self._book = book
        self._layer = layer
        self._votes = votes
        self._tally = tally
        self._waits = {"ready": for_ready, "decision": for_decision}
        self._giving_up = giving_up
        self.counter_offset = 0
        self.outcome: Outcome | None = None

    def decide(self, ballot: Ballot) -> Decision:
        """Take part in the vote until the outcome is known here; a commit is noted in the book by the caller."""
        members = self._core.members
        landed = Landed(self._book.step, ballot)
        vote = BackgroundVote(self._book, self._layer, members.rank, members.members, landed, self._tally)
        patience: dict[str, Patience] = {}
        pause_s = 20e-6
        while True:
            operation = vote.operation()
            if operation is None or (vote.phase == "learn" and vote.outcome is not None and vote.outcome.step):
                break
            if operation.verb != "pause":
                vote.take(None if operation.verb == "book" else self._votes.execute(operation))
                continue
            waits = patience.setdefault(operation.topic, self._waits[operation.topic]())
            refusal = self._refusal(operation.topic, waits)
            if refusal is not None:
                vote.fail(refusal[0], fatal=refusal[1])
                continue
            if members.pump is not None:
                members.pump()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
            vote.take(None)
        self.counter_offset = vote.counter_offset
        self.outcome = vote.outcome
        return self._decision(vote.outcome)

    def _refusal(self, topic: str, patience: Patience) -> tuple[EplbError | None, bool] | None:
        found: Refusal | None = self._core.watch.look(self._votes.vote)
        if found is not None:
            return found.error, found.fatal
        unwanted = self._giving_up()
        if unwanted is not None:
            return unwanted, False
        awaited = self._votes.landed if topic == "ready" else self._votes.vote
        worn_out = patience.worn_out(awaited.missing)
        return None if worn_out is None else (worn_out, True)

    @staticmethod
    def _decision(outcome: Any) -> Decision:
        content = {} if outcome.step is None else {"step": outcome.step}
        return Decision(outcome.step is not None, outcome.by, outcome.error, outcome.fatal, content)
