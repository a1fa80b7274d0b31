"""While this rank waits: which member is gone, which one stalls, and what caused a failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from eplb_core.backend import Cancelled
from eplb_core.backend.toolkit import Deadline
from eplb_core.control.store import StoreGone
from eplb_core.errors import EplbError, PeerLostError, StalledError, TransferError, error_for
from eplb_core.errors.texts import describe
from eplb_core.voting.members import Members
from eplb_core.voting.operations import Refusal
from eplb_core.voting.vote import Vote
from eplb_core.wire.ballots import Decision

logger = logging.getLogger("eplb_core")

_LOOK_EVERY_S = 2e-3
_STALL_GRACE_S = 0.5
_LONGEST_PAUSE_S = 1e-3


class Diagnosis:
    """Watches the members for one rank.

    Parameters
    ----------
    members : Members
        The members of the epoch.
    leaving : callable
        Returns why this rank itself wants to leave, as another thread asked, or None.
    """

    def __init__(self, members: Members, leaving: Callable[[], EplbError | None] = lambda: None) -> None:
        self._members = members
        self._leaving = leaving
        self._at_hand: Vote | None = None
        self._looked_at_s = 0.0
        self._cancelled: Cancelled | None = None
        self._last_vote: Vote | None = None

    # --- while a backend works ---------------------------------------------------------------------------------------

    def attend(self, vote: Vote) -> None:
        """Choose the vote whose abort cancels the backend's loops."""
        self._at_hand = vote
        self._cancelled = None
        self._looked_at_s = 0.0

    def cancelled(self) -> Cancelled | None:
        """Return why a backend's loop should give up, or None; looks at most every 2 ms."""
        now = time.monotonic()
        if now - self._looked_at_s < _LOOK_EVERY_S:
            return self._cancelled
        self._looked_at_s = now
        try:
            self._cancelled = self._look_for_cancellation() or self._cancelled
        except StoreGone as gone:
            self._cancelled = Cancelled(f"the store is lost: {gone}", store_lost=True)
        return self._cancelled

    def _look_for_cancellation(self) -> Cancelled | None:
        leaving = self._leaving()
        if leaving is not None:
            return Cancelled(str(leaving))
        ring, vote = self._members.ring, self._at_hand
        dead = ring.poll() if ring else None
        if dead is not None:
            return Cancelled(f"rank {dead} is gone", peer_lost=True)
        decision = vote.poll() if vote is not None else None
        if vote is None or decision is None or decision.commit:
            return None
        reason = f"rank {decision.by} aborted {vote.where}: {decision.error}"
        return Cancelled(reason, peer_lost=isinstance(decision.error, PeerLostError))

    # --- while this rank waits for a decision ------------------------------------------------------------------------

    def decide(
        self, vote: Vote, *, timeout_s: float | None = None, progress: Callable[[], None] | None = None
    ) -> Decision:
        """Wait for a decision, at most `timeout_s`; meanwhile watch the neighbours and call the backend's ``progress``.

        Notes
        -----
        It polls with back-off. A blocking wait would have to be cut into slices to look at the neighbours, and torch's
        store prints two warnings for each slice that runs out.
        """
        deadline = Deadline(self._members.timeout_s if timeout_s is None else timeout_s)
        pump = progress or self._members.pump
        pause_s, warned = 20e-6, False
        grace: Deadline | None = None

        def pause() -> Refusal | None:
            nonlocal pause_s, warned, grace
            refusal = self.look(vote)
            if refusal is not None:
                return refusal
            if deadline.over:
                # Members that wait for rows run out of time at the same moment and name the rank that does not send.
                grace = grace or Deadline(_STALL_GRACE_S)
                if grace.over:
                    return Refusal(self._stalled(vote, deadline.timeout_s))
            elif not warned and deadline.left_s < deadline.timeout_s / 2:
                warned = True
                self._say_whom_it_waits_for(vote, deadline.elapsed_s)
            if pump:
                try:
                    pump()
                except Exception as error:  # of the backend: the members must not wait for this rank
                    return self.diagnose(error, vote, vote.where)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
            return None

        decision = vote.wait(pause)
        self._last_vote = vote
        return decision

    def look(self, vote: Vote) -> Refusal | None:
        """Return, without waiting, why a vote must be aborted: this rank leaves, or a neighbour is gone. Else None."""
        leaving = self._leaving()
        if leaving is not None:
            return Refusal(leaving)
        ring = self._members.ring
        if ring is None:
            return None
        dead = ring.poll()
        if dead is not None:
            return Refusal(error_for("EPLB-T003", rank=dead, where=vote.where))
        if ring.departed:
            silent = sorted(ring.departed.intersection(vote.missing()))
            if silent and vote.poll() is None:
                reason = "it closed its communicator"
                return Refusal(error_for("EPLB-T007", rank=silent[0], where=vote.where, reason=reason))
        return None

    # --- what is to blame --------------------------------------------------------------------------------------------

    def diagnose(self, error: Exception, vote: Vote, where: str) -> Refusal:
        """Return the cause of a local failure: an abort that stands, a dead neighbour, or the failure itself.

        Notes
        -----
        When a peer dies, ranks with transfers to it see these fail, and its neighbours see an end of file. So a failed
        transfer waits a moment for the better explanation. One whose limit ran out does not wait: it knows which rank
        it waits for, while the others only know that a ballot is missing.
        """
        stalled = isinstance(error, StalledError)
        grace = Deadline(0.5 if isinstance(error, TransferError) and not stalled else 0.0)
        ring = self._members.ring
        while True:
            dead = ring.poll() if ring else None
            if dead is not None:
                return Refusal(error_for("EPLB-T003", rank=dead, where=where))
            if vote.poll() is not None or grace.over:
                break
            time.sleep(1e-3)
        rank = self._members.rank
        if not isinstance(error, EplbError):
            reason = describe(error)
            return Refusal(error_for("EPLB-T007", rank=rank, where=where, reason=reason), fatal=False)
        seen = f"Seen by rank {rank} in {where}."
        detail = f"{error.detail} {seen}" if error.detail else f"({seen})"  # the text may end without a full stop
        return Refusal(error_for(error.code, *error.values, detail=detail, **error.fields), fatal=stalled)

    def _stalled(self, vote: Vote, seconds: float) -> EplbError:
        waiting_for = self._whom_it_waits_for(vote)
        return error_for("EPLB-T002", seconds=seconds, where=vote.where, waiting_for=waiting_for)

    def _say_whom_it_waits_for(self, vote: Vote, seconds: float) -> None:
        logger.warning(
            "%s: rank %d has waited %.1f s for %s, in %s",
            self._members.name,
            self._members.rank,
            seconds,
            self._whom_it_waits_for(vote),
            vote.where,
        )

    def _whom_it_waits_for(self, vote: Vote) -> str:
        missing = vote.missing()
        if not missing:
            return "the decision, although every ballot is there"
        last = self._last_vote
        seen = last.ballots() if last is not None else {}
        texts = []
        for rank in missing[:8]:
            text = f"rank {rank}"
            if rank in seen and last is not None:
                ago_s = max(0.0, time.time() - seen[rank].cast_at_s)
                text += f" (last seen in {last.where}, {ago_s:.1f} s ago)"
            texts.append(text)
        return ", ".join(texts) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
