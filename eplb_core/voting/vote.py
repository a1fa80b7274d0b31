"""One vote: every member's ballot, one decision by atomic compare-and-set, obeyed by all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eplb_core.backend.toolkit import Deadline
from eplb_core.control.store import StoreClient
from eplb_core.errors import EplbError, MetadataError
from eplb_core.wire.ballots import Ballot, Decision, decode_ballot, decode_decision, encode_ballot, encode_decision
from eplb_core.wire.envelope import seal, unseal

_MAX_MESSAGE_NBYTES = 1 << 20


class Vote:
    """One vote of one generation.

    Parameters
    ----------
    client : StoreClient
        In the namespace of the epoch.
    name, rank, epoch : str, int, int
        What the messages are bound to.
    members : sequence of int
        Who votes.
    generation : int
        Rearrangement; 0 for connect.
    topic : str
        What is voted on: "records", "agree", "link", a layer's number, "drain" ...
    where : str
        The same for texts: "layer 5".

    Notes
    -----
    Each rank sets its ballot, **then** counts itself; the count that reaches the number of members has therefore seen
    every ballot set. Its caster reads all ballots and puts commit, when all are there and all say so; a rank that
    fails or whose limit ran out puts abort. Both put with the same compare-and-set on one key that is never changed
    afterwards, so whoever comes first decides for all, and ranks that die between two messages split nothing.
    """

    def __init__(
        self,
        client: StoreClient,
        *,
        name: str,
        rank: int,
        epoch: int,
        members: Sequence[int],
        generation: int,
        topic: str,
        where: str,
    ) -> None:
        self._client = client
        self._name = name
        self._rank = rank
        self._epoch = epoch
        self._members = tuple(members)
        self._generation = generation
        self._prefix = f"{generation}/{topic}"
        self.where = where
        self.decision: Decision | None = None
        self.balloted = False

    @property
    def decision_key(self) -> str:
        """The key that holds the outcome."""
        return f"{self._prefix}/decision"

    def cast(self, ballot: Ballot, tally: Callable[[Mapping[int, Ballot]], Decision]) -> None:
        """Set this rank's ballot and count it; the last one decides.

        Parameters
        ----------
        ballot : Ballot
            This rank's.
        tally : callable
            From all ballots to the decision; called on the last caster only.
        """
        self._client.set(self._ballot_key(self._rank), self._seal("ballot", encode_ballot(ballot)))
        self.balloted = True
        self._client.shared.add(self.decision_key)  # whoever writes it
        if self._client.add(f"{self._prefix}/count") == len(self._members):
            ballots = self.ballots()
            missing = [rank for rank in self._members if rank not in ballots]
            if missing:  # cannot be while the store keeps its word; never commit on less than all ballots
                error: EplbError = MetadataError("EPLB-M005", peer=missing[0], problem="its ballot is missing")
                decision = Decision(False, self._rank, error)
            else:
                decision = tally(ballots)
            self._put(decision)

    def abort(self, error: EplbError, *, fatal: bool = False, content: Mapping[str, Any] | None = None) -> Decision:
        """Put abort unless a decision stands; return what stands."""
        return self._put(Decision(False, self._rank, error, fatal, content or {}))

    def poll(self) -> Decision | None:
        """Return the decision if it is known."""
        if self.decision is None:
            value = self._client.read(self.decision_key)
            if value is not None:
                self.decision = self._open_decision(value)
        return self.decision

    def ballots(self) -> dict[int, Ballot]:
        """Read the ballots that are there, by rank; a damaged one is an abort with that reason."""
        missing = self.missing()
        present = [rank for rank in self._members if rank not in missing]
        values = self._client.read_many([self._ballot_key(rank) for rank in present]) if present else []
        found = {}
        for rank, value in zip(present, values, strict=True):
            try:
                found[rank] = decode_ballot(self._unseal(value, "ballot", rank))
            except MetadataError as error:
                found[rank] = Ballot(False, error)
        return found

    def missing(self) -> list[int]:
        """Return the members whose ballot is not there."""
        if self._client.exists(*(self._ballot_key(rank) for rank in self._members)):  # one round trip when all are
            return []
        return [rank for rank in self._members if not self._client.exists(self._ballot_key(rank))]

    @property
    def own_keys(self) -> list[str]:
        """Keys that this rank alone writes, to be deleted by it once nobody reads them."""
        return [self._ballot_key(self._rank)]

    @property
    def shared_keys(self) -> list[str]:
        """Keys that every member may write, to be deleted by one of them."""
        return [f"{self._prefix}/count", self.decision_key]

    def _put(self, decision: Decision) -> Decision:
        # The writer's rank is in the envelope's place of the rank, so the reader learns it from the body; bind to 0.
        value = seal(
            "decision",
            encode_decision(decision),
            name=self._name,
            rank=0,
            epoch=self._epoch,
            generation=self._generation,
        )
        self.decision = self._open_decision(self._client.put_first(self.decision_key, value))
        return self.decision

    def _open_decision(self, value: bytes) -> Decision:
        return decode_decision(self._unseal(value, "decision", 0))

    def _ballot_key(self, rank: int) -> str:
        return f"{self._prefix}/ballot/{rank}"

    def _seal(self, kind: str, body: bytes) -> bytes:
        return seal(kind, body, name=self._name, rank=self._rank, epoch=self._epoch, generation=self._generation)

    def _unseal(self, value: bytes, kind: str, rank: int) -> bytes:
        return unseal(
            value,
            kind,
            name=self._name,
            rank=rank,
            epoch=self._epoch,
            generation=self._generation,
            limit=_MAX_MESSAGE_NBYTES,
        )


def await_decision(
    vote: Vote,
    deadline: Deadline,
    *,
    pump: Callable[[], None] | None,
    look: Callable[[Vote], Decision | None],
    half_way: Callable[[Vote, float], None],
    on_timeout: Callable[[Vote, float], Decision],
) -> Decision:
    """Wait until a vote is decided.

    Parameters
    ----------
    vote : Vote
        Balloted by this rank.
    deadline : Deadline
        When `on_timeout` is asked for the decision.
    pump : callable or None
        The backend's ``progress``, if it needs it.
    look : callable
        Looks at liveness; may decide by putting an abort.
    half_way : callable
        Called once when half the limit is over, with the seconds waited.
    on_timeout : callable
        Puts the abort of a wait that ran out, and returns what stands.

    Returns
    -------
    Decision

    Notes
    -----
    Polls with back-off, for every backend: torch's store prints two warnings for each blocking wait that runs out, and
    a wait cut into slices, which it must be to look at the neighbours, runs out all the time.
    """
    pause_s, warned = 20e-6, False
    while True:
        decision = vote.poll()
        if decision is None:
            decision = look(vote)
        if decision is not None:
            return decision
        if deadline.over:
            return on_timeout(vote, deadline.elapsed_s)
        if not warned and deadline.left_s < deadline.timeout_s / 2:
            warned = True
            half_way(vote, deadline.elapsed_s)
        if pump:
            pump()
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 1e-3)
