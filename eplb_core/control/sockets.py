"""Sockets that libraries opened in this process: found by port, given limits, asked for their peers."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

_TABLE = Path("/proc/self/fd")


def connections_to(port: int) -> dict[tuple[int, int], str]:
    """Return this process's connections to a port: the address of this end, by descriptor and inode.

    Notes
    -----
    Descriptor numbers are reused at once, inodes not for a long time. Empty on systems without /proc.
    """
    return {key: written(own) for key, own, peer in _connections() if peer[1] == port and own[1] != port}


def connected_at(port: int) -> frozenset[str]:
    """Return the addresses of the peers connected to a port on which this process listens."""
    return frozenset(written(peer) for _, own, peer in _connections() if own[1] == port)


def limit(descriptor: int, timeout_s: float) -> None:
    """Limit each receive and send on a connection to so many seconds."""
    seconds = max(timeout_s, 1e-3)  # 0 would be no limit
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with _borrowed(descriptor) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def written(address: tuple[object, ...]) -> str:
    """Write an address as ``host:port``, in the same form for IPv4 and IPv4-mapped IPv6."""
    host = str(address[0]).removeprefix("::ffff:")
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def _connections() -> Iterator[tuple[tuple[int, int], tuple[object, ...], tuple[object, ...]]]:
    """Yield the TCP connections of this process: descriptor and inode, and the address of either end."""
    for name in os.listdir(_TABLE) if _TABLE.exists() else ():
        descriptor = int(name)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with _borrowed(descriptor) as connection:
                own, peer = connection.getsockname(), connection.getpeername()
        except OSError:  # closed meanwhile, or not connected
            continue
        if isinstance(own, tuple) and isinstance(peer, tuple) and len(own) >= 2 and len(peer) >= 2:
            yield (descriptor, status.st_ino), own, peer


def _borrowed(descriptor: int) -> socket.socket:
    # A duplicate: options and addresses belong to the socket, and closing the duplicate does not close the owner's.
    return socket.socket(fileno=os.dup(descriptor))
