"""What the process does on a signal stays as the host has set it, whatever a library does while it loads."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SA_RESTORER = 0x04000000  # comes with every set, and says nothing


class _Action(ctypes.Structure):
    """``struct sigaction``, as the C libraries of Linux lay it out."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * (128 // ctypes.sizeof(ctypes.c_ulong))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )

    @property
    def meaning(self) -> tuple[int | None, int, int]:
        """What tells two dispositions apart; beyond its first word the C library leaves the mask as it was."""
        return self.handler, self.mask[0], self.flags & ~_SA_RESTORER


@contextmanager
def unchanged_signals() -> Iterator[None]:
    """Put back, at the end, every disposition that changed meanwhile.

    UCX takes SIGHUP for its debugger when it is loaded, and, where it is told to, signals of errors: a host that stops
    or reloads on SIGHUP would not hear it any more. Asked of the C library, for Python's `signal` shows its own
    handlers only, and sets them in the main thread only.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    before = _dispositions(sigaction)
    try:
        yield
    finally:
        for number, now in _dispositions(sigaction).items():
            if now.meaning != before[number].meaning:
                sigaction(number, ctypes.byref(before[number]), None)


def _dispositions(sigaction: ctypes._NamedFuncPointer) -> dict[int, _Action]:
    found = {}
    for number in sorted(signal.valid_signals()):
        action = _Action()
        if sigaction(int(number), None, ctypes.byref(action)) == 0:
            found[int(number)] = action
    return found
