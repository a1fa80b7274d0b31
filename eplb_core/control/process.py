"""Which process a rank is: tells it apart from every other, and finds out whether it still runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from eplb_core.control.hosts import read_boot_id

_OPEN: set[str] = set()
"""Tokens of this process that are in use."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One use of a rank's number by one process.

    Parameters
    ----------
    boot_id, pid_namespace : str
        Machine and namespace in which its process number is valid.
    pid : int
        Process number.
    started : str
        When the process began, in clock ticks since the boot; process numbers are reused.
    token : str
        Random; one process may use a rank's number several times, one after another.
    """

    boot_id: str
    pid_namespace: str
    pid: int
    started: str
    token: str

    @classmethod
    def mine(cls) -> ProcessIdentity:
        """Make the identity of this process, in use until `release`."""
        identity = cls(read_boot_id(), _pid_namespace(), os.getpid(), _started(os.getpid()), token_hex(8))
        _OPEN.add(identity.token)
        return identity

    def release(self) -> None:
        """Note that the rank's number is no longer in use."""
        _OPEN.discard(self.token)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProcessIdentity:
        """Read what `to_json` made; KeyError, TypeError or ValueError for anything else."""
        return cls(
            str(data["boot_id"]),
            str(data["pid_namespace"]),
            int(data["pid"]),
            str(data["started"]),
            str(data["token"]),
        )

    def in_use(self) -> bool | None:
        """Does the process run, with the number in use? None where that cannot be seen from here."""
        if (self.boot_id, self.pid_namespace) != (read_boot_id(), _pid_namespace()) or not self.started:
            return None
        if self.pid == os.getpid() and self.started == _started(self.pid):
            return self.token in _OPEN
        return _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid}"


def _started(pid: int) -> str:
    """Return when a process began; empty when there is none, when it is a zombie, or without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
