"""The control plane: a store that all ranks reach, and who they are. Bulk data never goes through it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from eplb_core.control.hosts import read_boot_id
from eplb_core.control.store import StoreClient, StoreGone
from eplb_core.errors import ConfigError

_HELLO = struct.Struct("!B64s64s")  # used host length, host, boot id; fixed size, for one all-gather of bytes


_LOOPBACK = "127.0.0.1"


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
    private : bool
        Was the store made for this group? Then nothing in it is older than the group.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, host: str | None, hosts_store: bool, *, private: bool = False
    ) -> None:
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
        self.private = private
        self._names: set[str] = set()
        self._names_lock = threading.Lock()

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
        return cls(store, rank, world_size, host, hosts_store=rank == 0, private=True)

    def client(self, prefix: str, timeout_s: float) -> StoreClient:
        """Open a connection for one thread, in one namespace."""
        return StoreClient(self.connection(), prefix, timeout_s)

    def connection(self) -> Any:
        """Open a raw store connection of its own (a blocked wait holds its connection)."""
        try:
            return self._store.clone()
        except RuntimeError as error:
            raise StoreGone(str(error).splitlines()[0]) from error

    def claim(self, name: str) -> None:
        """Take a communicator's name.

        Raises
        ------
        ConfigError
            One of that name is open on this control plane (EPLB-C010).
        """
        with self._names_lock:
            if name in self._names:
                raise ConfigError("EPLB-C010", problem=f"a communicator named {name!r} is open on this control plane")
            self._names.add(name)

    def release(self, name: str) -> None:
        """Give a communicator's name back."""
        with self._names_lock:
            self._names.discard(name)


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
