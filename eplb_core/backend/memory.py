"""Memory in the contract: live rows and landing memory that a backend is given, and allocators of staging memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # discovery reads descriptors; it must not pay for torch, numpy or pydantic
    import torch

from eplb_core.report import StagingStats


@dataclass(frozen=True, eq=False)
class StagingBlock:
    """Memory handed out by a `StagingAllocator`.

    Parameters
    ----------
    data : torch.Tensor
        uint8 [nbytes], contiguous.
    owner : object
        Object of the allocator that keeps the memory alive.
    """

    data: torch.Tensor
    owner: object


@runtime_checkable
class StagingAllocator(Protocol):
    """Owns memory for landing and send buffers; the core and the backends own the leases.

    An allocator is built as ``Target(device)`` with the `torch.device` of the weights, one for each communicator, and
    used from several threads. The core's leases are the landing slots, a backend's its send slots: blocks are
    requested when a communicator is built or rebuilt and given back when it is closed, never in between, so at most
    ``2 * staging_layers`` are out at a time, whatever the world size. `eplb_core.backend.accounts.BlockAccounts` keeps
    the accounts that `release` and `stats` need.

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
            EPLB-T010: it has no such memory, or none left.
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
            completed. The memory is neither reused nor freed before that.

        Raises
        ------
        TransferError
            EPLB-T010: the block is not handed out.
        """
        ...

    def stats(self) -> StagingStats:
        """Return the allocator's byte counts."""
        ...


class RowList:
    """Live rows of one tensor that lie apart: the host keeps every expert in a tensor of its own.

    Indexed, measured and iterated as a uint8 tensor ``[num_local_physical_experts, nbytes_per_expert]`` is; only a base
    address it has not. Backends that take such rows declare ``row_lists = True``.

    Parameters
    ----------
    rows : sequence of torch.Tensor
        ``[num_local_physical_experts]``, each uint8 ``[nbytes_per_expert]``.

    Attributes
    ----------
    addresses : list of int
        ``[num_local_physical_experts]``, where each row begins.
    """

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._rows = list(rows)
        self.device = self._rows[0].device
        self.shape = (len(self._rows), self._rows[0].numel())
        self.addresses = [row.data_ptr() for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self._rows[row]

    def numel(self) -> int:
        """Return the bytes of all rows."""
        return self.shape[0] * self.shape[1]

    def unbind(self, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Return the rows; `dim` is 0."""
        del dim
        return tuple(self._rows)


@dataclass(frozen=True, eq=False)
class Buffers:
    """Argument of ``register_buffers``: live rows to read from and landing memory to write into.

    Parameters
    ----------
    rows : list of list of torch.Tensor or RowList
        ``[num_layers][num_tensors]``, each uint8 ``[num_local_physical_experts, nbytes_per_expert]``, a view of live
        memory. Never write into it. A `RowList` comes only to backends that declare ``row_lists``.
    landing : list of torch.Tensor
        ``[staging_layers]``, each uint8 ``[nbytes]`` on `landing_device`; the ``landing_offset`` of a receive counts
        from its start. With a host's own ``landing=`` see `landing_rows`.
    landing_rows : list of list of torch.Tensor or None
        ``[staging_layers][num_tensors]``, each uint8 ``[num_local_physical_experts, nbytes_per_expert]``: the host's
        own landing memory, where it gave some ("rows" layout only); `landing` is then empty.
    send_nbytes : int
        Most bytes that the distinct rows of a layer take: the size of a send staging slot, if one is needed.
    """

    rows: list[list[Any]]
    landing: list[torch.Tensor]
    landing_rows: list[list[torch.Tensor]] | None
    send_nbytes: int
