"""Network namespaces for ranks, as containers have them: a rank moves into one of its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

import pytest

_CLONE_NEWNET = 0x40000000


def move_into_a_network_of_its_own(*addresses: str) -> None:
    """Leave the network of this process' parent for an empty one; what is connected stays so.

    Its loopback is up, and has these addresses beside its own.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    ip("link", "set", "lo", "up")
    for address in addresses:
        ip("addr", "add", f"{address}/32", "dev", "lo")


def ip(*arguments: str) -> None:
    """Run iproute2 in the network of this process."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr}")


def why_there_are_none() -> str | None:
    """Tell why this process cannot make networks of its own; None when it can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs iproute2 and unshare"
    made = subprocess.run(
        ["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True, text=True, timeout=20, check=False
    )
    return None if made.returncode == 0 else f"may not make network namespaces: {made.stderr.strip()}"


def needs_namespaces(test):
    """Skip a test, visibly, where ranks cannot move into networks of their own."""
    why = why_there_are_none()
    return pytest.mark.skipif(why is not None, reason=str(why))(test)
