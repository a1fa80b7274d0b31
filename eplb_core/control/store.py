"""One bounded connection to the store, for one thread, in one namespace."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class StoreGone(Exception):
    """The store did not answer. Internal: callers turn it into `StoreLostError` with the layers in doubt."""


class StoreClient:
    """One connection to the store, in one namespace, for one thread.

    Notes
    -----
    A torch client blocks in ``recv`` for as long as the store's host is silent, whatever its timeout says. So the
    socket gets a receive limit when it is opened (``timeout_s``, seconds). Once that has run out, the connection is out
    of step and is not used again. ``descriptor`` is the socket's, where it is known; it belongs to the store.
    """

    def __init__(self, store: Any, prefix: str, timeout_s: float, descriptor: int | None = None) -> None:
        import torch.distributed as dist

        self.prefix = prefix
        self._timeout_s = timeout_s
        self._gone: str | None = None
        self.own: set[str] = set()
        """Keys that this client set and that nobody else writes."""
        self.shared: set[str] = set()
        """Keys that any member may write, as far as this client knows them."""
        self._store: Any = dist.PrefixStore(prefix, store)
        self._hang_up: select.poll | None = None
        if descriptor is not None:
            self._hang_up = select.poll()
            self._hang_up.register(descriptor, getattr(select, "POLLRDHUP", 0))

    @property
    def store(self) -> Any:
        """The store in this namespace, for a backend; this client then only closes it."""
        return self._store

    def set(self, key: str, value: bytes) -> None:
        """Store a value. A lost store shows at the next operation that reads."""
        self.own.add(key)
        self._call(lambda: self._store.set(key, value))

    def read(self, key: str) -> bytes | None:
        """Return the value of a key, or None when it has none."""
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
        """Store a value unless the key has one; return the value that it has then. The only compare-and-set in use.

        Notes
        -----
        On a missing key torch returns a non-empty expectation as if it had been stored.
        """
        self.shared.add(key)
        return self._call(lambda: bytes(self._store.compare_set(key, "", value)))

    def delete(self, *keys: str) -> None:
        """Delete keys; missing ones are no error."""
        self.own.difference_update(keys)
        self.shared.difference_update(keys)
        for key in keys:
            self._call(lambda key=key: self._store.delete_key(key))  # type: ignore[misc]

    def close(self) -> None:
        """Close the connection; later operations raise `StoreGone`."""
        self._gone = self._gone or "its connection was closed on this side"
        self._hang_up = None
        self._store = None  # which closes the socket: torch has no other way

    def _call(self, operation: Callable[[], T]) -> T:
        if self._gone is not None:
            raise StoreGone(self._gone)
        # torch prints a page of C++ frames for an operation on a connection that the other end has closed.
        if self._hang_up is not None and self._hang_up.poll(0):
            self._gone = "its process is gone: it closed the connection"
            raise StoreGone(self._gone)
        try:
            return operation()
        except (RuntimeError, OSError) as error:  # DistNetworkError, DistStoreError; a store of the host's own kind
            reason = first_line(error)
            late = "timeout" in reason.lower() or "timed out" in reason.lower()
            self._gone = f"it did not answer within {self._timeout_s:g} s ({reason})" if late else reason
            raise StoreGone(self._gone) from error


def first_line(error: BaseException) -> str:
    """Return the text of an error without the C++ frames that torch puts below it."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
