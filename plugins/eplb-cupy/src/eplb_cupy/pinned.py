"""``cupy_pinned``: page-locked host memory from CuPy's pinned pool, without what the pool would round up."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from eplb_core.backend import StagingBlock, StagingStats
from eplb_core.backend.toolkit import BlockAccounts, first_line
from eplb_core.errors import ConfigError, TransferError
from eplb_cupy.blocks import on_host
from eplb_cupy.library import CupyError, facts, load_cupy

NAME = "cupy_pinned"
UNIT_NBYTES = 512
"""What CuPy's pool rounds to before it goes up to a power of two."""
POOLED_NBYTES = 1 << 20
"""Blocks up to this size are the pool's, whatever it rounds them to."""
CHUNK_NBYTES = 64 << 10
"""Larger ones are whole chunks, so that rounding adds less than one of them."""


class CupyPinned:
    """Host memory for landing and send buffers, page-locked by CUDA so that device copies need no bounce buffer.

    Blocks come from `cupy.cuda.alloc_pinned_memory`, so a host that installed a pool or an allocator of its own with
    `cupy.cuda.set_pinned_memory_allocator` gets its blocks from there. CuPy's pool rounds to a power of two: 33 MiB
    would take 64. Blocks above 1 MiB that are no power of two are therefore allocated alone, in chunks of 64 KiB, as
    the same kind of memory that the pool is made of (`cupy.cuda.PinnedMemory`, or a subclass that takes the same
    arguments), and given back to the system instead of to the pool. Where the installed allocator makes other memory,
    its own rounding stands. Either way `stats` counts what was taken.

    Parameters
    ----------
    device : torch.device
        Where the weights live.

    Raises
    ------
    ConfigError
        EPLB-C014: CuPy cannot be used here.
    """

    def __init__(self, device: torch.device) -> None:
        self._cupy = _load()
        self._device = device
        self._leases = BlockAccounts()

    @classmethod
    def probe(cls, device: torch.device) -> Mapping[str, str]:
        """Import CuPy and take a little page-locked memory for weights on a device.

        Parameters
        ----------
        device : torch.device
            Where the weights live.

        Returns
        -------
        mapping of str to str
            Facts to show.

        Raises
        ------
        ConfigError
            EPLB-C014: why not, and what to do.
        """
        staging = cls(device)
        try:
            block = staging.allocate(UNIT_NBYTES, torch.device("cpu"))
        except TransferError as error:
            reason = f"{error.fields['problem']} ({error.detail.rstrip('.')})"
            raise ConfigError("EPLB-C014", staging=NAME, reason=reason, detail=_REMEDY) from error
        pinned = (
            "page-locked" if device.type == "cuda" and block.data.is_pinned() else "as the installed allocator gives it"
        )
        staging.release(block)
        return {**facts(staging._cupy), "host memory": pinned}

    def allocate(self, nbytes: int, device: torch.device) -> StagingBlock:
        """Return a block of host memory; see `eplb_core.backend.StagingAllocator.allocate`."""
        nbytes = operator.index(nbytes)
        if nbytes < 0:
            raise TransferError("EPLB-T010", problem=f"{nbytes} bytes were asked for")
        if device.type != "cpu":
            problem = f"{NAME} has host memory only, and memory on {device} was asked for"
            raise TransferError("EPLB-T010", problem=problem, detail="cupy_device has device memory.")
        self._leases.let_go()
        try:
            # A first allocation makes a context on the current device, which may be another one than the weights'.
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                pointer = self._take(nbytes)
            data = on_host(pointer, nbytes)
        except TransferError:
            raise
        except Exception as error:  # CUDA's, or whatever an installed allocator raises
            held = self.stats()
            problem = (
                f"{nbytes} bytes of page-locked memory could not be allocated beside {held.nbytes_in_use} in use and"
                f" {held.nbytes_pool} waiting for an event"
            )
            detail = f"{type(error).__name__}: {first_line(error)}"
            raise TransferError("EPLB-T010", problem=problem, detail=detail) from error
        return self._leases.grant(data, int(pointer.size()))

    def release(self, block: StagingBlock, event: object | None = None) -> None:
        """Take a block back; see `eplb_core.backend.StagingAllocator.release`.

        CuPy gets the memory when the event has completed and no tensor refers to the block any more.
        """
        self._leases.take_back(block, event)

    def stats(self) -> StagingStats:
        """Return byte counts; what CuPy's pool caches is everybody's, and not in them."""
        return self._leases.stats()

    def _take(self, nbytes: int) -> Any:
        cuda = self._cupy.cuda
        unit = UNIT_NBYTES if nbytes <= POOLED_NBYTES else CHUNK_NBYTES
        size = max(1, -(-nbytes // unit)) * unit
        if size > POOLED_NBYTES and size & (size - 1):
            kind = self._kind_of_memory()
            if kind is not None:
                return cuda.PinnedMemoryPointer(kind(size, cuda.runtime.hostAllocPortable), 0)
        return cuda.alloc_pinned_memory(size)

    def _kind_of_memory(self) -> Any:
        """Return the class of what the installed allocator makes, where it can be made in any size; else None."""
        pinned = self._cupy.cuda.pinned_memory
        memory = self._cupy.cuda.alloc_pinned_memory(1).mem
        if isinstance(memory, pinned.PooledPinnedMemory):
            memory = memory.mem
        return type(memory) if isinstance(memory, pinned.PinnedMemory) else None


_REMEDY = (
    "Install the GPU's driver or a newer one, raise 'ulimit -l', or leave staging unset for torch's own allocator."
)


def _load() -> Any:
    try:
        return load_cupy()
    except CupyError as error:
        raise ConfigError("EPLB-C014", staging=NAME, reason=str(error)) from error
