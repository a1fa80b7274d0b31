"""The operations of the promise protocol on a real store: a layer's own vote, and one on its having landed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from eplb_core.balancing.promise import Operation, Outcome
from eplb_core.voting.operations import Steps, perform
from eplb_core.wire.ballots import Ballot, Decision

if TYPE_CHECKING:
    from eplb_core.control.store import StoreClient
    from eplb_core.voting.vote import Vote

R = TypeVar("R")


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
    client : StoreClient
        The connection of the thread.
    """

    def __init__(self, vote: Vote, landed: Vote, rank: int, client: StoreClient) -> None:
        self.vote = vote
        self.landed = landed
        self._rank = rank
        self._client = client

    def over(self, client: StoreClient) -> VoteStore:
        """Return the same over a connection of another thread's own."""
        return VoteStore(self.vote, self.landed, self._rank, client)

    def execute(self, operation: Operation) -> Any:
        """Do one operation and return its result."""
        verb, topic, value = operation
        vote = self.landed if topic in ("landed", "ready") else self.vote
        if verb == "set" and topic == "ready":
            self._perform(vote.putting(Decision(True, self._rank, content={"step": value})))
        elif verb == "set":
            self._perform(vote.balloting(_ballot(value)))
        elif verb == "add":
            return self._perform(vote.counting())
        elif verb == "read all":
            return _read(topic, self._perform(vote.reading()))
        elif verb == "read":
            return _known(self._perform(vote.polling()))
        elif verb == "put":
            return _known(self._perform(vote.putting(_decision(value))))
        return None

    def _perform(self, steps: Steps[R]) -> R:
        return perform(steps, self._client)


def _ballot(value: Any) -> Ballot:
    if isinstance(value, Landed):
        return Ballot(True, content={"step": value.step}, evidence=value.ballot.evidence)
    return Ballot(True, content={"promise": value})


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
