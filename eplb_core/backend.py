"""What a backend is: the descriptors a plugin declares and the objects that pass through the hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:  # discovery reads descriptors; it must not pay for torch, numpy or pydantic
    import torch
    from pydantic import BaseModel

    from eplb_core.plan import TransferPlan

API_VERSION = 1
"""Version of the plugin contract; a plugin declares the one it was written for."""


@dataclass(frozen=True)
class BackendInfo:
    """What a plugin says of its backend; read without importing the backend.

    Parameters
    ----------
    name : str
        Name that hosts write into ``EPLBConfig.communicator``; also the entry point's name.
    summary : str
        One line for ``eplb backends``.
    api_version : int
        `API_VERSION` of the contract the backend was written for.
    target : str
        ``"module:Class"``, imported only when the backend is chosen.
    options : type[pydantic.BaseModel] or str or None
        Options model or its ``"module:Class"``; None takes no options.
    async_safe : bool or None
        May transfers run from a worker thread beside the model's own kernels? None is undeclared, treated as unsafe.
    async_reason : str
        Why not, as it stands in the error ("NCCL multi-stream conflicts").
    label : str
        Leading word of its errors; the name when empty.
    device_types : tuple of str
        ``torch.device.type`` of the weights it moves; ``("*",)`` is any.
    elastic_safe : bool
        May ranks join after connect?
    zero_copy : bool
        Does it read live rows without a copy in between?
    batched : bool
        Does it need moves cut into batches of at most ``max_ops_per_batch`` operations?
    auto_priority : int or None
        The automatic choice takes the highest; None is taken only when named.
    requires : tuple of str
        Importable modules without which it is not usable.
    install_hint : str
        What to type when it is not usable.
    available : callable
        Import-light (find_spec, dlopen): None when usable on this machine, else why not. All that ``select`` asks.
    """

    name: str
    summary: str
    api_version: int
    target: str
    options: type[BaseModel] | str | None = None
    async_safe: bool | None = None
    async_reason: str = ""
    label: str = ""
    device_types: tuple[str, ...] = ("cpu",)
    elastic_safe: bool = False
    zero_copy: bool = False
    batched: bool = False
    auto_priority: int | None = None
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    available: Callable[[], str | None] | None = None


@dataclass(frozen=True)
class StagingInfo:
    """What a plugin says of a staging allocator.

    Parameters
    ----------
    name : str
        Name for ``EPLBConfig.staging``.
    summary : str
        One line for ``eplb backends``.
    api_version : int
        See `BackendInfo`.
    target : str
        ``"module:Class"`` of a `StagingAllocator`.
    device_types : tuple of str
        Device types its memory can stage for; ``("*",)`` is any.
    memory : {"host", "device", "any"}
        Where its memory lies: on the host, on the weights' device, or on either, as asked for. Naming one for a backend
        that stages in the other is a `ConfigError`.
    requires : tuple of str
        See `BackendInfo`.
    install_hint : str
        See `BackendInfo`.
    available : callable
        See `BackendInfo`.
    """

    name: str
    summary: str
    api_version: int
    target: str
    device_types: tuple[str, ...] = ("*",)
    memory: Literal["host", "device", "any"] = "host"
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    available: Callable[[], str | None] | None = None


@dataclass(frozen=True)
class PolicyInfo:
    """What a plugin says of a placement policy.

    Parameters
    ----------
    name : str
        Name for ``EPLBConfig.policy``.
    summary : str
        One line.
    api_version : int
        See `BackendInfo`.
    target : str
        ``"module:function"``; see `eplb_core.balancing.placement.rebalance_experts` for the signature.
    requires : tuple of str
        See `BackendInfo`.
    install_hint : str
        See `BackendInfo`.
    available : callable
        See `BackendInfo`.
    """

    name: str
    summary: str
    api_version: int
    target: str
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    available: Callable[[], str | None] | None = None


@dataclass(frozen=True, eq=False)
class StagingBlock:
    """Memory handed out by a `StagingAllocator`.

    Parameters
    ----------
    data : torch.Tensor
        uint8 [nbytes], contiguous.
    owner : object
        What keeps the memory alive, of the allocator's own choosing.
    """

    data: torch.Tensor
    owner: object


@dataclass(frozen=True)
class StagingStats:
    """Bytes of a `StagingAllocator`.

    Parameters
    ----------
    nbytes_in_use : int
        Taken by the blocks that are out, what the pool rounds up included.
    nbytes_peak : int
        The most that `nbytes_in_use` has been.
    nbytes_pool : int
        Held beside those: released blocks that wait for their event, and what the allocator's own pool caches.
    nbytes_rounding : int
        What rounding adds to `nbytes_in_use`; 0 where the allocator cannot tell.
    """

    nbytes_in_use: int
    nbytes_peak: int
    nbytes_pool: int
    nbytes_rounding: int = 0


@runtime_checkable
class StagingAllocator(Protocol):
    """Owns memory for landing and send buffers; the core and the backends own the leases.

    An allocator is built as ``Target(device)`` with the `torch.device` of the weights, one for each communicator, and
    used from several threads. The core's leases are the landing slots, a backend's its send slots: blocks are asked for
    when a communicator is built or rebuilt and given back when it is closed, never in between, so whatever the world
    size at most ``2 * staging_layers`` are out at a time. `eplb_core.leases.Leases` keeps the books that `release` and
    `stats` need.

    A class may also have a classmethod ``probe(device) -> Mapping[str, str]``: import the library, try it for weights
    on that device, and return facts to show, or raise with the remedy. The core calls it before it builds one;
    ``eplb backends --probe`` calls it in a process of its own.
    """

    def allocate(self, nbytes: int, device: torch.device) -> StagingBlock:
        """Return a block on a device.

        Parameters
        ----------
        nbytes : int
            Size, from 0 on.
        device : torch.device
            The weights' device, or the CPU for host memory fit for it.

        Returns
        -------
        StagingBlock
            uint8 ``[nbytes]``, contiguous, at a multiple of 64 bytes, contents undefined; ``owner`` is the allocator's.

        Raises
        ------
        TransferError
            EPLB-T010: memory that it does not have, or none left.
        """
        ...

    def release(self, block: StagingBlock, event: object | None = None) -> None:
        """Take a block back.

        Parameters
        ----------
        block : StagingBlock
            One of this allocator's, once.
        event : object or None
            A recorded device event: anything whose ``query()`` says whether what reads or writes the block has
            completed. The memory is not handed out again, nor given back to anybody, before that.

        Raises
        ------
        TransferError
            EPLB-T010: not a block that is out.
        """
        ...

    def stats(self) -> StagingStats:
        """Return the allocator's byte counts."""
        ...


