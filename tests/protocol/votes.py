"""Ranks of a walk that vote once; and what must hold whatever the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eplb_core.errors import EplbError, error_for
from eplb_core.voting.operations import Steps
from eplb_core.voting.vote import Vote, all_agree
from eplb_core.wire.ballots import Ballot, Decision, decode_ballot
from eplb_core.wire.envelope import MessageScope
from tests.protocol.actors import Actor, End, Local
from tests.protocol.ranks import NAME, TIMED_OUT
from tests.protocol.store import Contents
from tests.protocol.walk import State, Walk

NAMESPACE = "epoch"
FAILED = error_for("EPLB-M006", rank=0, reason="its transfer failed")
SCOPE = MessageScope(NAME, 0, 1, 7)


@dataclass
class Run:
    """A rank in a vote."""

    vote: Vote
    steps: Steps[Decision]


class Voter(Actor[int]):
    """A rank whose ballot says yes or no, or that fails before it has one. Its memory is the number of its process."""

    refusal = TIMED_OUT

    def __init__(self, rank: int, says: str, members: Sequence[int], kind: type[Vote] = Vote) -> None:
        self.rank = rank
        self.says = says
        self._members = members
        self._kind = kind

    def start(self, memory: int) -> Run:
        vote = self._kind(
            None, SCOPE.of(rank=self.rank), members=self._members, namespace=NAMESPACE, topic="5", where="layer 5"
        )
        return Run(vote, self._voting(vote))

    def _voting(self, vote: Vote) -> Steps[Decision]:
        if self.says == "fails":
            return (yield from vote.aborting(FAILED))
        yes = self.says == "yes"
        yield from vote.casting(Ballot(yes, None if yes else FAILED, cast_at_s=1.0), all_agree(self.rank))
        return (yield from vote.awaiting())

    def ended(self, memory: int, run: Run, result: object, late: bool) -> End[int]:
        if isinstance(result, Decision):
            return End("commit" if result.commit else "abort", memory, late)
        if not isinstance(result, EplbError):
            raise result
        return End(result.code, memory, late)

    def crashed(self, memory: int) -> End[int]:
        return End("dead", memory + 1)

    def life(self, memory: int) -> int:
        return memory

    def judge(self, run: Run, result: object, contents: Contents) -> str | None:
        if not isinstance(result, Decision) or not result.commit:
            return None
        for rank in self._members:
            value = contents.get(f"{NAMESPACE}/7/5/ballot/{rank}")
            if value is None:
                return f"rank {self.rank} obeys a commit without the ballot of rank {rank}"
            if not decode_ballot(SCOPE.of(rank=rank).unseal(value, "ballot", 1 << 20)).ok:
                return f"rank {self.rank} obeys a commit although rank {rank} refused"
        return None


def vote(says: Sequence[str], *, crashes: int = 0, kind: type[Vote] = Vote, contents: Contents | None = None) -> Walk:
    """Return the walk of a vote in which the ranks say this."""
    members = range(len(says))
    voters = [Voter(rank, each, members, kind) for rank, each in enumerate(says)]
    return Walk(voters, [1] * len(voters), contents or {}, crashes)


def outcomes(state: State) -> set[str]:
    """What those have learnt that have come to an end in life."""
    return {local.end.why for local in state[:-1] if local.end is not None and local.end.why != "dead"}


def all_know(state: State) -> bool:
    """Has every rank that lives learnt the decision?"""
    return all(local.end is not None for local in state[:-1])


def untroubled(state: State) -> bool:
    """Is nobody dead, and has nobody waited to its limit?"""
    return not any(_troubled(local) for local in state[:-1])


def _troubled(local: Local) -> bool:
    return local.late if local.end is None else local.end.why == "dead" or bool(local.end.detail)
