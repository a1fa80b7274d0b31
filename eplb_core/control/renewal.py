"""A new store after the process that hosted the old one died: who hosts it, and where, is known beforehand."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from eplb_core.control.hosts import Location
from eplb_core.control.listen import Ports, listen
from eplb_core.control.opening import Opened, checked_limit, open_client
from eplb_core.control.sockets import written
from eplb_core.control.store import StoreGone, first_line
from eplb_core.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

_RETRY_S = 0.05


class Standby:
    """A port that this rank keeps, to host a store there when it is its turn.

    Parameters
    ----------
    host : str
        Address of this rank.
    ports : (int, int) or None
        Range of ports that are allowed.
    backlog : int
        Connections that may wait until the store answers.
    """

    def __init__(self, host: str, ports: Ports | None, backlog: int) -> None:
        self._listener: socket.socket | None = listen(host, ports, backlog=backlog)
        self.port = int(self._listener.getsockname()[1])

    def take(self) -> socket.socket | None:
        """Return the listener, once."""
        listener, self._listener = self._listener, None
        return listener

    def close(self) -> None:
        """Give the port up."""
        listener = self.take()
        if listener is not None:
            listener.close()


def host_store(listener: socket.socket, host: str, timeout_s: float) -> Any:
    """Host a TCPStore behind a listener of this process; EPLB-C009 when that fails."""
    import torch.distributed as dist

    port = int(listener.getsockname()[1])
    # A listener of our own: torch's would listen on every interface of the machine.
    descriptor, limit = listener.detach(), timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=descriptor
        )
    except RuntimeError as error:
        problem = f"no store can be hosted at {written((host, port))}: {first_line(error)}"
        raise ConfigError("EPLB-C009", problem=problem) from error


def reach_store(host: str, port: int, timeout_s: float, rank: int) -> Opened:
    """Connect to a store that another rank is about to host; EPLB-C009 when there is none within the limit."""
    until = time.monotonic() + timeout_s
    while True:
        left_s = until - time.monotonic()
        try:
            return open_client(host, port, max(left_s, 0.1))
        except StoreGone as gone:
            if time.monotonic() + _RETRY_S >= until:
                problem = f"rank {rank} hosts no store at {written((host, port))} within {timeout_s:g} s: {gone}"
                raise ConfigError("EPLB-C009", problem=problem) from gone
        time.sleep(_RETRY_S)


def place_of(rank: int, hosts: Mapping[int, str], ports: Mapping[int, int], host: str | None, port: int | None) -> Any:
    """Return host and port at which a rank is to host the next store; EPLB-C009 where nobody knows."""
    where, at = host or hosts.get(rank), port or ports.get(rank)
    if where is None or not at:
        what = " and ".join(name for name, known in (("host=", where), ("port=", at)) if not known)
        detail = "ControlPlane.from_process_group(..., standby=True) keeps a port on every rank for this."
        raise ConfigError("EPLB-C009", problem=f"nobody knows where rank {rank} hosts the store: {what}", detail=detail)
    return where, int(at)


class Renewable:
    """Base of `ControlPlane`: another one, over a new store, when the old store is lost."""

    rank: int
    world_size: int
    timeout_s: float
    ports: Ports | None
    location: Location
    _hosts: dict[int, str]
    _standby: Standby | None
    _standby_ports: dict[int, int]
    _is_own: bool

    def renewed(
        self, ranks: Sequence[int], timeout_s: float | None = None, *, host: str | None = None, port: int | None = None
    ) -> Self:
        """Make a control plane over a new store, after the process that hosted this one's died; collective.

        The lowest of the ranks hosts it, at the port that it keeps (``standby=True``), or at the one that is given.
        Ranks keep their numbers. `Communicator.rebuild` takes the result as ``control=``.

        Parameters
        ----------
        ranks : sequence of int
            The ranks that are left, this one among them; the same on all of them.
        timeout_s : float or None
            Limit of reaching the new store, seconds; this control plane's by default.
        host : str or None
            Address of the lowest of the ranks; None takes the one that was told when this control plane was made.
        port : int or None
            Port there; None takes the one that is kept.

        Returns
        -------
        ControlPlane

        Raises
        ------
        ConfigError
            Nobody knows where the store is to be, it cannot be hosted there, or not reached in time (EPLB-C009).
        """
        members = sorted({int(rank) for rank in ranks})
        if self.rank not in members or not set(members) <= set(range(self.world_size)):
            problem = f"ranks={members} must be ranks of the group, {self.rank} among them"
            raise ConfigError("EPLB-C009", problem=problem)
        limit_s = self.timeout_s if timeout_s is None else checked_limit(timeout_s)
        lowest, kept = members[0], self._standby
        own = self.location.host if lowest == self.rank else None
        where, at = place_of(lowest, self._hosts, self._standby_ports, host or own, port)
        if lowest == self.rank:
            listener = kept.take() if kept is not None and kept.port == at else None
            listener = listener or listen(where, (at, at), backlog=2 * self.world_size + 16)
            store = host_store(listener, where, limit_s)
        else:
            store = reach_store(where, at, limit_s, lowest).store
        build: Callable[..., Self] = type(self)
        control = build(
            store,
            self.rank,
            self.world_size,
            self.location.host if self.location.host_given else None,
            hosts_store=lowest == self.rank,
            ports=self.ports,
            timeout_s=self.timeout_s,
            location=self.location,
        )
        control._is_own, control._hosts = True, dict(self._hosts)
        control._standby_ports = {rank: at for rank, at in self._standby_ports.items() if rank in members[1:]}
        control._standby, self._standby = (kept if self.rank in control._standby_ports else None), None
        return control
