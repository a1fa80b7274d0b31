"""What the backend asks of NCCL bindings, whichever they are, and which of them is taken."""

from __future__ import annotations

import ctypes
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from eplb_pynccl.options import PyNcclOptions
from eplb_pynccl.presence import INSTALL_HINT

OLDEST = 21800
"""Oldest NCCL that is supported, 2.18: the first in which an abort frees a communicator that is still connecting."""

IN_PROGRESS = 7
"""ncclInProgress, the same in every binding."""

UNIQUE_ID_NBYTES = 128


class NcclError(Exception):
    """NCCL refused a call, or cannot be loaded; the text holds NCCL's own words."""


class Binding(Protocol):
    """NCCL's calls; a communicator is whatever the binding makes of it. Every call may raise `NcclError`."""

    name: str
    """Distribution and version."""
    nonblocking: bool
    """Does `init` return at once, to be polled with `in_progress`? Otherwise it blocks until all members have come."""

    def version(self) -> int:
        """Return NCCL's version as one number, such as 22807."""
        ...

    def library_path(self) -> str:
        """Return where the library was loaded from."""
        ...

    def unique_id(self) -> bytes:
        """Make an id that all members of one communicator share."""
        ...

    def init(self, size: int, unique_id: bytes, rank: int) -> Any:
        """Make a communicator, on the current device."""
        ...

    def in_progress(self, communicator: Any) -> bool:
        """Is the last call still under way? Raises when the communicator has failed meanwhile."""
        ...

    def group_start(self) -> None:
        """Begin a group of sends and receives, for this thread."""
        ...

    def group_end(self) -> None:
        """End it: all of them start together."""
        ...

    def send(self, communicator: Any, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Send bytes from device memory, in the order of a stream."""
        ...

    def receive(self, communicator: Any, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Receive bytes into device memory, in the order of a stream."""
        ...

    def finalize(self, communicator: Any) -> None:
        """Begin to flush a communicator, before `destroy`."""
        ...

    def destroy(self, communicator: Any) -> None:
        """Free a communicator on which nothing is outstanding."""
        ...

    def abort(self, communicator: Any) -> None:
        """Stop all that is outstanding and free the communicator."""
        ...


def load_binding(options: PyNcclOptions) -> Binding:
    """Import the binding that the options ask for, and have it load NCCL.

    Raises
    ------
    NcclError
        It is not installed, NCCL does not load, or is too old; the message says what to install.
    """
    if options.library is not None:
        try:
            ctypes.CDLL(options.library, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise NcclError(f"the option library={options.library!r} does not load: {error}") from error
    wanted = options.binding
    if wanted == "auto":
        wanted = "nccl4py" if find_spec("nccl") is not None else "cupy"
    # By name: the two adapters are the only modules that import a binding, and only one of them is loaded.
    adapter = import_module(f"eplb_pynccl.{wanted}_binding")
    binding: Binding = adapter.load()
    version = binding.version()
    if version < OLDEST:
        raise NcclError(
            f"NCCL {spell(version)} ({binding.library_path()}) is too old, {spell(OLDEST)} is the oldest supported: "
            f"{INSTALL_HINT}"
        )
    return binding


def spell(version: int) -> str:
    """Return "2.28.7" for 22807; NCCL counted otherwise before 2.9."""
    if version >= 10000:
        return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"
    return f"{version // 1000}.{version % 1000 // 100}.{version % 100}"
