"""Another process's memory: read it, and know with every read that it is still the process it was."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Parts = npt.NDArray[np.int64]
"""``[num_parts, 2]``: address and bytes, laid out as an array of ``struct iovec``."""

TOKEN_NBYTES = 16
_MAX_PARTS = 1024  # IOV_MAX on Linux
_MAX_NBYTES = 64 << 20  # of one call: about 10 ms, after which the caller may look around

_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


class StrangerError(Exception):
    """The process of that number is not the one that gave it."""


class Token:
    """Random bytes in this process's memory, by which others recognise it."""

    def __init__(self) -> None:
        self.value = os.urandom(TOKEN_NBYTES)
        self._held = np.frombuffer(self.value, np.uint8)

    @property
    def address(self) -> int:
        """Where they lie for as long as this object lives."""
        return int(self._held.ctypes.data)


class ProcessMemory:
    """The memory of a process on this host, in this PID namespace.

    Parameters
    ----------
    pid : int
        Its number, which the kernel gives to another process once this one is gone.
    token_address, token : int, bytes
        What it said is in its memory. Every system call reads it first: the kernel looks the process up once per call,
        so bytes that came along with the token came from the process that holds it.
    """

    def __init__(self, pid: int, token_address: int, token: bytes) -> None:
        self.pid = pid
        self._token = token
        self._seen = np.zeros(TOKEN_NBYTES, np.uint8)
        self._token_there = np.array([[token_address, TOKEN_NBYTES]], np.int64)
        self._token_here = np.array([[self._seen.ctypes.data, TOKEN_NBYTES]], np.int64)

    def check(self) -> None:
        """Read the token alone.

        Raises
        ------
        OSError, StrangerError
            See `read`.
        """
        self._call(np.empty((0, 2), np.int64), np.empty((0, 2), np.int64))

    def read(self, remote: Parts, local: Parts, between: Callable[[], None]) -> None:
        """Copy parts of its memory into parts of ours.

        Parameters
        ----------
        remote, local : Parts
            As many parts, of the same bytes each.
        between : callable
            Called before each system call; what it raises ends the read.

        Raises
        ------
        OSError
            The kernel refused: ESRCH, it is gone; EPERM, not permitted; EFAULT, not mapped there.
        StrangerError
            The number belongs to another process by now.
        """
        nbytes = local[:, 1]
        ends = np.cumsum(nbytes)
        done, total = 0, int(nbytes.sum())
        while done < total:
            between()
            first = int(np.searchsorted(ends, done, side="right"))
            enough = int(np.searchsorted(ends, done + _MAX_NBYTES)) + 1
            last = min(first + _MAX_PARTS - 1, enough, len(ends))
            theirs, ours = remote[first:last].copy(), local[first:last].copy()
            skip = done - int(ends[first] - nbytes[first])
            over = max(0, int(ends[last - 1]) - done - _MAX_NBYTES)
            for parts in (theirs, ours):
                parts[0] += (skip, -skip)
                parts[-1, 1] -= over
            got = self._call(theirs, ours)
            if not got:  # the token was read and what follows it was not: the first of it is not mapped
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            done += got  # a call may stop short at a page that is not mapped; the next one says so

    def _call(self, theirs: Parts, ours: Parts) -> int:
        """Read the token and these parts; return the bytes of the parts that were read."""
        self._seen.fill(0)
        remote = np.ascontiguousarray(np.concatenate([self._token_there, theirs]))
        local = np.ascontiguousarray(np.concatenate([self._token_here, ours]))
        got = int(_readv(self.pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0))
        if got < 0:
            code = ctypes.get_errno()
            if code == errno.EFAULT:  # nothing at the token's address: whoever this is, it never was ours
                raise StrangerError(f"process {self.pid} has nothing where its token should be")
            raise OSError(code, os.strerror(code))
        if got < TOKEN_NBYTES or self._seen.tobytes() != self._token:
            raise StrangerError(f"process {self.pid} is another one by now")
        return got - TOKEN_NBYTES
