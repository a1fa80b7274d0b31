"""Where this rank listens: checks that the address is this machine's, and keeps to the ports that are allowed."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable

from eplb_core.control.attempt import within
from eplb_core.errors import ConfigError

LOOPBACK = "127.0.0.1"
"""Address of a rank that was given none."""

Ports = tuple[int, int]
"""Lowest and highest port to listen on."""


def listen(host: str, ports: Ports | None, *, backlog: int) -> socket.socket:
    """Listen at an address of this machine, on an allowed port (None: any); else EPLB-C009 says what is wrong."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError("EPLB-C009", problem=f"host={host!r} cannot be resolved: {reason}") from error
    _check_is_somewhere(host, str(address[0]))
    last: OSError | None = None
    for port in _candidates(ports):
        try:
            return socket.create_server((host, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError("EPLB-C009", problem=_why_not(host, error)) from error
            last = error
    problem = f"no port of ports={ports} can be listened on at host={host!r}: {last.strerror if last else ''}"
    raise ConfigError("EPLB-C009", problem=problem) from last


def check_listening(host: object, ports: object, timeout_s: float) -> tuple[str, bool]:
    """Check that this rank can listen at an address by listening there for a moment; else EPLB-C009.

    Notes
    -----
    ``host`` None is loopback; ``timeout_s`` limits the look-up of a name. Returns the address or name to listen at, and
    whether it is loopback.
    """
    where, allowed = checked_host(host), checked_ports(ports)
    try:
        with within(timeout_s, lambda: listen(where, allowed, backlog=1), f"the look-up of host={where!r}") as listener:
            return where, is_loopback(listener)
    except TimeoutError as error:
        raise ConfigError("EPLB-C009", problem=str(error)) from error


def is_loopback(listener: socket.socket) -> bool:
    """Can only its own network namespace reach a listener at this address?"""
    return ipaddress.ip_address(str(listener.getsockname()[0]).partition("%")[0]).is_loopback


def checked_host(host: object) -> str:
    """Return the address or name to listen at, loopback for None."""
    if host is None:
        return LOOPBACK
    if not isinstance(host, str):
        raise ConfigError("EPLB-C009", problem=f"host= should be a str, got {type(host).__name__}")
    if not host or len(host.encode()) > 253:  # the longest name that the domain name system allows
        raise ConfigError("EPLB-C009", problem=f"host={host[:80]!r} is not an address, nor the name of one")
    return host


def checked_ports(ports: object) -> Ports | None:
    """Return the range of ports, None for any."""
    if ports is None:
        return None
    problem = f"ports={ports!r} should be the lowest and the highest port allowed, between 1 and 65535"
    if not isinstance(ports, (tuple, list)) or len(ports) != 2:
        raise ConfigError("EPLB-C009", problem=problem)
    low, high = ports
    if not all(isinstance(port, int) and not isinstance(port, bool) for port in (low, high)):
        raise ConfigError("EPLB-C009", problem=problem)
    if not 1 <= low <= high <= 65535:
        raise ConfigError("EPLB-C009", problem=problem)
    return low, high


def _candidates(ports: Ports | None) -> Iterable[int]:
    return (0,) if ports is None else range(ports[0], ports[1] + 1)


def _check_is_somewhere(host: str, address: str) -> None:
    found = ipaddress.ip_address(address.partition("%")[0])
    if found.is_unspecified or found.is_multicast:
        problem = f"host={host!r} is not a single address at which the other ranks reach this one"
        raise ConfigError("EPLB-C009", problem=problem)


def _why_not(host: str, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host={host!r} is not an address of this machine"
    return f"nothing can be listened on at host={host!r}: {error.strerror or error}"
