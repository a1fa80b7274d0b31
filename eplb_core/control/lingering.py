"""The rank that hosts the store stays until the others have read what it left there."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from eplb_core.control.sockets import connected_at
from eplb_core.control.store import StoreClient, StoreGone

NAMESPACE = "eplb/read"
"""Of the keys with which ranks say that they have read."""
_LONGEST_PAUSE_S = 0.05


class Presence:
    """Which ranks still have their first connection to the store that this process hosts.

    Notes
    -----
    ``addresses`` holds, by rank, the rank's end of its connection as the rank sees it. A connection that is not seen
    here now (its address is translated on the way, or this system has no /proc) is never taken for one that has ended.
    """

    def __init__(self, port: int, addresses: Mapping[int, str]) -> None:
        self.heard: Counter[str] = Counter()
        """How often each rank was heard to have read, by key of the store."""
        self._port = port
        here = connected_at(port)
        self._addresses = {rank: address for rank, address in addresses.items() if address in here}

    def absent(self) -> frozenset[int]:
        """Return the ranks whose connection has ended: their process has, or has let go of its control plane."""
        here = connected_at(self._port)
        return frozenset(rank for rank, address in self._addresses.items() if address not in here)


def say_it_was_read(client: StoreClient, name: str, rank: int) -> None:
    """Leave word that this rank needs nothing more of what was said about `name` so far."""
    client.add(_key(name, rank))


def stay_until_read(
    client: StoreClient, name: str, presence: Presence, others: frozenset[int], timeout_s: float
) -> frozenset[int]:
    """Wait until the other ranks have said so once more, or are absent; return the rest of them at the limit."""
    until, pause_s = time.monotonic() + timeout_s, 1e-3
    waiting = others
    with suppress(StoreGone):  # then nobody can read here any more
        while True:
            for rank in waiting:
                key = _key(name, rank)
                # Counted, for a rank may have failed and tried again before this one came to listen.
                if int(client.read(key) or 0) > presence.heard[key]:
                    presence.heard[key] += 1
                    waiting -= {rank}
            waiting -= presence.absent()
            left_s = until - time.monotonic()
            if not waiting or left_s <= 0:
                break
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
    return waiting


def _key(name: str, rank: int) -> str:
    return f"{name}/{rank}"
