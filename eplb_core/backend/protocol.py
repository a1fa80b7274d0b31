"""The class that a backend author writes, and the context it is built with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:  # discovery reads descriptors; it must not pay for torch, numpy or pydantic
    import torch

    from eplb_core.backend.transfer import TransferPlan
from eplb_core.backend.memory import Buffers, StagingAllocator
from eplb_core.backend.transfer import ConnectReceipt, LocalMetadata, PeerMetadata, TransferReceipt


@dataclass(frozen=True)
class Cancelled:
    """Why a backend's loop should give up: a text for people, and facts for decisions.

    Parameters
    ----------
    reason : str
        Text for people; it goes into the error that the loop raises. Never decide by it.
    peer_lost : bool
        A member is gone for good, known from the ring or from the decision.
    store_lost : bool
        The store does not answer, so nothing more will be decided in this epoch.
    """

    reason: str
    peer_lost: bool = False
    store_lost: bool = False

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, eq=False)
class BackendContext:
    """The context of a backend: everything it is built with besides its options.

    Parameters
    ----------
    rank : int
        This rank within the expert-parallel group.
    world_size : int
        Ranks of the group, absent ones included: ranks and map columns keep their numbers.
    members : tuple of int
        Ranks that take part, ascending.
    epoch : int
        Number of the epoch; it rises with every meeting. 0 until the members have met, so it is known from the first
        ``exchange_metadata`` on.
    name : str
        Name of the communicator.
    store : torch.distributed.Store
        A store client for the backend alone, in a namespace that no other epoch uses. None until the members have met.
    device : torch.device
        Where the weights live.
    stream : object or None
        Device stream for the backend's own copies and kernels; None on CPU.
    device_group : torch.distributed.ProcessGroup or None
        The host's group of the weights' device, for backends that use one.
    staging : StagingAllocator
        Allocator for send staging; the core allocates landing memory.
    staging_layers : int
        Landing slots, 1 or 2.
    timeout_s : float
        Limit of every wait, seconds.
    host : str
        Address under which other ranks reach this one, e.g. ``127.0.0.1``.
    cancelled : callable
        ``cancelled() -> Cancelled | None``: a rate-limited look at the decision key and at liveness. Every loop of a
        backend consults it.
    max_ops_per_batch : int
        Most sends and receives per rank and batch, for backends that declare ``batched``.
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
    cancelled: Callable[[], Cancelled | None]
    max_ops_per_batch: int

    def begin(self, epoch: int, store: Any) -> None:
        """Set what the meeting has settled; the core calls it before the first ``exchange_metadata``."""
        object.__setattr__(self, "epoch", epoch)
        object.__setattr__(self, "store", store)


class Backend(Protocol):
    """A backend's class: built as ``Target(options, context)``; the four hooks carry ``@hookimpl``.

    Class attributes declare what the core must know before it builds one:

    * ``landing_layout``: ``"rows"``, a grid of (tensor base + destination row x nbytes), or ``"packed_by_peer"``,
      cumulative per source, each message 64-byte aligned.
    * ``landing_device``: ``"weights"`` or ``"host"``.
    * ``coalesce_nbytes``: rows below this travel packed, one message per peer ("packed_by_peer" only); 0 packs nothing.
    * ``needs_progress``: False when transfers move without ``progress()`` being called.
    * ``row_lists``: True when live rows may be a `RowList`; left out, such weights are refused by name.
    """

    landing_layout: ClassVar[Literal["rows", "packed_by_peer"]]
    landing_device: ClassVar[Literal["weights", "host"]]
    coalesce_nbytes: ClassVar[int]
    needs_progress: ClassVar[bool]
    row_lists: ClassVar[bool]

    def __init__(self, options: Any, context: BackendContext) -> None: ...

    @classmethod
    def probe(cls, options: Any) -> Mapping[str, str]:
        """Import the library and check that it works here; return facts to show, or raise with the remedy."""
        ...

    @property
    def shared_options(self) -> Mapping[str, str | int | float | bool]:
        """Options that must be equal on all ranks; compared when the members meet."""
        ...

    def register_buffers(self, buffers: Buffers) -> LocalMetadata: ...

    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt: ...

    def transfer(self, plan: TransferPlan) -> object: ...

    def wait(self, handle: object, timeout_s: float) -> TransferReceipt: ...

    def progress(self) -> None:
        """Advance transfers cheaply, without blocking; called between the core's polls."""
        ...

    def abort(self, handle: object, reason: str) -> bool:
        """Stop a transfer, within a second; True when neither side's memory is touched any more."""
        ...

    def connected(self) -> bool:
        """Are the connections that `exchange_metadata` began usable? `progress` is called until they are."""
        ...

    def close(self, force: bool = False) -> bool | None:
        """Release everything; with `force` without waiting for any rank, within a second.

        Returns
        -------
        bool or None
            True when landing and live memory are certainly not touched any more, also by transfers that `abort` could
            not drain. Anything else quarantines the landing memory of an undrained transfer.
        """
        ...
