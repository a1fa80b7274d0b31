"""The contract: what a plugin registers, what a backend implements, what an observer may wrap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from eplb_core.backend.events import Event
    from eplb_core.backend.info import BackendInfo, PolicyInfo, StagingInfo
    from eplb_core.backend.memory import Buffers
    from eplb_core.backend.transfer import ConnectReceipt, LocalMetadata, PeerMetadata, TransferPlan, TransferReceipt

PROJECT = "eplb"
ENTRY_POINT_GROUP = "eplb_core.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class DiscoverySpec:
    """Stage one, once per process: plugins declare what they offer."""

    @hookspec
    def eplb_register_backends(self) -> BackendInfo | list[BackendInfo]:  # type: ignore[empty-body]
        """Declare this plugin's backends.

        Returns
        -------
        BackendInfo or list of BackendInfo
            Descriptors only; nothing heavier than `eplb_core` may be imported for them.

        Examples
        --------
        >>> from eplb_core import API_VERSION, BackendInfo, hookimpl
        >>> @hookimpl
        ... def eplb_register_backends():
        ...     return BackendInfo("mine", "moves rows by pigeon", API_VERSION, "eplb_mine.backend:PigeonBackend")
        >>> eplb_register_backends().name
        'mine'
        """

    @hookspec
    def eplb_register_staging(self) -> StagingInfo | list[StagingInfo]:  # type: ignore[empty-body]
        """Declare this plugin's staging allocators.

        Returns
        -------
        StagingInfo or list of StagingInfo
            Descriptors only.

        Examples
        --------
        >>> from eplb_core import API_VERSION, hookimpl
        >>> from eplb_core.backend import StagingInfo
        >>> @hookimpl
        ... def eplb_register_staging():
        ...     return StagingInfo("huge", "2 MiB pages", API_VERSION, "eplb_mine.staging:HugePages")
        >>> eplb_register_staging().memory
        'host'
        """

    @hookspec
    def eplb_register_policies(self) -> PolicyInfo | list[PolicyInfo]:  # type: ignore[empty-body]
        """Declare this plugin's placement policies.

        Returns
        -------
        PolicyInfo or list of PolicyInfo
            Descriptors only.

        Examples
        --------
        >>> from eplb_core import API_VERSION, hookimpl
        >>> from eplb_core.backend import PolicyInfo
        >>> @hookimpl
        ... def eplb_register_policies():
        ...     return PolicyInfo("greedy", "one swap a step", API_VERSION, "eplb_mine.policy:rebalance")
        >>> eplb_register_policies().name
        'greedy'
        """


class BackendSpec:
    """Stage two, once per communicator: the four hooks of a backend, and `observe` for observers.

    The chosen backend is the only implementation that is no wrapper. Observers implement the same names with
    ``@hookimpl(wrapper=True)`` and see one communicator alone.
    """

    @hookspec(firstresult=True)
    def register_buffers(self, buffers: Buffers) -> LocalMetadata:  # type: ignore[empty-body]
        """Pin or register live tensors and landing memory; say what peers must know of them.

        Parameters
        ----------
        buffers : Buffers
            uint8 views, ``[num_local_physical_experts, nbytes_per_expert]`` per (layer, tensor), on the weights'
            device; landing slots in bytes, on the device the class asked for.

        Returns
        -------
        LocalMetadata
            At most 1 MiB of opaque bytes for the peers.

        Raises
        ------
        MetadataError
            A tensor cannot be registered; the message names it.
        TransferError
            The library refused.

        Notes
        -----
        Stream: uses none; device memory is pinned, not read.
        Thread: the thread that builds the communicator, once per epoch.
        Ordering: first of the four; local only, no peer is waited for.
        Ownership: keep references to the buffers until `close`; the memory stays the host's and the core's.

        Examples
        --------
        >>> from eplb_core import hookimpl
        >>> from eplb_core.backend import LocalMetadata
        >>> class Mine:
        ...     @hookimpl
        ...     def register_buffers(self, buffers):
        ...         self.buffers = buffers
        ...         return LocalMetadata(b"127.0.0.1:4711")
        """

    @hookspec(firstresult=True)
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:  # type: ignore[empty-body]
        """Connect to these peers and warm the connections up.

        The core has gathered the metadata and checked envelope, versions, layouts and options.

        Parameters
        ----------
        local : LocalMetadata
            What this rank's `register_buffers` returned.
        peers : sequence of PeerMetadata
            The members to connect to: those that the plan names, or every other one at ``Communicator.connect``. A
            later call names only new ones; a call may name none.

        Returns
        -------
        ConnectReceipt
            The peers reachable through this call.

        Raises
        ------
        MetadataError
            A peer's payload is not what this backend wrote.
        TransferError
            A connection could not be made within ``context.timeout_s``.

        Notes
        -----
        Stream: uses none.
        Thread: the thread that calls begin or connect; one call at a time.
        Ordering: every member makes the call at the same point; ``progress`` is pumped on all until all have returned.
        Ownership: what is opened here belongs to the backend until `close`.

        Examples
        --------
        >>> from eplb_core import hookimpl
        >>> from eplb_core.backend import ConnectReceipt
        >>> class Mine:
        ...     @hookimpl
        ...     def exchange_metadata(self, local, peers):
        ...         self.addresses = {peer.rank: peer.payload.decode() for peer in peers}
        ...         return ConnectReceipt(tuple(self.addresses))
        """

    @hookspec(firstresult=True)
    def transfer(self, plan: TransferPlan) -> object:
        """Start one layer's moves for this rank and return before they are complete.

        Parameters
        ----------
        plan : TransferPlan
            This rank's sends and receives; either or both may be empty. Frozen: never write into its arrays.

        Returns
        -------
        object
            The backend's own handle, never None (pluggy takes None for "no implementation").

        Raises
        ------
        TransferError
            The moves could not be started.

        Notes
        -----
        Stream: live rows may be read as soon as the call is made; the core has waited for the caller's stream.
        Thread: one thread per communicator at a time, not always the same one.
        Ordering: on every member in the same sequence; slot s is free: the layer last in s is decided everywhere and
            its copies here are done. Up to ``staging_layers`` handles are in flight.
        Ownership: live rows are read-only; landing slot s and send staging slot s are the backend's until `wait`
            returns; nothing else may be written.

        Examples
        --------
        >>> from eplb_core import hookimpl
        >>> class Mine:
        ...     @hookimpl
        ...     def transfer(self, plan):
        ...         return [self.post(peer) for peer in plan.receives.peer]
        """

    @hookspec(firstresult=True)
    def wait(self, handle: object, timeout_s: float) -> TransferReceipt:  # type: ignore[empty-body]
        """Wait until this rank's receives **and sends** of a handle are complete.

        Parameters
        ----------
        handle : object
            What `transfer` returned.
        timeout_s : float
            Limit, seconds. ``context.cancelled()`` is consulted by every loop.

        Returns
        -------
        TransferReceipt
            The bytes moved.

        Raises
        ------
        StalledError
            The limit ran out; the message names the peers not heard from.
        TransferError
            The library reports a failure, or the wait was cancelled.

        Notes
        -----
        Stream: on return the bytes are in landing memory, on the device too.
        Thread: the thread that called `transfer`.
        Ordering: handles are waited for in the order of their `transfer`.
        Ownership: on return landing slot s is the core's until the next `transfer` with slot s. After an error the
            core calls ``abort(handle, reason)``.

        Examples
        --------
        >>> from eplb_core import hookimpl
        >>> from eplb_core.backend import TransferReceipt
        >>> class Mine:
        ...     @hookimpl
        ...     def wait(self, handle, timeout_s):
        ...         for message in handle:
        ...             message.join(timeout_s)
        ...         return TransferReceipt(nbytes_received=0, nbytes_sent=0)
        """

    @hookspec
    def observe(self, event: Event) -> bytes | None:
        """Tell an observer what happens; observers only, never backends.

        Parameters
        ----------
        event : Event
            A ballot about to be cast, a commit, or an abort.

        Returns
        -------
        bytes or None
            For "vote": evidence of at most 64 KiB that travels in this rank's ballot and is shown, with that of all
            ranks, to the observers of the rank that tallies.

        Raises
        ------
        EplbError
            In "agree", "vote" and "tally": the layer is then aborted on every rank with this reason. In "commit" and
            "abort" nothing can be undone; an exception there is logged.

        Notes
        -----
        Stream: uses none.
        Thread: the thread that stages or commits.
        Ordering: agree, then per layer vote, on one rank tally, and commit or abort.
        Ownership: the event is frozen.

        Examples
        --------
        >>> from eplb_core import hookimpl
        >>> class Counter:
        ...     commits = 0
        ...     @hookimpl
        ...     def observe(self, event):
        ...         self.commits += event.kind == "commit"
        >>> counter = Counter()
        """
