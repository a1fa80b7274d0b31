"""How much memory this host has left, so that a job too large is refused instead of killed half-way."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def available_nbytes() -> int | None:
    """Return the bytes that new processes can take without swapping; None where the system does not say.

    Returns
    -------
    int or None
        The kernel's estimate, or the rest of this control group's limit if that is smaller.
    """
    limits: list[int] = []
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10)
    with suppress(OSError, ValueError):  # "max" means no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        limits.append(max(0, limit - used))
    return min(limits, default=None)
