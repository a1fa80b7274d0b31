"""Which neighbours are alive: a ring of TCP connections; end of file means that a neighbour's process is gone."""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from eplb_core.control.attempt import Attempt
from eplb_core.control.listen import Ports, listen
from eplb_core.control.sockets import written
from eplb_core.errors import EplbError, MetadataError, error_for
from eplb_core.wire.envelope import MessageScope

_GOODBYE = b"B"
_HELLO_NBYTES = 4096
_HEAD_START_S = 1.0
"""A rank that cannot reach its neighbour reports it so much earlier than the neighbour reports that nobody came."""


_RINGS: weakref.WeakSet[Ring] = weakref.WeakSet()


class Ring:
    """This rank's two connections, to the members before and after it.

    Parameters
    ----------
    host : str
        Address to listen on, reached by the neighbours.
    name, rank, epoch : str, int, int
        Put into the greeting; a connection with another one is refused.
    members : sequence of int
        Members of the ring, ascending.
    ports : (int, int) or None
        Lowest and highest port to listen on, until the left neighbour has come; None lets the system choose.

    Raises
    ------
    ConfigError
        This rank cannot listen there (EPLB-C009).

    Notes
    -----
    There are no heartbeats: a busy machine would make them late, and live ranks would look dead. A killed process
    closes its sockets at once; a stopped one is found by the limits of the waits.
    """

    def __init__(
        self, host: str, *, name: str, rank: int, epoch: int, members: Sequence[int], ports: Ports | None = None
    ) -> None:
        self._host = host
        self._scope = MessageScope(name, rank, epoch, 0)
        self._rank = rank
        place = list(members).index(rank)
        self.right = members[(place + 1) % len(members)]
        self.left = members[place - 1]
        self._alone = len(members) == 1
        self._sockets: dict[int, tuple[int, socket.socket]] = {}  # by descriptor: (neighbour, connection)
        self._poll = select.poll()
        self._left_politely: set[int] = set()
        self._dead: list[int] = []
        _RINGS.add(self)
        self._listener = None if self._alone else listen(host, ports, backlog=8)

    @property
    def port(self) -> int:
        """Port to tell the left neighbour."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    def connect(
        self, address_of_right: tuple[str, int], timeout_s: float, give_up: Callable[[], EplbError | None]
    ) -> None:
        """Connect to the right neighbour and accept the left one; both ends greet.

        Parameters
        ----------
        address_of_right : (str, int)
            Host and port of the right neighbour's listener.
        timeout_s : float
            Limit, seconds.
        give_up : callable
            Called between tries; an error that it returns is raised.

        Raises
        ------
        TransferError
            The right neighbour cannot be reached (EPLB-T014).
        StalledError
            The left one did not connect in time.
        """
        if self._listener is None:
            return
        until = time.monotonic() + timeout_s
        self._watch(self.right, self._reach(address_of_right, timeout_s, give_up))
        self._listener.settimeout(0.1)
        while True:
            try:
                incoming, _ = self._listener.accept()
            except TimeoutError:
                incoming = None
            if incoming is not None and self._greets(incoming):
                break
            error = give_up()
            if error is not None:
                raise error
            if time.monotonic() >= until:
                raise error_for(
                    "EPLB-T002",
                    seconds=timeout_s,
                    where="connect, liveness ring",
                    waiting_for=f"rank {self.left}",
                    detail=f"It should have connected to rank {self._rank} at {written((self._host, self.port))}.",
                )
        self._listener.close()
        self._listener = None

    def poll(self) -> int | None:
        """Return the rank of a neighbour that is gone, or None, without waiting. Costs one system call."""
        for descriptor, _ in self._poll.poll(0):
            neighbour, connection = self._sockets[descriptor]
            try:
                data = connection.recv(64)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if _GOODBYE in data:
                self._left_politely.add(neighbour)
            if data == b"":
                self._poll.unregister(descriptor)
                del self._sockets[descriptor]
                connection.close()
                if neighbour not in self._left_politely and neighbour not in self._dead:
                    self._dead.append(neighbour)
        return self._dead[0] if self._dead else None

    @property
    def dead(self) -> tuple[int, ...]:
        """Neighbours found dead so far."""
        return tuple(self._dead)

    @property
    def departed(self) -> frozenset[int]:
        """Neighbours that said goodbye."""
        return frozenset(self._left_politely)

    def close(self, *, goodbye: bool) -> None:
        """Close both connections; unless a goodbye was said, the neighbours take this rank for dead."""
        for descriptor, (_, connection) in self._sockets.items():
            if goodbye:
                with suppress(OSError):  # the neighbour is gone already
                    connection.send(_GOODBYE)
            self._poll.unregister(descriptor)  # a backend may look once more while it closes
            connection.close()
        self._sockets.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def drop(self) -> None:
        """Close this process's descriptors; in a forked child, the parent's connections stay open."""
        for _, connection in self._sockets.values():
            connection.close()
        self._sockets.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _reach(
        self, address: tuple[str, int], timeout_s: float, give_up: Callable[[], EplbError | None]
    ) -> socket.socket:
        """Connect to the right neighbour and greet it."""
        limit_s = max(0.05, timeout_s - min(_HEAD_START_S, timeout_s / 4))
        until = time.monotonic() + limit_s
        # In a thread: the look-up of a name has no limit, and an abort of another rank must be noticed meanwhile.
        attempt = Attempt(
            lambda: socket.create_connection(address, timeout=limit_s),
            f"connects to rank {self.right}",
            discard=socket.socket.close,
        )
        try:
            while not attempt.wait(0.1):
                error = give_up()
                if error is not None:
                    raise error
                if time.monotonic() >= until:
                    raise TimeoutError
            connection = attempt.result()
            connection.sendall(self._greeting())
        except OSError as error:
            attempt.let_go()
            reason = error.strerror or str(error)
            if isinstance(error, TimeoutError):
                reason = f"no answer within {limit_s:.1f} s"
            at = written(address)
            raise error_for("EPLB-T014", rank=self._rank, peer=self.right, at=at, reason=reason) from error
        except BaseException:
            attempt.let_go()
            raise
        return connection

    def _greeting(self) -> bytes:
        body = self._scope.seal("ring", b"")
        return len(body).to_bytes(2, "big") + body

    def _greets(self, connection: socket.socket) -> bool:
        # Any program may connect to a port; only the left neighbour of this ring is accepted.
        connection.settimeout(2.0)
        try:
            size = int.from_bytes(_read(connection, 2), "big")
            greeting = _read(connection, min(size, _HELLO_NBYTES))
            self._scope.of(rank=self.left).unseal(greeting, "ring", _HELLO_NBYTES)
        except (OSError, MetadataError):
            connection.close()
            return False
        self._watch(self.left, connection)
        return True

    def _watch(self, neighbour: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._sockets[connection.fileno()] = (neighbour, connection)
        self._poll.register(connection.fileno(), select.POLLIN)


def _close_in_a_forked_child() -> None:
    """Close a forked child's copies: while one is open, neighbours do not see that the parent is gone."""
    for ring in list(_RINGS):
        ring.drop()


os.register_at_fork(after_in_child=_close_in_a_forked_child)


def _read(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data
