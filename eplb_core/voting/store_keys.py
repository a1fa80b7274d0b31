"""Keys in the store: when each is deleted, by whom, and which must stay."""

from __future__ import annotations

from collections.abc import Sequence

from eplb_core.control.store import StoreClient
from eplb_core.voting.vote import Vote


class StoreKeys:
    """Keys of an epoch's votes, deleted once nobody can read them any more.

    Parameters
    ----------
    client : StoreClient
        Connection to the store that holds the keys.
    deletes_shared : bool
        Does this rank delete the keys that any member may write?
    """

    def __init__(self, client: StoreClient, *, deletes_shared: bool) -> None:
        self._client = client
        self._deletes_shared = deletes_shared
        self._own: list[str] = []
        self._shared: list[str] = []

    def forget_later(self, votes: Sequence[Vote], extra: Sequence[str] = ()) -> None:
        """Note keys of a generation's votes, and other keys that any member may write, for later deletion."""
        for vote in votes:
            self._own.extend(vote.own_keys)
            self._shared.extend(vote.shared_keys)
        self._shared.extend(extra)

    def forget(self) -> None:
        """Delete the keys noted before a generation was agreed: all members entered it, so all knew the outcomes."""
        self._client.delete(*self._own)
        if self._deletes_shared:
            self._client.delete(*self._shared)
        else:
            self._client.shared.difference_update(self._shared)
        self._own, self._shared = [], []


def tidy_up(client: StoreClient, namespace: str, members: Sequence[int]) -> bool:
    """Delete this rank's keys at an end at which it knows every outcome.

    Notes
    -----
    The last member that tidies up deletes the keys that others might still have read. When a member is lost, there is
    no last one, and these keys stay: a rank that wakes late must find the outcomes. Returns True when all members have
    left and the store holds no key of the epoch any more.
    """
    client.delete(*client.own)
    if client.add(f"{namespace}/left") < len(members):
        return False
    client.delete(*client.shared, *_goodbyes(namespace, members))
    return True


def leave_epoch_behind(
    client: StoreClient, namespace: str, rank: int, members: Sequence[int], present: Sequence[int]
) -> None:
    """Delete the keys of an epoch once every present member has joined the next: each its own, the lowest the rest.

    Notes
    -----
    When a member of the old epoch is absent, the decisions stay for good. Otherwise a member that slept just before it
    decided would find no decision, put its own, and commit a layer that the others have aborted.
    """
    own = [key for key in client.own if key.startswith(f"{namespace}/")]
    shared = [key for key in client.shared if key.startswith(f"{namespace}/")]
    client.shared.difference_update(shared)
    client.delete(*own)
    if rank == min(set(members).intersection(present), default=rank):
        stay = "/decision" if not set(members) <= set(present) else None
        client.delete(*(key for key in shared if stay is None or not key.endswith(stay)))


def _goodbyes(namespace: str, members: Sequence[int]) -> list[str]:
    return [f"{namespace}/{word}/{rank}" for word in ("bye", "dead") for rank in members]
