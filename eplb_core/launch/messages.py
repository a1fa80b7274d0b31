"""Messages of a rank to its launcher, each after its length: a reader never waits for the rest of one.

Notes
-----
`multiprocessing.connection.Connection.recv` does wait: a rank that is stopped in the middle of a message would hold its
launcher beyond every limit.
"""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")


def send_message(fd: int, message: Any) -> None:
    """Write a whole message to a pipe or socket that blocks."""
    data = pickle.dumps(message)
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(fd, left) :]


class MessageReader:
    """Puts messages together from whatever pieces arrive."""

    def __init__(self) -> None:
        self._pieces = bytearray()

    def take(self, piece: bytes) -> list[Any]:
        """Add a piece, and return the messages that are complete now."""
        self._pieces += piece
        messages = []
        while len(self._pieces) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._pieces)[0]
            if len(self._pieces) < end:
                break
            messages.append(pickle.loads(self._pieces[_LENGTH.size : end]))  # noqa: S301 - from a process of ours
            del self._pieces[:end]
        return messages
