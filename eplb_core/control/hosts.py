"""Where each rank is: which ranks share a machine, and which reach each other over loopback."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
"""File of the boot id, on Linux."""
NETWORK_NAMESPACE = Path("/proc/self/ns/net")
"""A link whose target names the network namespace of this process, on Linux."""


@dataclass(frozen=True)
class Location:
    """Where a rank is, as far as the others need to know.

    Parameters
    ----------
    boot_id : str
        Equal for ranks on one machine; see `read_boot_id`.
    network_id : str
        Equal for ranks that reach each other over loopback; see `read_network_id`.
    host : str
        Address at which it listens.
    host_given : bool
        Did the host engine name that address? Otherwise it is loopback.
    loopback : bool
        Is it an address that only its own network namespace reaches?
    """

    boot_id: str
    network_id: str
    host: str
    host_given: bool
    loopback: bool

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes, of plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Location:
        """Read what another rank wrote."""
        return cls(
            boot_id=str(document["boot_id"]),
            network_id=str(document["network_id"]),
            host=str(document["host"]),
            host_given=bool(document["host_given"]),
            loopback=bool(document["loopback"]),
        )


def why_unreachable(locations: Mapping[int, Location]) -> str | None:
    """Return why some ranks cannot reach each other at their addresses, or None when no reason is known.

    Notes
    -----
    ``locations`` is the same on all ranks, and so is the answer.
    """
    networks = {place.network_id for place in locations.values()}
    if len(networks) < 2:
        return None
    machines = len({place.boot_id for place in locations.values()})
    where = f"the ranks are on {machines} hosts"
    if machines == 1:
        where = f"the ranks are in {len(networks)} network namespaces (containers) of one host"
    silent = sorted(rank for rank, place in locations.items() if not place.host_given)
    if silent:
        return f"{where}, and rank(s) {silent} gave no host="
    local = {rank: place.host for rank, place in sorted(locations.items()) if place.loopback}
    if local:
        given = ", ".join(f"rank {rank} gave host={host!r}" for rank, host in list(local.items())[:4])
        return f"{where}, and {given}, which is loopback: the others do not reach it"
    return None


def node_ids(boot_ids: Sequence[str]) -> tuple[int, ...]:
    """Return a host number for each rank: equal for equal boot ids, from 0 in order of first appearance."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(boot_id, len(numbers)) for boot_id in boot_ids)


def read_boot_id() -> str:
    """Return a string that is equal for all processes of one host until it restarts.

    Notes
    -----
    On Linux, containers of one host share it, whatever their host names are. Where the kernel offers none, the host's
    name is taken.
    """
    try:
        boot_id = BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        boot_id = ""
    return boot_id or f"host {socket.gethostname()}"


def read_network_id() -> str:
    """Return a string that is equal for all processes that reach each other over loopback.

    Notes
    -----
    Two containers of one host have one boot id and usually a loopback each. Where the kernel names no network
    namespace, all processes of a host count as one.
    """
    try:
        namespace = os.readlink(NETWORK_NAMESPACE)
    except OSError:
        namespace = ""
    return f"{read_boot_id()} {namespace}".rstrip()
