"""``cupy_device``: plain cudaMalloc memory, which peers can read whatever torch's allocator is set to."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from eplb_core.backend import StagingBlock, StagingStats
from eplb_core.backend.toolkit import BlockAccounts, first_line
from eplb_core.errors import ConfigError, TransferError
from eplb_cupy.blocks import on_device
from eplb_cupy.library import CupyError, facts, load_cupy

NAME = "cupy_device"


class CupyDevice:
    """Device memory for landing and send buffers that is not torch's.

    torch's memory may lie in segments mapped by CUDA's virtual memory management (expandable segments), which other
    processes and NICs cannot map. This allocator has a CuPy pool of its own, over cudaMalloc, so neither torch's
    settings nor an allocator that the host gave to CuPy (`cupy.cuda.set_allocator`) changes what a block is. The pool
    keeps no more than was in use at its peak, and ends with the allocator.

    Parameters
    ----------
    device : torch.device
        Where the weights live.

    Raises
    ------
    ConfigError
        EPLB-C014: CuPy cannot be used here, or the weights are on no CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            reason = f"it has CUDA memory only, and the weights are on {device}"
            raise ConfigError("EPLB-C014", staging=NAME, reason=reason)
        try:
            self._cupy = load_cupy()
        except CupyError as error:
            raise ConfigError("EPLB-C014", staging=NAME, reason=str(error)) from error
        self._leases = BlockAccounts()
        try:
            index = torch.empty(0, device=device).device.index  # "cuda" is the current one
            self._device = torch.device("cuda", index)
            with self._current():
                self._pool: Any = self._cupy.cuda.MemoryPool()
        except RuntimeError as error:
            reason = f"{device} cannot be used: {first_line(error)}"
            raise ConfigError("EPLB-C014", staging=NAME, reason=reason) from error

    @classmethod
    def probe(cls, device: torch.device) -> Mapping[str, str]:
        """Import CuPy and take a little memory on a device.

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
            staging.release(staging.allocate(512, staging._device))
        except TransferError as error:
            reason = f"{error.fields['problem']} ({error.detail.rstrip('.')})"
            raise ConfigError("EPLB-C014", staging=NAME, reason=reason) from error
        return {**facts(staging._cupy), "device memory": f"cudaMalloc on {staging._device}"}

    def allocate(self, nbytes: int, device: torch.device) -> StagingBlock:
        """Return a block of device memory; see `eplb_core.backend.StagingAllocator.allocate`."""
        nbytes = operator.index(nbytes)
        if nbytes < 0:
            raise TransferError("EPLB-T010", problem=f"{nbytes} bytes were asked for")
        if device.type != "cuda" or device.index not in {None, self._device.index}:
            problem = f"{NAME} has memory on {self._device} only, and memory on {device} was asked for"
            raise TransferError("EPLB-T010", problem=problem, detail="cupy_pinned has host memory.")
        self._leases.let_go()
        try:
            with self._current():
                pointer = self._take(max(nbytes, 1))
                data = on_device(self._cupy, pointer, nbytes)
        except TransferError:
            raise
        except (RuntimeError, MemoryError) as error:  # CUDA's, and CuPy's when memory or the pool's limit is used up
            held = self.stats()
            problem = (
                f"{nbytes} bytes on {self._device} could not be allocated beside {held.nbytes_in_use} in use and"
                f" {held.nbytes_pool} pooled or waiting for an event"
            )
            detail = f"{type(error).__name__}: {first_line(error)}"
            raise TransferError("EPLB-T010", problem=problem, detail=detail) from error
        return self._leases.grant(data, int(pointer.mem.size))

    def release(self, block: StagingBlock, event: object | None = None) -> None:
        """Take a block back; see `eplb_core.backend.StagingAllocator.release`.

        The pool gets the memory when the event has completed and no tensor refers to the block any more.
        """
        self._leases.take_back(block, event)

    def stats(self) -> StagingStats:
        """Return byte counts; the pool is this allocator's own, so what it caches is in them."""
        self._leases.let_go()
        with self._current():  # a CuPy pool answers for the current device
            cached = int(self._pool.free_bytes())
        return self._leases.stats(nbytes_cached=cached)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the weights' device current, for torch's copy of the CUDA runtime and for CuPy's."""
        with torch.cuda.device(self._device), self._cupy.cuda.Device(self._device.index):
            yield

    def _take(self, nbytes: int) -> Any:
        before = self._pool.total_bytes()
        pointer = self._pool.malloc(nbytes)
        if self._pool.total_bytes() > before:
            # Nothing pooled would do, so nothing pooled is of the sizes that are asked for now.
            self._pool.free_all_blocks()
        return pointer
