"""The control plane: a store that all ranks reach, and who they are. Bulk data never goes through it."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from eplb_core.errors import ConfigError
from eplb_core.metadata import read_boot_id

T = TypeVar("T")

_HELLO = struct.Struct("!B64s64s")  # used host length, host, boot id; fixed size, for one all-gather of bytes
_LOOPBACK = "127.0.0.1"


class StoreGone(Exception):
    """The store did not answer. Internal: callers turn it into `StoreLostError` with the layers in doubt."""


class StoreClient:
    """One connection to the store, in one namespace, for one thread.

    A torch client blocks in ``recv`` for as long as the store's host is silent, whatever its timeout says, so the
    socket itself gets a receive limit; after it ran out the connection is out of step and is not used again.

    Parameters
    ----------
    store : torch.distributed.Store
        A connection of this client's own.
    prefix : str
        Namespace of its keys.
    timeout_s : float
        Limit of one operation, seconds.
    """

    def __init__(self, store: Any, prefix: str, timeout_s: float) -> None:
        import torch.distributed as dist

        self.prefix = prefix
        self._timeout_s = timeout_s
        self._gone: str | None = None
        self.own: set[str] = set()
        """Keys that this client set and nobody else writes."""
        self.shared: set[str] = set()
        """Keys that any member may write, as far as this client knows them."""
        self._store = dist.PrefixStore(prefix, store)
        _limit_sockets(store, timeout_s)

    def set(self, key: str, value: bytes) -> None:
        """Store a value. A lost store shows at the next operation that reads."""
        self.own.add(key)
        # torch's stub asks for str, the binding takes bytes; here and below
        self._call(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def read(self, key: str) -> bytes | None:
        """Return the value of a key, or None while there is none."""
        return self._call(lambda: self._store.get(key) if self._store.check([key]) else None)

    def exists(self, *keys: str) -> bool:
        """Do all of these keys exist?"""
        return self._call(lambda: bool(self._store.check(list(keys))))

    def read_many(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that are known to exist, in one round trip."""
        return self._call(lambda: list(self._store.multi_get(keys)))

    def add(self, key: str) -> int:
        """Count one up and return the count. Never retried: a second add would count a rank twice."""
        self.shared.add(key)
        return self._call(lambda: int(self._store.add(key, 1)))

    def put_first(self, key: str, value: bytes) -> bytes:
        """Store a value unless the key has one; return what stands there. The only form of compare-and-set used.

        (On a missing key a non-empty expectation comes back as if it had been stored.)
        """
        self.shared.add(key)
        return self._call(lambda: bytes(self._store.compare_set(key, "", value)))  # type: ignore[arg-type]

    def delete(self, *keys: str) -> None:
        """Delete keys; missing ones are no error."""
        self.own.difference_update(keys)
        self.shared.difference_update(keys)
        for key in keys:
            self._call(lambda key=key: self._store.delete_key(key))  # type: ignore[misc]

    def _call(self, operation: Callable[[], T]) -> T:
        if self._gone is not None:
            raise StoreGone(self._gone)
        try:
            return operation()
        except RuntimeError as error:  # DistNetworkError, DistStoreError; older torch raises plain RuntimeError
            self._gone = str(error).splitlines()[0]
            if "timeout" in self._gone.lower():
                self._gone = f"it did not answer within {self._timeout_s:g} s ({self._gone})"
            raise StoreGone(self._gone) from error


