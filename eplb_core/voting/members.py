"""The members of an epoch and how they decide: votes, who is alive, and what is to blame when one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from eplb_core.backend.protocol import Cancelled
from eplb_core.backend.toolkit import Deadline
from eplb_core.control.store import StoreClient, StoreGone
from eplb_core.errors import EplbError, PeerLostError, StalledError, TransferError, error_for
from eplb_core.voting.liveness import Ring
from eplb_core.voting.vote import Vote, await_decision
from eplb_core.wire.ballots import Ballot, Decision
from eplb_core.wire.envelope import seal, unseal

logger = logging.getLogger("eplb_core")

_LOOK_EVERY_S = 2e-3
_STALL_GRACE_S = 0.5
_MESSAGE_LIMIT_NBYTES = 4 << 20


class Council:
    """What one rank knows of the members of an epoch, and its part in their votes.

    Parameters
    ----------
    client : StoreClient
        In the namespace of the epoch.
    name : str
        Of the communicator.
    rank : int
        This rank.
    epoch : int
        What messages are bound to.
    members : sequence of int
        Who votes, ascending.
    timeout_s : float
        Limit of a wait, seconds.

    Attributes
    ----------
    generation : int
        The rearrangement at hand; 0 until the first.
    ring : Ring or None
        The liveness ring, once connect has begun.
    pump : callable or None
        The backend's ``progress``, if it needs it.
    """

    def __init__(
        self, client: StoreClient, *, name: str, rank: int, epoch: int, members: Sequence[int], timeout_s: float
    ) -> None:
        self.client = client
        self.name = name
        self.rank = rank
        self.epoch = epoch
        self.members = tuple(members)
        self.timeout_s = timeout_s
        self.generation = 0
        self.ring: Ring | None = None
        self.pump: Callable[[], None] | None = None
        self._at_hand: Vote | None = None
        self._looked_at_s = 0.0
        self._cancelled: Cancelled | None = None
        self._old_own: list[str] = []
        self._old_shared: list[str] = []
        self._last_vote: Vote | None = None

    # --- votes --------------------------------------------------------------------------------------------------------

    def vote(self, topic: str, where: str, generation: int | None = None) -> Vote:
        """Make the vote on a topic of a generation (the current one by default)."""
        return Vote(
            self.client,
            name=self.name,
            rank=self.rank,
            epoch=self.epoch,
            members=self.members,
            generation=self.generation if generation is None else generation,
            topic=topic,
            where=where,
        )

    def attend(self, vote: Vote) -> None:
        """Make a vote the one whose abort cancels the backend's loops."""
        self._at_hand = vote
        self._cancelled = None
        self._looked_at_s = 0.0

    def decide(self, vote: Vote, *, timeout_s: float | None = None, pump: Callable[[], None] | None = None) -> Decision:
        """Wait for a vote's decision, at most `timeout_s`, watching the neighbours and moving the backend on."""
        decision = await_decision(
            vote,
            Deadline(self.timeout_s if timeout_s is None else timeout_s),
            pump=pump or self.pump,
            look=self._look,
            half_way=self._say_whom_it_waits_for,
            on_timeout=self._stalled,
        )
        self._last_vote = vote
        return decision

    def diagnose(self, error: Exception, vote: Vote, where: str) -> tuple[EplbError, bool]:
        """Find what is behind a local failure: a decision that stands, a dead neighbour, else the failure itself.

        When a peer dies, those who talk to it see a broken transfer, its neighbours in the ring an end of file; so a
        failed transfer waits a moment for the better explanation. One whose limit ran out does not: it knows whom it
        waits for, which those who only miss its ballot do not.

        Returns
        -------
        error : EplbError
            To be put into the decision.
        fatal : bool
            Peers are involved that will not answer again.
        """
        stalled = isinstance(error, StalledError)
        grace = Deadline(0.5 if isinstance(error, TransferError) and not stalled else 0.0)
        while True:
            dead = self.ring.poll() if self.ring else None
            if dead is not None:
                return error_for("EPLB-T003", rank=dead, where=where), True
            if vote.poll() is not None or grace.over:
                break
            time.sleep(1e-3)
        if not isinstance(error, EplbError):
            reason = f"{type(error).__name__}: {error}"
            return error_for("EPLB-T007", rank=self.rank, where=where, reason=reason), False
        seen = f"Seen by rank {self.rank} in {where}."
        detail = f"{error.detail} {seen}" if error.detail else f"({seen})"  # the text may end without a full stop
        named = error_for(error.code, *error.values, detail=detail, **error.fields)
        return named, error.code == "EPLB-T002"

    def cancelled(self) -> Cancelled | None:
        """Tell a backend's loop why it should give up, if so; looks at most every 2 ms."""
        now = time.monotonic()
        if now - self._looked_at_s < _LOOK_EVERY_S:
            return self._cancelled
        self._looked_at_s = now
        try:
            dead = self.ring.poll() if self.ring else None
            if dead is not None:
                self._cancelled = Cancelled(f"rank {dead} is gone", peer_lost=True)
            elif self._at_hand is not None:
                decision = self._at_hand.poll()
                if decision is not None and not decision.commit:
                    reason = f"rank {decision.by} aborted {self._at_hand.where}: {decision.error}"
                    self._cancelled = Cancelled(reason, peer_lost=isinstance(decision.error, PeerLostError))
        except StoreGone as gone:
            self._cancelled = Cancelled(f"the store is lost: {gone}", store_lost=True)
        return self._cancelled

    def _look(self, vote: Vote) -> Decision | None:
        if self.ring is None:
            return None
        dead = self.ring.poll()
        if dead is not None:
            return vote.abort(error_for("EPLB-T003", rank=dead, where=vote.where), fatal=True)
        if self.ring.departed:
            silent = sorted(self.ring.departed.intersection(vote.missing()))
            if silent and vote.poll() is None:
                reason = "it closed its communicator"
                return vote.abort(error_for("EPLB-T007", rank=silent[0], where=vote.where, reason=reason), fatal=True)
        return None

    def _stalled(self, vote: Vote, seconds: float) -> Decision:
        # Members that wait for rows run out of time at the same moment, and can name who does not send them.
        grace = Deadline(_STALL_GRACE_S)
        while not grace.over:
            decision = vote.poll() or self._look(vote)
            if decision is not None:
                return decision
            time.sleep(1e-3)
        waiting_for = self._whom_it_waits_for(vote)
        error = error_for("EPLB-T002", seconds=seconds, where=vote.where, waiting_for=waiting_for)
        return vote.abort(error, fatal=True)

    def _say_whom_it_waits_for(self, vote: Vote, seconds: float) -> None:
        logger.warning(
            "%s: rank %d has waited %.1f s for %s, in %s",
            self.name,
            self.rank,
            seconds,
            self._whom_it_waits_for(vote),
            vote.where,
        )

    def _whom_it_waits_for(self, vote: Vote) -> str:
        missing = vote.missing()
        if not missing:
            return "the decision, although every ballot is there"
        seen = self._last_vote.ballots() if self._last_vote is not None else {}
        texts = []
        for rank in missing[:8]:
            text = f"rank {rank}"
            if rank in seen and self._last_vote is not None:
                ago_s = max(0.0, time.time() - seen[rank].cast_at_s)
                text += f" (last seen in {self._last_vote.where}, {ago_s:.1f} s ago)"
            texts.append(text)
        return ", ".join(texts) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")

    def tally(self, ballots: Mapping[int, Ballot]) -> Decision:
        """Commit when every ballot says so, else abort with the reason of the lowest rank that refuses."""
        for rank in sorted(ballots):
            if not ballots[rank].ok:
                return Decision(False, rank, ballots[rank].error)
        return Decision(True, self.rank)

    # --- messages -----------------------------------------------------------------------------------------------------

    def seal(self, kind: str, body: bytes, *, rank: int | None = None, generation: int = 0) -> bytes:
        """Bind a message to this epoch as this rank's, or as `rank`'s: keys that anyone may write are rank 0's."""
        sender = self.rank if rank is None else rank
        return seal(kind, body, name=self.name, rank=sender, epoch=self.epoch, generation=generation)

    def open(self, value: bytes, kind: str, *, rank: int, generation: int = 0) -> bytes:
        """Check a message of `rank` and return its body.

        Raises
        ------
        MetadataError
            Damaged, swapped or stale (EPLB-M005).
        """
        return unseal(
            value,
            kind,
            name=self.name,
            rank=rank,
            epoch=self.epoch,
            generation=generation,
            limit=_MESSAGE_LIMIT_NBYTES,
        )

    # --- keys and the end ---------------------------------------------------------------------------------------------

    def forget_later(self, votes: Sequence[Vote], extra: Sequence[str] = ()) -> None:
        """Note the keys of a generation's votes; `forget` deletes them once nobody can read them any more."""
        for vote in votes:
            self._old_own.extend(vote.own_keys)
            self._old_shared.extend(vote.shared_keys)
        self._old_shared.extend(extra)

    def forget(self) -> None:
        """Delete what was noted before this generation was agreed: all have entered it, so all knew the outcomes."""
        self.client.delete(*self._old_own)
        if self.rank == self.members[0]:
            self.client.delete(*self._old_shared)
        else:
            self.client.shared.difference_update(self._old_shared)
        self._old_own, self._old_shared = [], []

    @property
    def dead(self) -> tuple[int, ...]:
        """Neighbours found dead."""
        return self.ring.dead if self.ring else ()

    def goodbye(self, *, tidy: bool = False) -> None:
        """Tell the ring and the store, if it is still there, that this rank leaves in peace; `tidy` up first if so."""
        if self.ring is not None:
            self.ring.poll()
        with suppress(StoreGone):
            if not (tidy and self.tidy()):
                for rank in self.dead:
                    self.client.set(f"dead/{rank}", b"1")
                self.client.set(f"bye/{self.rank}", b"1")
        if self.ring is not None:
            self.ring.close(goodbye=True)

    def tidy(self) -> bool:
        """Delete what this rank left in the store, after an end at which every outcome was known to it.

        Keys that others may still read are left to the last member that tidies up; where one is lost nobody is, and
        they stay, for a rank that wakes late must find the outcomes.

        Returns
        -------
        bool
            True when all members had left, and nothing of this epoch is in the store any more.
        """
        self.client.delete(*self.client.own)
        if self.client.add("left") < len(self.members):
            return False
        goodbyes = [f"{word}/{rank}" for word in ("bye", "dead") for rank in self.members]
        self.client.delete(*self.client.shared, *goodbyes)
        return True

    def await_goodbyes(self, timeout_s: float) -> None:
        """Stay until every other member said goodbye or is known dead, at most `timeout_s`: the store lives here."""
        deadline, pause_s = Deadline(timeout_s), 1e-3
        waiting = {rank for rank in self.members if rank != self.rank} - set(self.dead)
        while waiting and not deadline.over:
            waiting = {
                rank
                for rank in waiting
                if not (self.client.exists(f"bye/{rank}") or self.client.exists(f"dead/{rank}"))
            }
            if waiting:
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, 0.05)
        if waiting:
            logger.warning(
                "%s: rank %d hosts the store and closes it although rank(s) %s said no goodbye within %.0f s",
                self.name,
                self.rank,
                sorted(waiting),
                timeout_s,
            )

    def vanish(self) -> None:
        """Leave the ring without a goodbye, so that the neighbours count this rank out at once."""
        with suppress(StoreGone):
            self.client.set(f"bye/{self.rank}", b"1")  # the store's host need not wait for it
        if self.ring is not None:
            self.ring.close(goodbye=False)


def refuse(vote: Vote, rank: int, error: Exception) -> None:
    """Put an abort that tells the members why this rank cannot take part."""
    reason = str(error) if isinstance(error, EplbError) else f"{type(error).__name__}: {error}"
    try:
        vote.abort(error_for("EPLB-M006", rank=rank, reason=reason), fatal=True)
    except StoreGone:
        logger.warning("rank %d could not tell the others why it failed: the store is lost", rank)
