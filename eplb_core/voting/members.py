"""The members of an epoch, and how one rank talks with them: votes, sealed messages, keys to delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eplb_core.control.store import StoreClient
from eplb_core.voting.liveness import Ring
from eplb_core.voting.store_keys import StoreKeys
from eplb_core.voting.vote import Vote
from eplb_core.wire.envelope import MessageScope

_MESSAGE_LIMIT_NBYTES = 4 << 20


class Members:
    """The members of an epoch, as one of them sees them.

    Parameters
    ----------
    client : StoreClient
        In the namespace of the communicator.
    scope : MessageScope
        What this rank's messages of the epoch are bound to.
    members : sequence of int
        Ranks that vote, ascending.
    namespace : str
        Prefix of the epoch's keys.
    timeout_s : float
        Limit of a wait, seconds.

    Attributes
    ----------
    generation : int
        Number of the current rearrangement; 0 before the first.
    ring : Ring or None
        The ring, once it is connected.
    keys : StoreKeys
        Keys that this rank is to delete.
    pump : callable or None
        The backend's ``progress``, if it needs it.
    """

    def __init__(
        self, client: StoreClient, scope: MessageScope, *, members: Sequence[int], namespace: str, timeout_s: float
    ) -> None:
        self.client = client
        self.members = tuple(members)
        self.namespace = namespace
        self.timeout_s = timeout_s
        self.generation = 0
        self.ring: Ring | None = None
        self.pump: Callable[[], None] | None = None
        self._scope = scope
        self.keys = StoreKeys(client, deletes_shared=scope.rank == self.members[0])

    @property
    def name(self) -> str:
        """Name of the communicator."""
        return self._scope.name

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._scope.rank

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._scope.epoch

    @property
    def dead(self) -> tuple[int, ...]:
        """Neighbours found dead."""
        return self.ring.dead if self.ring else ()

    def vote(self, topic: str, where: str, generation: int | None = None) -> Vote:
        """Make the vote on a topic of a generation (the current one by default)."""
        scope = self._scope.of(generation=self.generation if generation is None else generation)
        vote = Vote(self.client, scope, members=self.members, namespace=self.namespace, topic=topic, where=where)
        self.client.shared.update(vote.shared_keys)  # whoever writes them
        return vote

    # --- messages ----------------------------------------------------------------------------------------------------

    def key(self, name: str) -> str:
        """Return a key of this epoch."""
        return f"{self.namespace}/{name}"

    def seal(self, kind: str, body: bytes, *, rank: int | None = None, generation: int = 0) -> bytes:
        """Bind a message to this epoch and this rank, or to `rank`; what any member may write is bound to rank 0."""
        return self._scope.of(rank=rank, generation=generation).seal(kind, body)

    def open(self, value: bytes, kind: str, *, rank: int, generation: int = 0) -> bytes:
        """Check a message of `rank` and return its body.

        Raises
        ------
        MetadataError
            Damaged, swapped or stale (EPLB-M005).
        """
        return self._scope.of(rank=rank, generation=generation).unseal(value, kind, _MESSAGE_LIMIT_NBYTES)
