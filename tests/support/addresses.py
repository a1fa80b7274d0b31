"""Addresses and ports for tests that listen."""

from __future__ import annotations

import os
import socket

NOT_OURS = "203.0.113.7"
"""An address for documentation (RFC 5737), which nobody has."""


def free_range(count: int) -> tuple[int, int]:
    """Find ports in a row that nobody has now, below those that the system gives to connections."""
    first = 20000 + os.getpid() % 500 * 20  # tests of several workers look in different places
    for low in range(first, 32000 - count, count):
        try:
            for listener in [socket.create_server(("127.0.0.1", low + place)) for place in range(count)]:
                listener.close()
        except OSError:
            continue
        return low, low + count - 1
    raise OSError("no free ports")
