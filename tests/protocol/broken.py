"""The protocol with one rule taken out, for tests that show what the rule is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eplb_core.voting.meeting import Meeting, Post, Roll, post_key
from eplb_core.voting.operations import Get, Put, Steps
from eplb_core.voting.vote import Vote
from eplb_core.wire.ballots import Decision, decode_decision


class _NoVoid(Meeting):
    """A roll stays good when a member has come anew."""

    def _awaiting(self, vote: Vote, roll: Roll) -> Steps[Decision]:
        return vote.awaiting()


class _AnyRoll(Meeting):
    """A rank enters every roll of its members."""

    def _entering(self, nonce: str) -> Steps[Roll]:
        while True:
            values = yield Get((self._roll_key, post_key(self.members[0])))
            roll = self._roll(values[0])
            if roll is not None and roll.members == self.members:
                return roll
            yield from self._pausing()


class _UsedNonces(Meeting):
    """The lowest member puts nonces of its last roll into the next."""

    def _why_not_there(self, rank: int, post: Post | None, used: Mapping[int, str]) -> str | None:
        return super()._why_not_there(rank, post, {})


class _Impatient(Meeting):
    """The time-out of one ends the attempt of all."""

    def attending(self, join: Any) -> Steps[tuple[Roll, Decision]]:
        steps = super().attending(join)
        answer = None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration as done:
                return done.value
            if self.stalled is not None:
                raise self.stalled
            answer = yield operation


class _AnyPlace(Meeting):
    """A rank does not look whether another process is the same."""

    def _looking_for_another(self) -> Steps[None]:
        yield Get((post_key(self.rank),))

    def _stay_this_rank(self, post: Post | None, nonce: str) -> None:
        pass


class _AnyMembers(Meeting):
    """The lowest member takes whoever comes, whomever they were told to meet."""

    def _why_not_there(self, rank: int, post: Post | None, used: Mapping[int, str]) -> str | None:
        if post is not None:
            post = Post(post.nonce, self.members, post.epoch, post.process, post.refusal)
        return super()._why_not_there(rank, post, used)


class _HeedsTheDead(Meeting):
    """A refusal counts whoever posted it."""

    def _heeding(self, posts: Mapping[int, Post | None]) -> Steps[None]:
        for post in posts.values():
            if post is not None and post.refusal is not None:
                yield Put(self._read_key(post.nonce, self.rank), b"1")
                raise post.refusal


class _NoEpochs(Meeting):
    """Every roll has the same epoch number."""

    def _gathering(self, nonce: str) -> Steps[Roll]:
        steps = super()._gathering(nonce)
        answer = None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration as done:
                return Roll(done.value.nonces, 1)
            if isinstance(operation, Put) and operation.key == self._roll_key:
                roll = Roll(self._roll(operation.value).nonces, 1)
                operation = Put(self._roll_key, self._scope(self.members[0]).seal("roll", roll.to_bytes()))
            answer = yield operation


class _ObeysAnything(Vote):
    """A commit is obeyed whether or not this rank has a ballot."""

    def _obey(self, value: bytes) -> Decision:
        self.decision = decode_decision(self._scope.of(rank=0).unseal(value, "decision", 1 << 20))
        return self.decision
