"""Opening a connection to the store within a limit, even when the process that hosts it is stopped or gone."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

from eplb_core.control.attempt import within
from eplb_core.control.sockets import connections_to, limit, written
from eplb_core.control.store import StoreGone, first_line
from eplb_core.errors import ConfigError

_LEAST_S = 1e-3
"""Used for a limit that has run out: torch reads 0 as no limit, or as no wait at all."""
_GRACE_S = 0.25
"""Inner limits run out so much earlier than the outer one, for their messages say more."""


@dataclass(frozen=True)
class Opened:
    """A store connection with limits.

    Parameters
    ----------
    store : torch.distributed.Store
        Connected for this caller alone.
    descriptor : int or None
        Descriptor of its socket, where it is certain which one that is; it belongs to the store.
    address : str
        Address of this end, ``host:port``; empty where the descriptor is not known.
    """

    store: Any
    descriptor: int | None = None
    address: str = ""


def checked_limit(timeout_s: object) -> float:
    """Return a limit in seconds; an invalid one is a ConfigError (EPLB-C009)."""
    if isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool) and 0 < timeout_s < math.inf:
        return float(timeout_s)
    raise ConfigError("EPLB-C009", problem=f"timeout_s={timeout_s!r} should be a number of seconds above 0")


def open_again(store: Any, timeout_s: float) -> Opened:
    """Open another connection to the same store and namespace, within a limit; else StoreGone.

    Notes
    -----
    ``timeout_s`` limits opening it and every operation on it. A store that supports only one connection is refused
    (EPLB-C009).
    """
    import torch.distributed as dist

    inner = _innermost(store)
    if isinstance(inner, dist.TCPStore):
        opened = _open(store.clone, (inner.host, inner.port), timeout_s)
        opened.store.set_timeout(timedelta(seconds=max(timeout_s, _LEAST_S)))
        return opened
    try:
        # Its own timeout stays: the clone of a HashStore is the same object.
        return _open(store.clone, None, timeout_s)
    except (NotImplementedError, AttributeError, TypeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_missing(error):
            raise StoreGone(first_line(error)) from error
        problem = f"a {type(inner).__name__} cannot be connected to once more: it has no clone()"
        raise ConfigError("EPLB-C009", problem=problem) from error


def address_of(store: Any) -> str | None:
    """Return host and port of a TCPStore, below any prefixes; None for a store of another kind."""
    import torch.distributed as dist

    inner = _innermost(store)
    return written((inner.host, inner.port)) if isinstance(inner, dist.TCPStore) else None


def _innermost(store: Any) -> Any:
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def open_client(host: str, port: int, timeout_s: float) -> Opened:
    """Connect to the TCPStore at an address; see `open_again`."""
    import torch.distributed as dist

    limit_of_waits = timedelta(seconds=max(timeout_s, _LEAST_S))
    return _open(
        lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit_of_waits),
        (host, port),
        timeout_s,
    )


def _open(make: Callable[[], Any], address: tuple[str, int] | None, timeout_s: float) -> Opened:
    """Make a connection in a thread that is let go at the limit.

    Notes
    -----
    torch connects, greets and waits for an answer in one call, without a limit when the store's process is stopped, and
    leaves no moment to set one on its socket. `_greet` detects a stopped process beforehand; the thread is for one that
    stops in between.
    """
    timeout_s = max(timeout_s, _LEAST_S)
    at = "the store" if address is None else f"the store at {written(address)}"
    try:
        return within(timeout_s + _GRACE_S, lambda: _connect(make, address, timeout_s), "opens a store connection")
    except TimeoutError as error:
        raise StoreGone(f"{at} did not answer within {timeout_s:g} s") from error


def _connect(make: Callable[[], Any], address: tuple[str, int] | None, timeout_s: float) -> Opened:
    if address is None:
        return Opened(make())
    until = time.monotonic() + timeout_s
    _greet(address, timeout_s)
    one_by_one = _lock_of(address)  # so that the new socket is the one that was not there before
    if not one_by_one.acquire(timeout=max(0.0, until - time.monotonic())):
        raise StoreGone(f"the store at {written(address)} did not answer within {timeout_s:g} s")
    try:
        before = connections_to(address[1])
        try:
            store = make()
        except RuntimeError as error:
            raise StoreGone(f"no connection to the store at {written(address)}: {first_line(error)}") from error
        new = {key: own for key, own in connections_to(address[1]).items() if key not in before}
    finally:
        one_by_one.release()
    for descriptor, _ in new:
        # If the host opened a connection at the same moment, that one gets the limit as well. This matters only when
        # the store is silent for that long: torch waits for keys in another way.
        with suppress(OSError):  # it was the host's, and is closed again
            limit(descriptor, timeout_s)
    if len(new) != 1:
        return Opened(store)
    (((descriptor, _), own),) = new.items()
    return Opened(store, descriptor, own)


def _greet(address: tuple[str, int], timeout_s: float) -> None:
    """Check that the process behind an address listens and runs, before torch's own client connects.

    Notes
    -----
    That client retries a refused port for its whole timeout and prints pages of C++ frames. Every kind of server closes
    a connection that ends before a first byte; a stopped process does not.
    """
    at = f"the store at {written(address)}"
    try:
        with socket.create_connection(address, timeout=timeout_s) as connection:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(256):
                pass
    except (ConnectionRefusedError, ConnectionResetError) as error:
        raise StoreGone(f"{at} is gone: the connection was refused") from error
    except TimeoutError as error:
        raise StoreGone(f"{at} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise StoreGone(f"{at} cannot be reached: {error.strerror or error}") from error


_LOCKS: WeakValueDictionary[tuple[str, int], threading.Lock] = WeakValueDictionary()
"""One lock per store: a store whose process is stopped must not delay connections to others."""
_LOCKS_LOCK = threading.Lock()


def _lock_of(address: tuple[str, int]) -> threading.Lock:
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(address, threading.Lock())


def _is_missing(error: RuntimeError) -> bool:
    # Errors of pybind11 for a store written in Python, and of c10d for a kind without clone().
    text = str(error).lower()
    return isinstance(error, NotImplementedError) or "pure virtual" in text or "not implemented" in text