@dataclass(frozen=True)
class LocalMetadata:
    """What ``register_buffers`` returns.

    Parameters
    ----------
    payload : bytes
        Opaque to the core, for this backend on other ranks; at most 1 MiB. Never a pickle.
    """

    payload: bytes


@dataclass(frozen=True)
class PeerMetadata:
    """A peer's metadata after the core has checked its envelope.

    Parameters
    ----------
    rank : int
        The peer.
    payload : bytes
        Its `LocalMetadata.payload`.
    """

    rank: int
    payload: bytes


@dataclass(frozen=True)
class ConnectReceipt:
    """What ``exchange_metadata`` returns: the peers that this call made reachable."""

    peers: tuple[int, ...]


@dataclass(frozen=True)
class TransferReceipt:
    """What ``wait`` returns.

    Parameters
    ----------
    nbytes_received, nbytes_sent : int
        Bytes that this rank's rows of the layer took.
    """

    nbytes_received: int
    nbytes_sent: int


@dataclass(frozen=True, eq=False)
class Buffers:
    """What ``register_buffers`` is given: live rows to read from and landing memory to write into.

    Parameters
    ----------
    rows : list of list of torch.Tensor
        ``[num_layers][num_tensors]``, each uint8 ``[num_local_physical_experts, nbytes_per_expert]``, a view of live
        memory. Never write into it.
    landing : list of torch.Tensor
        ``[staging_layers]``, each uint8 ``[nbytes]`` on `landing_device`; the ``landing_offset`` of a receive counts
        from its start. With a host's own ``landing=`` see `landing_rows`.
    landing_rows : list of list of torch.Tensor or None
        ``[staging_layers][num_tensors]``, each uint8 ``[num_local_physical_experts, nbytes_per_expert]``: the host's
        own landing memory, where it gave some ("rows" layout only); `landing` is then empty.
    send_nbytes : int
        Most bytes that the distinct rows of one layer take: the size of a send staging slot, where one is needed.
    """

    rows: list[list[torch.Tensor]]
    landing: list[torch.Tensor]
    landing_rows: list[list[torch.Tensor]] | None
    send_nbytes: int


