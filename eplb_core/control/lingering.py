"""The rank that hosts the store stays until the others have read what it left there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from eplb_core.control.sockets import connected_at
from eplb_core.control.store import StoreClient, StoreGone

NAMESPACE = "eplb/read"
"""Of the keys with which ranks say that they have read."""
_LONGEST_PAUSE_S = 0.05


class Presence:
    """Which ranks still have their first connection to the store that this process hosts.

    Parameters
    ----------
    port : int
        At which the store listens.
    addresses : Mapping of int to str
        By rank: the address of the rank's end of its connection, as the rank sees it. A rank whose connection is not
        seen here now (its address is translated on the way, or this system has no /proc) is never taken for absent.
    """

    def __init__(self, port: int, addresses: Mapping[int, str]) -> None:
        self._port = port
        here = connected_at(port)
        self._addresses = {rank: address for rank, address in addresses.items() if address in here}

    def absent(self) -> frozenset[int]:
        """Return the ranks whose connection has ended: their process has, or has let go of its control plane."""
        here = connected_at(self._port)
        return frozenset(rank for rank, address in self._addresses.items() if address not in here)


def say_it_was_read(client: StoreClient, name: str, rank: int) -> None:
    """Leave word that this rank needs nothing more of what was said about `name`."""
    client.set(_key(name, rank), b"1")
    client.exists(_key(name, rank))  # an answer, without which the word may still be on its way when the process ends


def stay_until_read(
    client: StoreClient, name: str, presence: Presence, others: frozenset[int], timeout_s: float
) -> frozenset[int]:
    """Wait until the other ranks have said so or are absent; return those of which neither is known at the limit."""
    until, pause_s = time.monotonic() + timeout_s, 1e-3
    waiting = others
    with suppress(StoreGone):  # then nobody can read here any more
        while waiting:
            waiting = frozenset(rank for rank in waiting if not client.exists(_key(name, rank)))
            waiting -= presence.absent()
            if time.monotonic() >= until:
                break
            if waiting:
                time.sleep(min(pause_s, max(0.0, until - time.monotonic())))
                pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        client.delete(*(_key(name, rank) for rank in others))
    return waiting


def _key(name: str, rank: int) -> str:
    return f"{name}/{rank}"
