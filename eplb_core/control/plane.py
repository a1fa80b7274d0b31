"""The control plane: a store that all ranks reach, and this rank's number. Bulk data never goes through it."""

from __future__ import annotations

from typing import Any

from eplb_core.control.claims import Claims
from eplb_core.control.founding import found, locate
from eplb_core.control.hosts import Location
from eplb_core.control.listen import Ports, checked_ports
from eplb_core.control.opening import Opened, address_of, checked_limit, open_again
from eplb_core.control.presence import Presence
from eplb_core.control.renewal import Renewable, Standby
from eplb_core.control.store import StoreClient, StoreGone
from eplb_core.errors import ConfigError

_TIMEOUT_S = 60.0


class ControlPlane(Renewable):
    """How the ranks of one expert-parallel group talk about a rearrangement.

    Build it with `from_process_group` or `from_store`. One control plane serves several communicators, told apart by
    name. Several threads may use it.

    Parameters
    ----------
    store : torch.distributed.Store
        Reached by every rank.
    rank, world_size : int
        This rank and the number of ranks, within the expert-parallel group.
    host : str or None
        Address at which the other ranks reach this one; None is loopback, refused at connect when ranks turn out to be
        on several hosts or in several containers.
    hosts_store : bool
        Does this process host the store? It then leaves last.
    ports : (int, int) or None
        Lowest and highest port to listen on; None lets the system choose.
    timeout_s : float
        Limit of opening a connection, and of an operation on it, where a call names none; seconds.
    location : Location or None
        Where this rank is and listens; None finds it out, and checks that this rank can listen there.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        host: str | None,
        hosts_store: bool,
        ports: tuple[int, int] | None = None,
        timeout_s: float = _TIMEOUT_S,
        location: Location | None = None,
    ) -> None:
        if not (_is_number(rank) and _is_number(world_size)):
            raise ConfigError("EPLB-C009", problem=f"rank={rank!r} and world_size={world_size!r} should be integers")
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError("EPLB-C009", problem=f"rank {rank} does not fit world size {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.hosts_store = hosts_store
        self.timeout_s = checked_limit(timeout_s)
        self.ports: Ports | None = checked_ports(ports)
        self.location = location or locate(host, ports, self.timeout_s)[0]
        self._store = store
        self._presence: Presence | None = None
        self._is_own = False  # True for a store that `from_process_group` made: it holds no other group's keys
        self._claims = Claims()
        self._hosts: dict[int, str] = {}
        self._standby: Standby | None = None
        self._standby_ports: dict[int, int] = {}

    @classmethod
    def from_store(
        cls,
        store: Any,
        *,
        rank: int,
        world_size: int,
        host: str | None = None,
        ports: tuple[int, int] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> ControlPlane:
        """Use a store that the host has made; no default process group is needed.

        Parameters
        ----------
        store : torch.distributed.Store
            Reached by every rank, of a kind that can be cloned. It must outlive the communicators, the process that
            hosts it included.
        rank, world_size : int
            This rank's number within the expert-parallel group, and the size of the group.
        host : str or None
            Address of this machine at which the other ranks reach this one; None is loopback.
        ports : (int, int) or None
            Lowest and highest port that this rank may listen on; None lets the system choose.
        timeout_s : float
            Limit of reaching the store, now and where a later call names none; seconds.

        Returns
        -------
        ControlPlane

        Raises
        ------
        ConfigError
            No store, one that has a single connection or does not answer, the rank is none of a group of that size, or
            this rank cannot listen at `host` and `ports` (EPLB-C009).
        """
        import torch.distributed as dist

        if not isinstance(store, dist.Store):
            problem = f"expected a torch.distributed.Store, got {type(store).__name__}"
            raise ConfigError("EPLB-C009", problem=problem)
        control = cls(store, rank, world_size, host, hosts_store=False, ports=ports, timeout_s=timeout_s)
        try:
            control._store = control.connection()  # of its own, with its own limit
        except StoreGone as gone:
            raise ConfigError("EPLB-C009", problem=str(gone)) from gone
        return control

    @classmethod
    def from_process_group(
        cls,
        group: Any,
        host: str | None = None,
        timeout_s: float = _TIMEOUT_S,
        ports: tuple[int, int] | None = None,
        standby: bool = False,
    ) -> ControlPlane:
        """Use a group once, to agree on a store of our own; collective over the group.

        An error on one rank is raised on all ranks.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup
            The expert-parallel group; it must move small CPU tensors. It is never used again.
        host : str or None
            Address of this machine at which the other ranks reach this one. Needed when the ranks are on several hosts
            or in several containers; the store listens at group rank 0's.
        timeout_s : float
            Limit of each of the two collectives, and of reaching the store where a later call names none; seconds.
        ports : (int, int) or None
            Lowest and highest port that this rank may listen on (one for each communicator that connects, and at group
            rank 0 one for the store); None lets the system choose. Backends' connections are not among them.
        standby : bool
            Keep a port on this rank, at which it can host the next store when the host of this one has died: see
            `renewed`.

        Returns
        -------
        ControlPlane

        Raises
        ------
        ConfigError
            The group moves no CPU tensors, the ranks are on several hosts and one gave no `host`, one cannot listen at
            its `host` and `ports`, or the store cannot be reached from one (EPLB-C009).
        """
        if not all(hasattr(group, method) for method in ("rank", "size", "allgather")):
            problem = f"expected a torch.distributed.ProcessGroup, got {type(group).__name__}"
            raise ConfigError("EPLB-C009", problem=problem)
        made = found(group, host, ports, checked_limit(timeout_s), standby=standby)
        control = cls(
            made.store,
            made.rank,
            made.world_size,
            host,
            hosts_store=made.rank == 0,
            ports=ports,
            timeout_s=timeout_s,
            location=made.location,
        )
        control._presence, control._is_own, control._hosts = made.presence, True, dict(made.hosts)
        control._standby, control._standby_ports = made.standby, dict(made.standby_ports)
        return control

    # --- where this rank is ------------------------------------------------------------------------------------------

    @property
    def host(self) -> str:
        """Address at which this rank listens."""
        return self.location.host

    @property
    def host_given(self) -> bool:
        """Did the host engine name that address?"""
        return self.location.host_given

    def host_of(self, rank: int) -> str | None:
        """Return the address of a rank that was known when the control plane was made, or None."""
        return self._hosts.get(rank)

    @property
    def store_address(self) -> str | None:
        """Host and port of a TCPStore; None for a store of another kind."""
        return address_of(self._store)

    @property
    def boot_id(self) -> str:
        """Boot id of this machine; equal for ranks on one machine."""
        return self.location.boot_id

    @property
    def private(self) -> bool:
        """Was the store made for this group alone? Then no key in it is older than the group."""
        return self._is_own

    # --- connections -------------------------------------------------------------------------------------------------

    def client(self, prefix: str, timeout_s: float) -> StoreClient:
        """Open a connection for one thread, in one namespace; the limit is that of opening it and of each operation.

        Raises
        ------
        StoreGone
            The store does not answer.
        """
        opened = self._open(timeout_s)
        return StoreClient(opened.store, prefix, timeout_s, opened.descriptor)

    def connection(self, timeout_s: float | None = None) -> Any:
        """Open a separate raw store connection (a blocked wait holds its connection); see `client`."""
        return self._open(self.timeout_s if timeout_s is None else timeout_s).store

    def _open(self, timeout_s: float) -> Opened:
        try:
            return open_again(self._store, timeout_s)
        except StoreGone as gone:
            if not self._is_own:
                raise
            raise StoreGone(f"{gone} (rank 0 of the group hosts it)") from gone

    # --- names -------------------------------------------------------------------------------------------------------

    def claim(self, name: str, holder: object = None) -> None:
        """Take a communicator's name until `release`, or until the holder given is gone.

        Raises
        ------
        ConfigError
            A communicator of that name is open on this control plane (EPLB-C010).
        """
        self._claims.take(name, holder)

    def release(self, name: str, holder: object = None) -> None:
        """Give a name back, unless another holder has it."""
        self._claims.give_back(name, holder)

    # --- who hosts the store leaves last -----------------------------------------------------------------------------

    def absent(self) -> frozenset[int]:
        """Return the ranks that are known to have ended, or to have closed their control planes.

        Only the rank that hosts the store of `from_process_group` knows any. A rank that is named is certainly absent;
        one whose address is translated on the way may be missing from the answer.
        """
        return frozenset() if self._presence is None else self._presence.absent()


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
