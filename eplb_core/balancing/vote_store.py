"""The operations of the promise protocol on a real store: a layer's own vote, and one on its having landed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eplb_core.balancing.promise import Operation, Outcome
from eplb_core.voting.operations import perform
from eplb_core.wire.ballots import Ballot, Decision, encode_ballot

if TYPE_CHECKING:
    from eplb_core.control.store import StoreClient
    from eplb_core.voting.vote import Vote


@dataclass(frozen=True)
class Landed:
    """A landed ballot.

    Parameters
    ----------
    step : int
        At which the engine was.
    ballot : Ballot
        What the core and its observers say of the rows.
    """

    step: int
    ballot: Ballot


class VoteStore:
    """One rank's access to the keys of one layer, for one thread.

    Both halves are votes of the core's, so their messages are sealed as all are, and their keys go the same way.

    Parameters
    ----------
    vote : Vote
        On the layer: its ballots are the promises, its decision the outcome, which everyone who waits for rows sees.
    landed : Vote
        Its ballots are the landed ones, its commit is "ready".
    rank : int
        This one.
    """

    def __init__(self, vote: Vote, landed: Vote, rank: int) -> None:
        self.vote = vote
        self.landed = landed
        self._rank = rank

    def over(self, client: StoreClient) -> VoteStore:
        """Return the same over a connection of another thread's own."""
        vote, landed = copy.copy(self.vote), copy.copy(self.landed)
        vote._client = landed._client = client
        return VoteStore(vote, landed, self._rank)

    def execute(self, operation: Operation) -> Any:
        """Do one operation and return its result."""
        verb, topic, value = operation
        vote = self.landed if topic in ("landed", "ready") else self.vote
        if verb == "set" and topic == "ready":
            vote.balloted = True
            _put(vote, Decision(True, self._rank, content={"step": value}))
        elif verb == "set":
            ballot = Ballot(True, content={"promise": value})
            if isinstance(value, Landed):
                ballot = Ballot(True, content={"step": value.step}, evidence=value.ballot.evidence)
            vote.balloted = True  # before the store has it: one that loses the store here is in doubt
            vote._client.set(vote._ballot_key(self._rank), vote._scope.seal("ballot", encode_ballot(ballot)))
        elif verb == "add":
            return vote._client.add(f"{vote._prefix}/count")
        elif verb == "read all":
            return _read(topic, vote.ballots())
        elif verb == "read":
            return _known(vote.poll())
        elif verb == "put":
            return _known(_put(vote, _decision(value)))
        return None


def _put(vote: Vote, decision: Decision) -> Decision:
    return perform(vote._putting(decision), vote._client)


def _read(topic: str, ballots: Mapping[int, Ballot]) -> Mapping[int, Any]:
    """Leave out what is damaged: a layer is not committed on less than all ballots."""
    whole = {rank: ballot for rank, ballot in ballots.items() if ballot.ok}
    if topic == "promise":
        return {rank: int(ballot.content["promise"]) for rank, ballot in whole.items()}
    return {rank: Landed(int(ballot.content["step"]), ballot) for rank, ballot in whole.items()}


def _decision(outcome: Outcome) -> Decision:
    content = {} if outcome.step is None else {"step": outcome.step}
    return Decision(outcome.step is not None, outcome.by, outcome.error, outcome.fatal, content)


def _known(decision: Decision | None) -> Outcome | None:
    if decision is None:
        return None
    return Outcome(
        int(decision.content["step"]) if decision.commit else None, decision.by, decision.error, decision.fatal
    )
