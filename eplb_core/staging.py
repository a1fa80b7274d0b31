"""Staging memory from torch's own allocators: the `StagingAllocator` that every installation has."""

from __future__ import annotations

import torch

from eplb_core.backend import StagingBlock, StagingStats


class TorchStaging:
    """Landing and send buffers from torch: host memory pinned when the weights are on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, nbytes: int, device: torch.device) -> StagingBlock:
        """Return a block of `nbytes` on `device`."""
        raise NotImplementedError

    def release(self, block: StagingBlock, event: object | None = None) -> None:
        """Take a block back; its memory is kept until `event` has completed."""
        raise NotImplementedError

    def stats(self) -> StagingStats:
        """Return the allocator's byte counts."""
        raise NotImplementedError
