"""One NIXL agent under one lock, its failures as `NixlError`, and everything it hands out given back at its end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from eplb_nixl.descriptors import IndexArray, expand
from eplb_nixl.forks import leave_to_parent_after_fork
from eplb_nixl.guard import make_immortal
from eplb_nixl.library import Library, NixlError
from eplb_nixl.metadata import AddressArray
from eplb_nixl.signals import unchanged_signals


@dataclass(frozen=True)
class Memory:
    """A piece of memory to register.

    Parameters
    ----------
    start, nbytes : int
        Address and size.
    memory_type : str
        "DRAM" or "VRAM".
    device_index : int
        0 for DRAM.
    """

    start: int
    nbytes: int
    memory_type: str
    device_index: int

    @property
    def descriptor(self) -> tuple[int, int, int, str]:
        """As NIXL takes it."""
        return self.start, self.nbytes, self.device_index, ""


class Agent:
    """A NIXL agent.

    Thread rule: every call into NIXL is made under `lock`, so any thread may call any method; two threads' calls follow
    one another. NIXL's own locks (its sync mode) are on as well, for the finalisers of its Python objects, which run in
    whatever thread collects them. Nothing sleeps under the lock, but a post over shared memory copies under it.

    Parameters
    ----------
    library : Library
        NIXL as loaded.
    name : str
        Unique among all agents that will ever meet.
    backends : sequence of str
        NIXL's plugins to create.
    num_threads : int
        For its UCX backend.
    progress_thread : bool
        Should NIXL start its own progress thread?
    transport : str
        The only one UCX may use; empty leaves the choice to UCX.

    Raises
    ------
    NixlError
        A backend cannot be created.
    """

    def __init__(
        self,
        library: Library,
        name: str,
        *,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 0,
        progress_thread: bool = False,
        transport: str = "",
    ) -> None:
        self.library = library
        self.name = name
        self.lock = threading.RLock()
        self._registered: list[Any] = []
        self._lists: list[Any] = []
        self._reads: set[Any] = set()
        self._peers: list[str] = []
        self._agent: Any = None
        self.is_inherited = False
        """Is this a copy in a forked child? The parent's agent is not the child's to use, or to end."""
        try:
            with unchanged_signals():  # UCX is loaded with the first one
                self._agent = self._create(backends, num_threads, progress_thread, transport)
        except library.errors as error:
            raise self._refusal(f"create an agent with backends {', '.join(backends)}", error) from error
        leave_to_parent_after_fork(self)

    @property
    def is_open(self) -> bool:
        """False once closed."""
        return self._agent is not None

    def register(self, memory: Memory) -> None:
        """Register one piece of memory, which must overlap no other (NIXL crashes at the end when it does)."""
        what = f"register {memory.nbytes} bytes of {memory.memory_type}"
        descriptors = self._call(what, "get_reg_descs", [memory.descriptor], memory.memory_type)
        self._call(what, "register_memory", descriptors)
        self._registered.append(descriptors)

    def deregister_all(self) -> None:
        """Take every registration back."""
        while self._registered:
            self._call("deregister memory", "deregister_memory", self._registered.pop())

    def metadata(self, memory: Sequence[Memory]) -> bytes:
        """Return what peers need to connect and to read these registered pieces, all of one memory type."""
        pieces = [each.descriptor for each in memory]
        descriptors = self._call("describe itself", "get_reg_descs", pieces, memory[0].memory_type)
        return bytes(self._call("describe itself", "get_partial_agent_metadata", descriptors, True))

    def add_peer(self, metadata: bytes) -> str:
        """Make a peer known; return the name NIXL found in its metadata."""
        given = self._call("load a peer's metadata", "add_remote_agent", metadata)
        name = given.decode(errors="replace") if isinstance(given, bytes) else str(given)
        if name not in self._peers:
            self._peers.append(name)
        return name

    def remove_peer(self, name: str) -> None:
        """Forget a peer."""
        self._call(f"remove {name}", "remove_remote_agent", name)
        self._peers.remove(name)

    def prepare(self, peer: str | None, blocks: AddressArray, memory_type: str) -> Any:
        """Prepare a list of rows to name by index later.

        Parameters
        ----------
        peer : str or None
            Agent that owns the memory; None is this one.
        blocks : AddressArray
            See `eplb_nixl.descriptors.blocks_of`.
        memory_type : str
            Type of that memory, "DRAM" or "VRAM".

        Returns
        -------
        object
            For `make_read`; None where there are no rows, of which NIXL makes no list and nobody reads.
        """
        if not blocks[:, 4].any():
            return None
        what = f"prepare {int(blocks[:, 4].sum())} {f'rows of {peer}' if peer else 'landing rows'}"
        descriptors = blocks if self.library.strided else expand(blocks)
        prepared = self._call(what, "prep_xfer_dlist", peer or "NIXL_INIT_AGENT", descriptors, memory_type)
        self._lists.append(prepared)
        return prepared

    def make_read(self, local: Any, local_index: IndexArray, remote: Any, remote_index: IndexArray) -> Any:
        """Make a READ of remote rows into local rows, by index; it is not posted yet."""
        read = self._call("make a READ", "make_prepped_xfer", "READ", local, local_index, remote, remote_index)
        self._reads.add(read)
        return read

    def post(self, read: Any) -> str:
        """Start a READ; return "DONE", "PROC" or another state."""
        return str(self._call("post a READ", "transfer", read))

    def state(self, read: Any) -> str:
        """Move things on and return a READ's state: "DONE", "PROC" or another."""
        return str(self._call("check a READ", "check_xfer_state", read))

    def release(self, read: Any) -> None:
        """Give a READ back. One that is in flight still writes into landing memory afterwards."""
        self._call("release a READ", "release_xfer_handle", read)
        self._reads.discard(read)

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification."""
        self._call(f"notify {peer}", "send_notif", peer, message)

    def progress(self) -> dict[str, list[bytes]]:
        """Move things on; return the notifications that came, by agent name."""
        notifications: dict[str, list[bytes]] = self._call("make progress", "get_new_notifs")
        return notifications

    def leave_to_parent(self) -> None:
        """Make this a copy that does nothing any more, in a child that was just forked.

        Ending the agent there, as a plain exit would, closes connections that both processes share.
        """
        self.is_inherited = True
        self.lock = threading.RLock()  # another thread of the parent may have held it
        make_immortal(self)

    def close(self) -> None:
        """Give everything back and end the agent. Waits for no peer; what NIXL refuses on the way out is left to it."""
        if self.is_inherited:
            return
        with self.lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            for read in self._reads:
                with suppress(*self.library.errors):
                    agent.release_xfer_handle(read)
            for prepared in self._lists:
                with suppress(*self.library.errors):
                    agent.release_dlist_handle(prepared)
            for peer in self._peers:
                with suppress(*self.library.errors):  # gone already, when it disconnected first
                    agent.remove_remote_agent(peer)
            for descriptors in self._registered:
                with suppress(*self.library.errors):
                    agent.deregister_memory(descriptors)
            self._reads.clear()
            self._lists.clear()
            self._peers.clear()
            self._registered.clear()

    def _call(self, what: str, method: str, *arguments: Any) -> Any:
        with self.lock:
            if self._agent is None:
                raise NixlError(f"NIXL cannot {what}: the agent is closed")
            if self.is_inherited:
                raise NixlError(f"NIXL cannot {what}: the agent is another process's, from which this one was forked")
            try:
                return getattr(self._agent, method)(*arguments)
            except self.library.errors as error:
                raise self._refusal(what, error) from error

    def _create(self, backends: Sequence[str], num_threads: int, progress_thread: bool, transport: str) -> Any:
        api = self.library.api
        config = api.nixl_agent_config(
            enable_prog_thread=progress_thread,
            num_threads=num_threads,
            backends=[],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        with _without_greetings(api):
            agent = api.nixl_agent(self.name, config)
            for backend in backends:
                parameters = {"num_threads": str(num_threads)} if num_threads and backend == "UCX" else {}
                if transport:
                    parameters["engine_config"] = f"TLS={transport}"
                agent.create_backend(backend, parameters)
        return agent

    @staticmethod
    def _refusal(what: str, error: Exception) -> NixlError:
        return NixlError(f"NIXL could not {what}: {str(error) or type(error).__name__}")


@contextmanager
def _without_greetings(api: Any) -> Iterator[None]:
    """Keep back the two INFO lines that NIXL prints for every agent, unless the user asked NIXL for a level."""
    logger = getattr(api, "logger", None)
    if logger is None or os.environ.get("NIXL_LOG_LEVEL"):
        yield
        return

    def above_info(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO

    logger.addFilter(above_info)
    try:
        yield
    finally:
        logger.removeFilter(above_info)