@dataclass(frozen=True, eq=False)
class BackendContext:
    """What a backend is built with, besides its options.

    Parameters
    ----------
    rank : int
        This rank within the expert-parallel group.
    world_size : int
        Ranks of the group, absent ones included: ranks and map columns keep their numbers.
    members : tuple of int
        Ranks that take part, ascending.
    epoch : int
        Rises at connect, rebuild and rebind; generations rise within one.
    name : str
        Name of the communicator.
    store : torch.distributed.Store
        A client of the backend's own, in a namespace of its own, for this epoch.
    device : torch.device
        Where the weights live.
    stream : object or None
        Device stream for the backend's own copies and kernels; None on CPU.
    device_group : torch.distributed.ProcessGroup or None
        The host's group of the weights' device, for backends that use one.
    staging : StagingAllocator
        For send staging; landing memory is the core's.
    staging_layers : int
        Landing slots, 1 or 2.
    timeout_s : float
        Limit of every wait, seconds.
    host : str
        Address under which other ranks reach this one, e.g. ``127.0.0.1``.
    cancelled : callable
        ``cancelled() -> reason | None``: a rate-limited look at the decision key and at liveness. Every loop of a
        backend consults it.
    max_ops_per_batch : int
        For backends that declare ``batched``.
    """

    rank: int
    world_size: int
    members: tuple[int, ...]
    epoch: int
    name: str
    store: Any
    device: torch.device
    stream: Any
    device_group: Any
    staging: StagingAllocator
    staging_layers: int
    timeout_s: float
    host: str
    cancelled: Callable[[], str | None]
    max_ops_per_batch: int


class Backend(Protocol):
    """A backend's class: built as ``Target(options, context)``; the four hooks carry ``@hookimpl``.

    Class attributes say what the core must know before it builds one:

    * ``landing_layout``: ``"rows"``, a grid of (tensor base + destination row x nbytes), or ``"packed_by_peer"``,
      cumulative per source, each message 64-byte aligned.
    * ``landing_device``: ``"weights"`` or ``"host"``.
    * ``coalesce_nbytes``: rows below this travel packed, one message per peer ("packed_by_peer" only); 0 packs nothing.
    * ``needs_progress``: False when transfers move without ``progress()`` being called.
    """

    landing_layout: ClassVar[Literal["rows", "packed_by_peer"]]
    landing_device: ClassVar[Literal["weights", "host"]]
    coalesce_nbytes: ClassVar[int]
    needs_progress: ClassVar[bool]

    def __init__(self, options: Any, context: BackendContext) -> None: ...

    @classmethod
    def probe(cls, options: Any) -> Mapping[str, str]:
        """Import the library and check that it works here; return facts to show, or raise with the remedy."""
        ...

    @property
    def shared_options(self) -> Mapping[str, str | int | float | bool]:
        """Options that must be equal on all ranks; part of what is compared at connect."""
        ...

    def register_buffers(self, buffers: Buffers) -> LocalMetadata: ...

    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt: ...

    def transfer(self, plan: TransferPlan) -> object: ...

    def wait(self, handle: object, timeout_s: float) -> TransferReceipt: ...

    def progress(self) -> None:
        """Move things on, cheaply, without blocking; called between the core's polls."""
        ...

    def abort(self, handle: object, reason: str) -> bool:
        """Stop a transfer, within a second; True when neither side's memory is touched any more."""
        ...

    def connected(self) -> bool:
        """Are the connections that `exchange_metadata` began usable? `progress` is pumped until they are."""
        ...

    def close(self, force: bool = False) -> bool | None:
        """Release everything; with `force` without waiting for anyone, within a second.

        Returns
        -------
        bool or None
            True when landing and live memory are certainly not touched any more, also by transfers that `abort` could
            not drain. Anything else quarantines the landing memory of an undrained transfer.
        """
        ...


@dataclass(frozen=True)
class Event:
    """What observers are told through ``observe``.

    Parameters
    ----------
    kind : {"agree", "vote", "tally", "commit", "abort"}
        What happens on this rank: a ballot is about to be cast (agree, vote), this rank read all ballots of a layer and
        is about to decide (tally), a layer was committed, a generation was aborted.
    name : str
        Communicator.
    epoch, generation : int
        Which rearrangement.
    layer : int or None
        Which layer; None for agree and for an abort outside a layer.
    ok : bool
        Of a ballot: what is voted. True for commit, False for abort.
    reason : str
        Why not.
    evidence : mapping of str to mapping of int to bytes
        For tally: what observers attached to their ballots, by observer name, then by rank.
    """

    kind: Literal["agree", "vote", "tally", "commit", "abort"]
    name: str
    epoch: int
    generation: int
    layer: int | None
    ok: bool
    reason: str = ""
    evidence: Mapping[str, Mapping[int, bytes]] = field(default_factory=dict)
