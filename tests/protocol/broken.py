"""The protocol with one rule taken out: what the rule is for shows in what the walks then find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eplb_core.errors import EplbError
from eplb_core.voting.meeting import Meeting
from eplb_core.voting.operations import Count, Get, Put, Steps
from eplb_core.voting.roll import Joining, Post, Roll, post_key
from eplb_core.voting.vote import Tally, Vote
from eplb_core.wire.ballots import Ballot, Decision, decode_decision, encode_ballot, encode_decision
from tests.protocol.ranks import Rules


class _CountedRoll(Roll):
    @property
    def namespace(self) -> str:
        return f"epoch-{self.epoch}"


class _CountedEpochs(Meeting):
    """There is no roll: every rank counts the epochs that it has called for, and goes to the one it comes to."""

    def attending(self, join: Any) -> Steps[tuple[Roll, Decision]]:
        yield Get((post_key(self.rank),))
        nonce = self.fresh()
        roll = _CountedRoll(dict.fromkeys(self.members, nonce), int(nonce))
        joining: Joining = join(roll)
        yield from joining.vote.casting(joining.ballot, joining.tally)
        decision = yield from joining.vote.awaiting()
        if decision.error is not None:
            raise decision.error
        return roll, decision


class _NeverVoid(Meeting):
    def _awaiting(self, vote: Vote, roll: Roll) -> Steps[Decision]:
        return vote.awaiting()


class _EntersAnyRoll(Meeting):
    def _entering(self, nonce: str) -> Steps[Roll]:
        while True:
            (value,) = yield Get((self._roll_key,))
            roll = self._roll(value)
            if roll is not None and self.rank in roll.members:
                return roll
            yield from self._pausing()


class _PublishesUsedNonces(Meeting):
    def _why_not_there(self, rank: int, post: Post | None, used: Mapping[int, str]) -> str | None:
        return super()._why_not_there(rank, post, {})


class _GathersAnyMembers(Meeting):
    def _why_not_there(self, rank: int, post: Post | None, used: Mapping[int, str]) -> str | None:
        return super()._why_not_there(rank, post and replace(post, members=self.members), used)


class _EntersAnyMembers(Meeting):
    def _roll(self, value: bytes | None) -> Roll | None:
        roll = super()._roll(value)
        if roll is None or self.rank not in roll.members:
            return roll
        return _OfAnyMembers(roll.nonces, roll.epoch, roll.refused_by)


class _OfAnyMembers(Roll):
    """Looks as if it were of those it is compared with."""

    @property
    def members(self) -> Any:
        return _Equal(sorted(self.nonces))


class _Equal(tuple[int, ...]):
    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return True


class _ComparesNoMembers(_GathersAnyMembers, _EntersAnyMembers):
    pass


class _Impatient(Meeting):
    def attending(self, join: Any) -> Steps[tuple[Roll, Decision]]:
        steps, answer = super().attending(join), None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration as done:
                return done.value
            if self.stalled is not None:
                raise self.stalled
            answer = yield operation


class _LooksForNobody(Meeting):
    def _looking_for_another(self, nonce: str | None = None) -> Steps[None]:
        yield Get((post_key(self.rank),))

    def _stay_this_rank(self, post: Post | None, nonce: str) -> None:
        pass


class _TakesItsPlaceBack(Meeting):
    def _looking_for_another(self, nonce: str | None = None) -> Steps[None]:
        return super()._looking_for_another()


class _HeedsTheDead(Meeting):
    def _heeding(self, posts: Mapping[int, Post | None]) -> Steps[tuple[int, EplbError] | None]:
        self.private = True
        return super()._heeding(posts)


class _NeverHeedsTheDead(Meeting):
    def _heeding(self, posts: Mapping[int, Post | None]) -> Steps[tuple[int, EplbError] | None]:
        self.private = False
        return super()._heeding(posts)


class _HeedsAgain(Meeting):
    def _heeding(self, posts: Mapping[int, Post | None]) -> Steps[tuple[int, EplbError] | None]:
        for rank, post in posts.items():
            if post is not None and post.refusal is not None:
                yield Put(self._read_key(post.nonce, self.rank), b"1")
                return rank, post.refusal
        return None


class _PassesNothingOn(Meeting):
    def _publish(self, roll: Roll) -> Put:
        return super()._publish(replace(roll, refused_by=None))


class _OneEpoch(Meeting):
    def _gathering(self, nonce: str) -> Steps[Roll]:
        roll = yield from super()._gathering(nonce)
        return replace(roll, epoch=1)

    def _publish(self, roll: Roll) -> Put:
        return super()._publish(replace(roll, epoch=1))


NO_ROLL = Rules(_CountedEpochs, nonce=lambda seat, life, number: str(number))
NONCE_OF_A_RANK = Rules(nonce=lambda seat, life, number: seat)
NONCE_OF_A_PROCESS = Rules(nonce=lambda seat, life, number: f"{seat}.{life}")
NEVER_VOID = Rules(_NeverVoid)
ENTERS_ANY_ROLL = Rules(_EntersAnyRoll)
PUBLISHES_USED_NONCES = Rules(_PublishesUsedNonces)
GATHERS_ANY_MEMBERS = Rules(_GathersAnyMembers)
ENTERS_ANY_MEMBERS = Rules(_EntersAnyMembers)
COMPARES_NO_MEMBERS = Rules(_ComparesNoMembers)
IMPATIENT = Rules(_Impatient)
LOOKS_FOR_NOBODY = Rules(_LooksForNobody)
TAKES_ITS_PLACE_BACK = Rules(_TakesItsPlaceBack)
HEEDS_THE_DEAD = Rules(_HeedsTheDead)
NEVER_HEEDS_THE_DEAD = Rules(_NeverHeedsTheDead)
HEEDS_AGAIN = Rules(_HeedsAgain)
PASSES_NOTHING_ON = Rules(_PassesNothingOn)
ONE_EPOCH = Rules(_OneEpoch)


class ObeysAnyCommit(Vote):
    """A commit is obeyed by ranks without a ballot."""

    def _obey(self, value: bytes) -> Decision:
        self.decision = decode_decision(self._scope.of(rank=0).unseal(value, "decision", 1 << 20))
        return self.decision


class Overwrites(Vote):
    """The decision is set, whatever stands there."""

    def putting(self, decision: Decision) -> Steps[Decision]:
        value = self._scope.of(rank=0).seal("decision", encode_decision(decision))
        yield Put(self.decision_key, value)
        return self._obey(value)


class CountsFirst(Vote):
    """A rank counts itself before its ballot is there."""

    def casting(self, ballot: Ballot, tally: Tally) -> Steps[None]:
        self.balloted = True
        count = yield Count(f"{self._prefix}/count")
        yield Put(self._ballot_key(self._scope.rank), self._scope.seal("ballot", encode_ballot(ballot)))
        if count == len(self._members):
            yield from self._tallying(tally)

    def _tallying(self, tally: Tally) -> Steps[None]:
        ballots = yield from self.reading()
        missing = EplbError("EPLB-M005", peer=0, problem="its ballot is missing") if len(ballots) < 3 else None
        yield from self.putting(Decision(False, self._scope.rank, missing) if missing else tally(ballots))


class CountsFirstAndTakesWhatIsThere(CountsFirst):
    """The same, and a missing ballot is none against."""

    def _tallying(self, tally: Tally) -> Steps[None]:
        ballots = yield from self.reading()
        yield from self.putting(tally(ballots))


class GivesUpAlone(Vote):
    """A rank that gives up does not put it where the others would find it."""

    def aborting(self, error: EplbError, **rest: Any) -> Steps[Decision]:
        (value,) = yield Get((self.decision_key,))
        return Decision(False, self._scope.rank, error) if value is None else self._obey(value)
