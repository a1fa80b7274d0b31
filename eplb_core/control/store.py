"""One bounded connection to the store, for one thread, in one namespace."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class StoreGone(Exception):
    """The store did not answer. Internal: callers turn it into `StoreLostError` with the layers in doubt."""


class StoreClient:
    """One connection to the store, in one namespace, for one thread.

    A torch client blocks in ``recv`` for as long as the store's host is silent, whatever its timeout says, so the
    socket itself gets a receive limit; after it ran out the connection is out of step and is not used again.

    Parameters
    ----------
    store : torch.distributed.Store
        A connection of this client's own.
    prefix : str
        Namespace of its keys.
    timeout_s : float
        Limit of one operation, seconds.
    """

    def __init__(self, store: Any, prefix: str, timeout_s: float) -> None:
        import torch.distributed as dist

        self.prefix = prefix
        self._timeout_s = timeout_s
        self._gone: str | None = None
        self.own: set[str] = set()
        """Keys that this client set and nobody else writes."""
        self.shared: set[str] = set()
        """Keys that any member may write, as far as this client knows them."""
        self._store = dist.PrefixStore(prefix, store)
        _limit_sockets(store, timeout_s)

    def set(self, key: str, value: bytes) -> None:
        """Store a value. A lost store shows at the next operation that reads."""
        self.own.add(key)
        # torch's stub asks for str, the binding takes bytes; here and below
        self._call(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def read(self, key: str) -> bytes | None:
        """Return the value of a key, or None while there is none."""
        return self._call(lambda: self._store.get(key) if self._store.check([key]) else None)

    def exists(self, *keys: str) -> bool:
        """Do all of these keys exist?"""
        return self._call(lambda: bool(self._store.check(list(keys))))

    def read_many(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that are known to exist, in one round trip."""
        return self._call(lambda: list(self._store.multi_get(keys)))

    def add(self, key: str) -> int:
        """Count one up and return the count. Never retried: a second add would count a rank twice."""
        self.shared.add(key)
        return self._call(lambda: int(self._store.add(key, 1)))

    def put_first(self, key: str, value: bytes) -> bytes:
        """Store a value unless the key has one; return what stands there. The only form of compare-and-set used.

        (On a missing key a non-empty expectation comes back as if it had been stored.)
        """
        self.shared.add(key)
        return self._call(lambda: bytes(self._store.compare_set(key, "", value)))  # type: ignore[arg-type]

    def delete(self, *keys: str) -> None:
        """Delete keys; missing ones are no error."""
        self.own.difference_update(keys)
        self.shared.difference_update(keys)
        for key in keys:
            self._call(lambda key=key: self._store.delete_key(key))  # type: ignore[misc]

    def _call(self, operation: Callable[[], T]) -> T:
        if self._gone is not None:
            raise StoreGone(self._gone)
        try:
            return operation()
        except RuntimeError as error:  # DistNetworkError, DistStoreError; older torch raises plain RuntimeError
            self._gone = str(error).splitlines()[0]
            if "timeout" in self._gone.lower():
                self._gone = f"it did not answer within {self._timeout_s:g} s ({self._gone})"
            raise StoreGone(self._gone) from error


def _limit_sockets(store: Any, timeout_s: float) -> None:
    """Give every connection of this process to the store's address a receive and a send limit.

    torch exposes no descriptor, so they are found by their peer; on systems without /proc nothing is limited and the
    operating system's own limits apply.
    """
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    table = Path("/proc/self/fd")
    for name in os.listdir(table) if table.exists() else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with connection:
            try:
                if connection.getpeername()[1] == store.port:
                    # options belong to the socket, not to this duplicate of its descriptor
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            except (OSError, IndexError):
                continue
