"""Memory that a transfer may still write; it is kept until the process ends."""

from __future__ import annotations

import threading

_KEPT: list[object] = []
_LOCK = threading.Lock()


def keep_forever(owner: object) -> None:
    """Keep an object, and whatever memory it holds, for the life of the process (I11)."""
    with _LOCK:
        _KEPT.append(owner)


def kept() -> int:
    """Return how many objects are kept."""
    return len(_KEPT)
