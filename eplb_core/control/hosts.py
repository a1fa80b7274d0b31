"""Which ranks share a host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
"""Where Linux offers one."""


def node_ids(boot_ids: Sequence[str]) -> tuple[int, ...]:
    """Give every host of the ranks a number.

    Parameters
    ----------
    boot_ids : sequence of str
        By rank; see `read_boot_id`.

    Returns
    -------
    tuple of int
        By rank, equal for equal boot ids, counted from 0 in order of first appearance.
    """
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(boot_id, len(numbers)) for boot_id in boot_ids)


def read_boot_id() -> str:
    """Return a string that is equal for all processes of one host until it restarts.

    Containers of one host share it on Linux, whatever their host names; where the kernel offers none, it is the host's
    name.
    """
    try:
        boot_id = BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        boot_id = ""
    return boot_id or f"host {socket.gethostname()}"
