"""Which ranks still have a connection to the store, as far as the process that hosts it can see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from eplb_core.control.sockets import connected_at


class Presence:
    """Which ranks still have their first connection to the store that this process hosts.

    Parameters
    ----------
    port : int
        Port of the store.
    addresses : Mapping of int to str
        By rank: the address of the rank's end of its connection, as the rank sees it. A rank whose connection is not
        seen here now (its address is translated on the way, or this system has no /proc) is never taken for absent.
    """

    def __init__(self, port: int, addresses: Mapping[int, str]) -> None:
        self.heard: Counter[str] = Counter()
        """By store key: how often each rank has reported that it read it."""
        self._port = port
        here = connected_at(port)
        self._addresses = {rank: address for rank, address in addresses.items() if address in here}

    def absent(self) -> frozenset[int]:
        """Return the ranks whose connection has ended: the process ended or closed its control plane."""
        here = connected_at(self._port)
        return frozenset(rank for rank, address in self._addresses.items() if address not in here)
