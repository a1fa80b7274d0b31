"""One vote: every member's ballot, one decision by atomic compare-and-set, obeyed by all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from eplb_core.control.store import StoreClient
from eplb_core.errors import EplbError, MetadataError, error_for
from eplb_core.voting.operations import Count, Get, Pause, Put, PutFirst, Refusal, Steps, perform
from eplb_core.wire.ballots import Ballot, Decision, decode_ballot, decode_decision, encode_ballot, encode_decision
from eplb_core.wire.envelope import MessageScope

MAX_MESSAGE_NBYTES = 1 << 20

Tally = Callable[[Mapping[int, Ballot]], Decision]


class Vote:
    """One vote of one generation.

    Parameters
    ----------
    client : StoreClient
        Connection to the store.
    scope : MessageScope
        What the messages are bound to; its rank is this one.
    members : sequence of int
        Ranks that vote.
    namespace : str
        Prefix of the epoch's keys, which no other epoch uses.
    topic : str
        What is voted on: "meet", "agree", "link", a layer's number ...
    where : str
        The topic as messages show it: "layer 5, phase vote".

    Attributes
    ----------
    decision : Decision or None
        The decision, once this rank knows it.
    balloted : bool
        Did this rank cast its ballot?

    Notes
    -----
    Each rank sets its ballot and **then** counts itself. So when the count reaches the number of members, every ballot
    is set; the rank that reached it reads them all and puts commit if all say so. A rank that fails, or whose limit
    runs out, puts abort. Both use the same compare-and-set on one key that never changes afterwards, so the first one
    decides for all, also when ranks die between two messages.

    A commit needs this rank's ballot. A commit without it belongs to another run and is never obeyed.
    """

    def __init__(
        self,
        client: StoreClient,
        scope: MessageScope,
        *,
        members: Sequence[int],
        namespace: str,
        topic: str,
        where: str,
    ) -> None:
        self._client = client
        self._scope = scope
        self._members = tuple(members)
        self._prefix = f"{namespace}/{scope.generation}/{topic}"
        self.where = where
        self.decision: Decision | None = None
        self.balloted = False

    @property
    def decision_key(self) -> str:
        """Key that holds the decision."""
        return f"{self._prefix}/decision"

    # --- for this thread ---------------------------------------------------------------------------------------------

    def cast(self, ballot: Ballot, tally: Tally) -> None:
        """Set this rank's ballot and count it; the last one decides.

        Parameters
        ----------
        ballot : Ballot
            Ballot of this rank.
        tally : callable
            Maps all ballots to the decision; called only on the rank that casts last.
        """
        perform(self.casting(ballot, tally), self._client)

    def abort(self, error: EplbError, *, fatal: bool = False, content: Mapping[str, object] | None = None) -> Decision:
        """Put abort unless there is a decision; return the decision: an abort, or a commit with this rank's ballot.

        Raises
        ------
        TransferError
            There is a commit although this rank cast no ballot (EPLB-T016).
        """
        return perform(self.aborting(error, fatal=fatal, content=content), self._client)

    def poll(self) -> Decision | None:
        """Return the decision if it is known; raises as `abort` does."""
        return perform(self.polling(), self._client)

    def wait(self, pause: Callable[[], Refusal | None]) -> Decision:
        """Wait for the decision; `pause` waits a little each time, and may return a reason to put an abort."""
        return perform(self.awaiting(), self._client, pause)

    def ballots(self) -> dict[int, Ballot]:
        """Read the ballots that are set, by rank; a damaged ballot counts as abort for that reason."""
        return perform(self.reading(), self._client)

    def missing(self) -> list[int]:
        """Return the members whose ballot is not set."""
        if self._client.exists(*(self._ballot_key(rank) for rank in self._members)):  # one round trip when all are
            return []
        return [rank for rank in self._members if not self._client.exists(self._ballot_key(rank))]

    # --- the protocol ------------------------------------------------------------------------------------------------

    def casting(self, ballot: Ballot, tally: Tally) -> Steps[None]:
        """Steps of `cast`."""
        yield from self.balloting(ballot)
        count = yield from self.counting()
        if count < len(self._members):
            return
        ballots = yield from self.reading()
        missing = [rank for rank in self._members if rank not in ballots]
        if missing:  # impossible while the store works; never commit on fewer than all ballots
            error: EplbError = MetadataError("EPLB-M005", peer=missing[0], problem="its ballot is missing")
            decision = Decision(False, self._scope.rank, error)
        else:
            decision = tally(ballots)
        yield from self.putting(decision)

    def balloting(self, ballot: Ballot) -> Steps[None]:
        """Set this rank's ballot."""
        sealed = self._scope.seal("ballot", encode_ballot(ballot))
        self.balloted = True  # before it is sent: if the store is lost during this call, the layer is in doubt
        yield Put(self._ballot_key(self._scope.rank), sealed)

    def counting(self) -> Steps[int]:
        """Count this rank's ballot, which is set, and return how many are."""
        count: int = yield Count(f"{self._prefix}/count")
        return count

    def aborting(
        self, error: EplbError, *, fatal: bool = False, content: Mapping[str, object] | None = None
    ) -> Steps[Decision]:
        """Steps of `abort`."""
        return (yield from self.putting(Decision(False, self._scope.rank, error, fatal, content or {})))

    def polling(self) -> Steps[Decision | None]:
        """Steps of `poll`."""
        if self.decision is None:
            (value,) = yield Get((self.decision_key,))
            if value is not None:
                self._obey(value)
        return self.decision

    def awaiting(self) -> Steps[Decision]:
        """Steps of `wait`."""
        while True:
            decision = yield from self.polling()
            if decision is not None:
                return decision
            refusal: Refusal | None = yield Pause()
            if refusal is not None:
                return (yield from self.aborting(refusal.error, fatal=refusal.fatal))

    def reading(self) -> Steps[dict[int, Ballot]]:
        """Steps of `ballots`."""
        values = yield Get(tuple(self._ballot_key(rank) for rank in self._members))
        found = {}
        for rank, value in zip(self._members, values, strict=True):
            if value is None:
                continue
            try:
                found[rank] = decode_ballot(self._scope.of(rank=rank).unseal(value, "ballot", MAX_MESSAGE_NBYTES))
            except MetadataError as error:
                found[rank] = Ballot(False, error)
        return found

    def putting(self, decision: Decision) -> Steps[Decision]:
        """Put a decision unless one stands, and obey what stands."""
        # Any member may write it, and its body says which did; the envelope is bound to rank 0.
        value = self._scope.of(rank=0).seal("decision", encode_decision(decision))
        stands = yield PutFirst(self.decision_key, value)
        return self._obey(stands)

    def _obey(self, value: bytes) -> Decision:
        decision = decode_decision(self._scope.of(rank=0).unseal(value, "decision", MAX_MESSAGE_NBYTES))
        if decision.commit and not self.balloted:
            raise error_for("EPLB-T016", rank=self._scope.rank, where=self.where)
        self.decision = decision
        return decision

    # --- keys --------------------------------------------------------------------------------------------------------

    @property
    def own_keys(self) -> list[str]:
        """Keys that only this rank writes; it deletes them once nobody reads them."""
        return [self._ballot_key(self._scope.rank)]

    @property
    def shared_keys(self) -> list[str]:
        """Keys that every member may write; one of them deletes them."""
        return [f"{self._prefix}/count", self.decision_key]

    def _ballot_key(self, rank: int) -> str:
        return f"{self._prefix}/ballot/{rank}"


def all_agree(rank: int) -> Callable[[Mapping[int, Ballot]], Decision]:
    """Return the tally that commits when every ballot says so, else aborts with the reason of the lowest rank."""

    def tally(ballots: Mapping[int, Ballot]) -> Decision:
        for voter in sorted(ballots):
            if not ballots[voter].ok:
                return Decision(False, voter, ballots[voter].error)
        return Decision(True, rank)

    return tally
