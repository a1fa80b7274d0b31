"""Makes a store of our own from a process group, on every rank or on none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from eplb_core.control.hosts import Location, read_boot_id, read_network_id, why_unreachable
from eplb_core.control.listen import Ports, check_listening, checked_ports, listen
from eplb_core.control.opening import open_client
from eplb_core.control.presence import Presence
from eplb_core.control.renewal import Standby, host_store
from eplb_core.control.sockets import written
from eplb_core.control.store import StoreGone, first_line
from eplb_core.errors import ConfigError

_RECORD_NBYTES = 1024  # the same in all releases: gloo aborts the process on a message longer than its receive
_RECORD_VERSION = 1
_TOLD = 4  # ranks whose refusals are written out


@dataclass(frozen=True, eq=False)
class Founded:
    """The result on one rank, once every rank has reached the store.

    Parameters
    ----------
    store : torch.distributed.Store
        This rank's first connection to it; at rank 0, the store itself.
    rank, world_size : int
        This rank's number within the group, and the size of the group.
    location : Location
        Where this rank listens.
    presence : Presence or None
        Watches which other ranks are there; at rank 0 only.
    hosts : mapping of int to str
        Address of every rank.
    standby : Standby or None
        This rank's port for a later store.
    standby_ports : mapping of int to int
        Those of all ranks that keep one.
    """

    store: Any
    rank: int
    world_size: int
    location: Location
    presence: Presence | None
    hosts: Mapping[int, str]
    standby: Standby | None
    standby_ports: Mapping[int, int]


def found(group: Any, host: object, ports: object, timeout_s: float, *, standby: bool = False) -> Founded:
    """Found a store at group rank 0 and connect every rank to it; collective, on all ranks or on none.

    Notes
    -----
    A rank that fails puts its error into what is gathered, and every rank raises that error with the rank's number
    (EPLB-C009). ``timeout_s`` limits each of the two gatherings; the local work before each takes at most half of it.
    """
    rank, world_size = int(group.rank()), int(group.size())
    store: Any = None
    kept: Standby | None = None
    try:
        refusal: ConfigError | None = None
        mine: dict[str, Any] = {}
        try:
            location, allowed = locate(host, ports, timeout_s / 2)  # the others wait for this rank no longer than that
            mine = {"location": location.to_json(), "ports": allowed, "port": 0}
            if rank == 0:
                store, mine["port"] = _hosted(location.host, allowed, world_size, timeout_s)
            kept, mine["standby"] = _kept(location.host, allowed, world_size) if standby else (None, 0)
        except ConfigError as error:
            refusal = error
        records = _gather(group, mine, refusal, timeout_s, "the process group moved no small CPU tensor")
        locations = {peer: Location.from_json(record["location"]) for peer, record in enumerate(records)}
        ports_kept = {peer: int(record["standby"]) for peer, record in enumerate(records) if record.get("standby")}
        _check_all(locations, [record["ports"] for record in records], set(ports_kept))
        port = int(records[0]["port"])
        mine = {"address": ""}
        try:
            if rank != 0:
                opened = open_client(locations[0].host, port, timeout_s / 2)
                store, mine["address"] = opened.store, opened.address
        except StoreGone as gone:
            at = written((locations[0].host, port))
            refusal = ConfigError("EPLB-C009", problem=f"it cannot reach the store of rank 0 at {at}: {gone}")
        records = _gather(group, mine, refusal, timeout_s, "a rank was lost before all had reached the store")
    except BaseException:
        store = None  # the frames of the error would keep it alive
        kept = None  # which gives its port up
        raise
    addresses = {peer: str(record["address"]) for peer, record in enumerate(records)}
    hosts = {peer: location.host for peer, location in locations.items()}
    presence = Presence(port, addresses) if rank == 0 else None
    return Founded(store, rank, world_size, locations[rank], presence, hosts, kept, ports_kept)


def locate(host: object, ports: object, timeout_s: float) -> tuple[Location, Ports | None]:
    """Check the address at which this rank is to listen, and return its location; see `check_listening`."""
    allowed = checked_ports(ports)
    where, loopback = check_listening(host, allowed, timeout_s)
    return Location(read_boot_id(), read_network_id(), where, host is not None, loopback), allowed


def _hosted(host: str, ports: Ports | None, world_size: int, timeout_s: float) -> tuple[Any, int]:
    listener = listen(host, ports, backlog=2 * world_size + 16)  # every rank knocks, then connects
    port = int(listener.getsockname()[1])
    return host_store(listener, host, timeout_s), port


def _kept(host: str, ports: Ports | None, world_size: int) -> tuple[Standby, int]:
    standby = Standby(host, ports, backlog=2 * world_size + 16)
    return standby, standby.port


def _check_all(locations: Mapping[int, Location], ports: Sequence[Any], standby: set[int]) -> None:
    """Check all locations together; every rank comes to the same answer."""
    problem = why_unreachable(locations)
    if problem is not None:
        detail = "Give host=, the address at which the other ranks reach this one."
        raise ConfigError("EPLB-C009", problem=problem, detail=detail)
    users = Counter((locations[rank].network_id, tuple(each)) for rank, each in enumerate(ports) if each is not None)
    for (network, (low, high)), count in users.items():
        needed = count + (locations[0].network_id == network and ports[0] == [low, high])
        needed += sum(locations[rank].network_id == network and ports[rank] == [low, high] for rank in standby)
        if needed > high - low + 1:
            problem = f"ports={(low, high)} are too few for {count} rank(s) of one host, which need {needed}"
            raise ConfigError(
                "EPLB-C009",
                problem=problem,
                detail="A port for each, one for the store, and one for each with standby.",
            )


def _gather(
    group: Any, mine: Mapping[str, Any], refusal: ConfigError | None, timeout_s: float, failure: str
) -> list[dict[str, Any]]:
    """Exchange one record per rank; raise on all ranks when some refuse."""
    import torch

    sent = torch.frombuffer(bytearray(_pack(mine, refusal)), dtype=torch.uint8)
    everyone = [torch.empty_like(sent) for _ in range(int(group.size()))]
    try:
        group.allgather([everyone], [sent]).wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ConfigError("EPLB-C009", problem=f"{failure}: {first_line(error)}") from (refusal or error)
    records = [_unpack(bytes(record.tolist()), rank) for rank, record in enumerate(everyone)]
    refusals = [f"rank {rank}: {record['refusal']}" for rank, record in enumerate(records) if "refusal" in record]
    if refusals:
        more = f"; and {len(refusals) - _TOLD} more" if len(refusals) > _TOLD else ""
        raise ConfigError("EPLB-C009", problem="; ".join(refusals[:_TOLD]) + more) from refusal
    return records


def _pack(mine: Mapping[str, Any], refusal: ConfigError | None) -> bytes:
    document = {"version": _RECORD_VERSION, **mine}
    if refusal is not None:
        document = {"version": _RECORD_VERSION, "refusal": str(refusal.fields["problem"])}
    while len(packed := json.dumps(document, ensure_ascii=False).encode()) > _RECORD_NBYTES:
        document["refusal"] = document["refusal"][: -max(8, len(document["refusal"]) // 8)]
    return packed.ljust(_RECORD_NBYTES)


def _unpack(packed: bytes, rank: int) -> dict[str, Any]:
    try:
        document = json.loads(packed)
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("version") != _RECORD_VERSION:
        problem = f"rank {rank} sent a record that this release of eplb-core does not read"
        raise ConfigError("EPLB-C009", problem=problem, detail="Install one version on all ranks.")
    return document