class ControlPlane:
    """How the ranks of one expert-parallel group talk about a rearrangement.

    Build it with `from_process_group` or `from_store`. One control plane serves several communicators, told apart by
    name.

    Parameters
    ----------
    store : torch.distributed.Store
        Reached by every rank.
    rank, world_size : int
        This rank and the number of ranks, within the expert-parallel group.
    host : str or None
        Address at which the other ranks reach this one; None is loopback, refused at connect when ranks turn out to be
        on several hosts.
    hosts_store : bool
        Does this process host the store? It then leaves last.
    """

    def __init__(self, store: Any, rank: int, world_size: int, host: str | None, hosts_store: bool) -> None:
        if not (_is_number(rank) and _is_number(world_size)):
            raise ConfigError("EPLB-C009", problem=f"rank={rank!r} and world_size={world_size!r} should be integers")
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError("EPLB-C009", problem=f"rank {rank} does not fit world size {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.host = host or _LOOPBACK
        self.host_given = host is not None
        self.hosts_store = hosts_store
        self.boot_id = read_boot_id()
        self._store = store
        self._epochs: dict[str, int] = {}

    @classmethod
    def from_store(cls, store: Any, *, rank: int, world_size: int, host: str | None = None) -> ControlPlane:
        """Use a store of the host's; elastic hosts need no default group for it.

        Parameters
        ----------
        store : torch.distributed.Store
            Reached by every rank. It must outlive the communicators.
        rank, world_size : int
            Within the expert-parallel group.
        host : str or None
            Address at which the other ranks reach this one; None is loopback.

        Returns
        -------
        ControlPlane

        Raises
        ------
        ConfigError
            No store, or the rank is none of a group of that size (EPLB-C009).
        """
        import torch.distributed as dist

        if not isinstance(store, dist.Store):
            problem = f"expected a torch.distributed.Store, got {type(store).__name__}"
            raise ConfigError("EPLB-C009", problem=problem)
        return cls(store, rank, world_size, host, hosts_store=False)

    @classmethod
    def from_process_group(cls, group: Any, host: str | None = None, timeout_s: float = 60.0) -> ControlPlane:
        """Use a group once, to agree on a store of our own; collective over the group.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup
            The expert-parallel group; it must move small CPU tensors. It is never used again.
        host : str or None
            Address at which the other ranks reach this one. Needed when the ranks are on several hosts; the store
            listens at group rank 0's.
        timeout_s : float
            Limit of each of the two collectives and of reaching the store, seconds.

        Returns
        -------
        ControlPlane

        Raises
        ------
        ConfigError
            The group moves no CPU tensors, the ranks are on several hosts and one gave no `host`, or the store cannot
            be reached (EPLB-C009).
        """
        import torch
        import torch.distributed as dist

        if not all(hasattr(group, method) for method in ("rank", "size", "allgather", "broadcast")):
            problem = f"expected a torch.distributed.ProcessGroup, got {type(group).__name__}"
            raise ConfigError("EPLB-C009", problem=problem)
        rank, world_size = int(group.rank()), int(group.size())
        if host is not None and len(host.encode()) > 64:
            raise ConfigError("EPLB-C009", problem=f"host={host!r} is longer than 64 bytes")
        hello = _HELLO.pack(len((host or "").encode()), (host or "").encode(), read_boot_id().encode()[:64])
        mine = torch.frombuffer(bytearray(hello), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(world_size)]
        limit = timedelta(seconds=timeout_s)
        _collective(lambda: group.allgather([everyone], [mine]).wait(limit))
        hosts, boots = [], []
        for record in everyone:
            length, raw, boot = _HELLO.unpack(bytes(record.tolist()))
            hosts.append(raw[:length].decode())
            boots.append(boot)
        if len(set(boots)) > 1 and not all(hosts):
            silent = [r for r, given in enumerate(hosts) if not given]
            raise ConfigError(
                "EPLB-C009",
                problem=f"the ranks are on {len(set(boots))} hosts, and rank(s) {silent} gave no host=",
                detail="Give host=, the address at which the other ranks reach this one.",
            )
        address = hosts[0] or _LOOPBACK
        port = torch.zeros(1, dtype=torch.int64)
        store: Any = None
        if rank == 0:
            # A listener of our own: torch's would listen on every interface of the machine.
            listener = socket.create_server((address, 0), family=_family(address), backlog=world_size + 16)
            port[0] = listener.getsockname()[1]
            store = dist.TCPStore(
                address,
                int(port[0]),
                is_master=True,
                wait_for_workers=False,
                timeout=limit,
                master_listen_fd=listener.detach(),
            )
        options = dist.BroadcastOptions()
        options.rootRank = 0
        _collective(lambda: group.broadcast([port], options).wait(limit))
        if store is None:
            try:
                store = dist.TCPStore(address, int(port[0]), is_master=False, wait_for_workers=False, timeout=limit)
            except RuntimeError as error:
                problem = f"rank {rank} cannot reach the store at {address}:{int(port[0])}"
                raise ConfigError("EPLB-C009", problem=problem) from error
        return cls(store, rank, world_size, host, hosts_store=rank == 0)

    def client(self, prefix: str, timeout_s: float) -> StoreClient:
        """Open a connection for one thread, in one namespace."""
        return StoreClient(self.connection(), prefix, timeout_s)

    def connection(self) -> Any:
        """Open a raw store connection of its own (a blocked wait holds its connection)."""
        try:
            return self._store.clone()
        except RuntimeError as error:
            raise StoreGone(str(error).splitlines()[0]) from error

    def next_epoch(self, name: str) -> int:
        """Count a communicator's connects up; ranks make the same calls, so they count the same."""
        self._epochs[name] = self._epochs.get(name, 0) + 1
        return self._epochs[name]

    def start_epochs_at(self, name: str, epoch: int) -> None:
        """Go on counting where another control plane stopped (after the store was lost)."""
        self._epochs[name] = max(epoch, self._epochs.get(name, 0))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _collective(operation: Callable[[], object]) -> None:
    try:
        operation()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("EPLB-C009", problem=f"the process group moved no small CPU tensor: {reason}") from error


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]


def _limit_sockets(store: Any, timeout_s: float) -> None:
    """Give every connection of this process to the store's address a receive and a send limit.

    torch exposes no descriptor, so they are found by their peer; on systems without /proc nothing is limited and the
    operating system's own limits apply.
    """
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    table = Path("/proc/self/fd")
    for name in os.listdir(table) if table.exists() else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with connection:
            try:
                if connection.getpeername()[1] == store.port:
                    # options belong to the socket, not to this duplicate of its descriptor
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            except (OSError, IndexError):
                continue


class Deadline:
    """A limit in time, shared by the steps of one wait."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.timeout_s - self.elapsed_s)

    @property
    def over(self) -> bool:
        """Has it run out?"""
        return self.elapsed_s >= self.timeout_s
