"""The meeting that begins every epoch: who takes part, by a roll of nonces that were never used before.

Keys that an earlier run, or an earlier attempt, left in the store must never be taken for a live rank's: jobs are
restarted on a store that outlives them, and ranks that were left out come back. So nothing here is counted; each
attempt posts a fresh nonce.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eplb_core.control.process import ProcessIdentity
from eplb_core.control.store import StoreClient
from eplb_core.errors import EplbError, MetadataError, StalledError, error_for
from eplb_core.voting.operations import Get, Pause, Put, Refusal, Steps
from eplb_core.voting.roll import Joining, Post, Roll, post_key
from eplb_core.voting.vote import Vote
from eplb_core.wire.ballots import Decision
from eplb_core.wire.envelope import MessageScope

_LIMIT_NBYTES = 1 << 20
VOID = "void"
"""Key in the content of a decision: the roll is void, and its members meet again."""


@dataclass(eq=False)
class Meeting:
    """One rank's part in a meeting.

    Parameters
    ----------
    name : str
        Name of the communicator.
    rank : int
        Number of this rank.
    members : tuple of int
        Ranks to meet, ascending, this rank among them.
    epoch : int
        The last epoch this rank took part in.
    process : ProcessIdentity
        Identity of this process.
    private : bool
        Was the store made for this group? Then nothing in it is older than the group.
    fresh : callable
        Makes a nonce.

    Notes
    -----
    The lowest member gathers the posts and publishes the roll. A rank enters only a roll that holds the nonce of its
    present post, and votes on it in the namespace that follows from all nonces. A roll is void once one of its nonces
    has been replaced: a member that sees this aborts the vote, and all meet again, each until its own limit.
    """

    name: str
    rank: int
    members: tuple[int, ...]
    epoch: int
    process: ProcessIdentity
    private: bool = False
    fresh: Callable[[], str] = field(default=lambda: secrets.token_hex(16))
    waiting_for: dict[int, str] = field(default_factory=dict, init=False)
    """Members that have not come yet, and what is known of them."""
    stalled: EplbError | None = field(default=None, init=False)
    """Time-out error of another member that aborted the last roll."""

    # --- the protocol ------------------------------------------------------------------------------------------------

    def attending(self, join: Callable[[Roll], Joining]) -> Steps[tuple[Roll, Decision]]:
        """Meet; steps that end with a roll on which every member has voted, and the decision.

        Parameters
        ----------
        join : callable
            Maps a roll that holds this rank to this rank's vote on it.

        Raises
        ------
        EplbError
            A member refuses or does not fit, or the limit is over (raised by the pause).
        TransferError
            Another process is this rank (EPLB-T015).
        """
        nonce = None
        while True:
            yield from self._looking_for_another(nonce)
            nonce = self.fresh()
            yield self._put(Post(nonce, self.members, self.epoch, self.process))
            roll = yield from (self._gathering(nonce) if self.rank == self.members[0] else self._entering(nonce))
            joining = join(roll)
            yield from joining.vote.casting(joining.ballot, joining.tally)
            decision = yield from self._awaiting(joining.vote, roll)
            if decision.commit:
                return roll, decision
            error = decision.error or error_for("EPLB-M006", rank=decision.by, reason="no reason given")
            if isinstance(error, StalledError) and decision.by != self.rank:
                self.stalled = error
            elif not decision.content.get(VOID):
                raise error

    def refusing(self, error: EplbError) -> Steps[None]:
        """Tell the others why this rank cannot take part; wait until all have read it or the pause ends the wait."""
        yield from self._looking_for_another()
        nonce = self.fresh()
        yield self._put(Post(nonce, self.members, self.epoch, self.process, error))
        others = [rank for rank in self.members if rank != self.rank]
        marks = [self._read_key(nonce, rank) for rank in others]
        while True:
            *read, roll, post = yield Get((*marks, self._roll_key, post_key(self.members[0])))
            if all(read):
                return
            # Of several refusals one is read; the other writers stop when they read it, for nobody will read theirs.
            if self.rank != self.members[0] and (yield from self._hearing(roll, post)) is not None:
                return
            if (yield Pause()) is not None:
                return

    def _gathering(self, nonce: str) -> Steps[Roll]:
        """Steps of the lowest member: gather the posts, publish the roll."""
        while True:
            values = yield Get((self._roll_key, *(post_key(rank) for rank in self.members)))
            known = self._roll(values[0])
            posts = dict(zip(self.members, map(self._post, self.members, values[1:]), strict=True))
            yield from self._staying_this_rank(posts[self.rank], nonce)
            heard = yield from self._heeding(posts)
            if heard is not None:
                yield self._publish(replace(known or Roll({}, 0), refused_by=heard[0]))
                raise heard[1]
            used = known.nonces if known is not None else {}
            self.waiting_for = {
                rank: why for rank, post in posts.items() if (why := self._why_not_there(rank, post, used)) is not None
            }
            if not self.waiting_for:
                there = {rank: post for rank, post in posts.items() if post is not None}
                epoch = 1 + max(known.epoch if known else 0, *(post.epoch for post in there.values()))
                roll = Roll({rank: post.nonce for rank, post in there.items()}, epoch)
                yield self._publish(roll)
                return roll
            yield from self._pausing()

    def _entering(self, nonce: str) -> Steps[Roll]:
        """Steps of every other member: wait for a roll that holds this attempt's nonce."""
        leader = self.members[0]
        while True:
            values = yield Get((self._roll_key, post_key(self.rank), post_key(leader)))
            yield from self._staying_this_rank(self._post(self.rank, values[1]), nonce)
            heard = yield from self._hearing(values[0], values[2])
            if heard is not None:
                raise heard[1]
            roll = self._roll(values[0])
            if roll is not None and roll.members == self.members and roll.nonces[self.rank] == nonce:
                self.waiting_for = {}
                return roll
            post = self._post(leader, values[2])
            why = self._why_not_there(leader, post, roll.nonces if roll is not None else {})
            self.waiting_for = {leader: why or "and its roll of all members"}
            yield from self._pausing()

    def _awaiting(self, vote: Vote, roll: Roll) -> Steps[Decision]:
        """Steps from the ballot to the decision; a roll of which a nonce was replaced is aborted."""
        # The lowest member reads all posts, the others only its post: if each read all, a meeting would cost N x N.
        seen = roll.members if self.rank == roll.members[0] else (roll.members[0], self.rank)
        while True:
            decision = yield from vote.polling()
            if decision is not None:
                return decision
            posts = yield Get(tuple(post_key(rank) for rank in seen))
            for rank, value in zip(seen, posts, strict=True):
                post = self._post(rank, value)
                if post is None or post.nonce != roll.nonces[rank]:
                    error = error_for("EPLB-M006", rank=rank, reason="it came anew while the others were meeting")
                    return (yield from vote.aborting(error, content={VOID: True}))
            refusal: Refusal | None = yield Pause()
            if refusal is not None:
                self.waiting_for = {}
                return (yield from vote.aborting(refusal.error, fatal=refusal.fatal))

    def _pausing(self) -> Steps[None]:
        refusal: Refusal | None = yield Pause()
        if refusal is not None:
            raise refusal.error

    def _looking_for_another(self, nonce: str | None = None) -> Steps[None]:
        """Steps that check that no other process is this rank; `nonce` is what this attempt has posted, or None."""
        (value,) = yield Get((post_key(self.rank),))
        post = self._post(self.rank, value)
        if post is None or post.process == self.process:
            return
        there = post.process.in_use()
        # A process that replaced this attempt's post counts as alive even if that cannot be seen: else two processes
        # on two machines would replace each other's until their limits.
        if there or (there is None and nonce is not None):
            if nonce is not None:
                yield Put(_contested_key(post.nonce), b"1")
            raise self._another(post)

    def _hearing(self, roll: bytes | None, post: bytes | None) -> Steps[tuple[int, EplbError] | None]:
        """Steps of every member but the lowest: read a refusal of the lowest, or of a member that the lowest names."""
        leader, known = self.members[0], self._roll(roll)
        posts = {leader: self._post(leader, post)}
        by = known.refused_by if known is not None else None
        if by is not None and by != self.rank and by in self.members:
            (value,) = yield Get((post_key(by),))
            posts[by] = self._post(by, value)
        return (yield from self._heeding(posts))

    def _heeding(self, posts: Mapping[int, Post | None]) -> Steps[tuple[int, EplbError] | None]:
        """Steps that find a refusal by a live process, and confirm to its writer that it was read."""
        for rank, post in posts.items():
            if post is None or post.refusal is None:
                continue
            # Its process may have ended long ago. Then it is raised at the limit, unless another process has come.
            if not self.private and post.process.in_use() is False:
                continue
            # The same for a refusal read before: it ended that attempt, and its rank may come to this one.
            key, mine = self._read_key(post.nonce, self.rank), self.process.token.encode()
            (read,) = yield Get((key,))
            if read != mine:
                yield Put(key, mine)
                return rank, post.refusal
        return None

    # --- what is posted ----------------------------------------------------------------------------------------------

    def _why_not_there(self, rank: int, post: Post | None, used: Mapping[int, str]) -> str | None:
        if post is None:
            return ""
        if post.refusal is not None:
            return f"which left saying: {post.refusal}"
        if used.get(rank) == post.nonce:  # the nonces of a roll never meet again, whatever its outcome
            return ""
        if post.members != self.members:
            return f"which was told to meet ranks {list(post.members)}, not {list(self.members)}"
        return None

    def _staying_this_rank(self, post: Post | None, nonce: str) -> Steps[None]:
        """Steps that end the attempt when another process posts as this rank during the meeting."""
        if post is not None and post.nonce != nonce:
            # The members that the other process meets may be another group, and must be able to tell.
            yield Put(_contested_key(post.nonce), b"1")
            raise self._another(post)

    def _another(self, post: Post) -> EplbError:
        return error_for("EPLB-T015", process=post.process, rank=self.rank, name=self.name)

    def _put(self, post: Post) -> Put:
        return Put(post_key(self.rank), self._scope(self.rank).seal("post", post.to_bytes()))

    def _publish(self, roll: Roll) -> Put:
        return Put(self._roll_key, self._scope(self.members[0]).seal("roll", roll.to_bytes()))

    def _post(self, rank: int, value: bytes | None) -> Post | None:
        return None if value is None else _read(Post.from_bytes, self._scope(rank), value, "post")

    def _roll(self, value: bytes | None) -> Roll | None:
        return None if value is None else _read(Roll.from_bytes, self._scope(self.members[0]), value, "roll")

    def _scope(self, rank: int) -> MessageScope:
        return MessageScope(self.name, rank, 0, 0)

    @property
    def _roll_key(self) -> str:
        return f"meet/roll/{self.members[0]}"

    @staticmethod
    def _read_key(nonce: str, rank: int) -> str:
        return f"meet/read/{nonce}/{rank}"


def contested_member(client: StoreClient, roll: Roll) -> int | None:
    """Return a member whose rank another process claims too, or None."""
    for rank, nonce in roll.nonces.items():
        if client.exists(_contested_key(nonce)):
            return rank
    return None


def contested_error(name: str, rank: int) -> EplbError:
    """Make the error for a roll with a contested member, which may belong to another group."""
    return error_for("EPLB-T015", process="one more process", rank=rank, name=name)


def _contested_key(nonce: str) -> str:
    return f"meet/contested/{nonce}"


def _read(decode: Callable[[bytes], Any], scope: MessageScope, value: bytes, kind: str) -> Any:
    """Decode a value; a damaged one, or one of another release, counts as missing, for its writer will replace it."""
    try:
        return decode(scope.unseal(value, kind, _LIMIT_NBYTES))
    except (MetadataError, KeyError, ValueError, TypeError, AttributeError):
        return None
