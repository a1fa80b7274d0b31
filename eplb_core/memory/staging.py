"""Staging memory from torch's own allocators: the `StagingAllocator` that every installation has."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import nullcontext

import torch

from eplb_core.backend import StagingBlock
from eplb_core.backend.accounts import BlockAccounts
from eplb_core.errors import TransferError
from eplb_core.report import StagingStats


class TorchStaging:
    """Landing and send buffers from torch's allocators, which pool device memory and pinned memory themselves.

    Notes
    -----
    Host memory is pinned when the weights are on a CUDA device, or on another accelerator for which torch can pin:
    copies to and from it can then be asynchronous. ``pins_host_memory`` says whether.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pins_host_memory = _can_pin(device)
        self._accounts = BlockAccounts()

    @classmethod
    def probe(cls, device: torch.device) -> Mapping[str, str]:
        """Allocate a little host memory for weights on a device, and report whether torch pins it."""
        staging = cls(device)
        staging.allocate(64, torch.device("cpu"))
        return {"torch": torch.__version__, "host memory": "pinned" if staging.pins_host_memory else "not pinned"}

    def allocate(self, nbytes: int, device: torch.device) -> StagingBlock:
        """Return a contiguous uint8 block, 64-byte aligned, on the weights' device or the CPU; else EPLB-T010."""
        nbytes = operator.index(nbytes)
        if nbytes < 0:
            raise TransferError("EPLB-T010", problem=f"{nbytes} bytes were asked for")
        host = device.type == "cpu"
        if not host and (device.type != self.device.type or device.index not in {None, self.device.index}):
            raise TransferError("EPLB-T010", problem=f"{device} was asked for where the weights are on {self.device}")
        self._accounts.let_go()
        try:
            # Outside of inference mode: a block made inside it could not be written later.
            with torch.inference_mode(mode=False):
                data = (
                    _pinned(nbytes, self.device)
                    if host and self.pins_host_memory
                    else _plain(nbytes, device if host else self.device)
                )
        except RuntimeError as error:
            held = self.stats()
            problem = (
                f"{nbytes} bytes on {device} could not be allocated beside {held.nbytes_in_use} in use and"
                f" {held.nbytes_pool} waiting for an event"
            )
            raise TransferError("EPLB-T010", problem=problem, detail=str(error).partition("\n")[0]) from error
        return self._accounts.grant(data)

    def release(self, block: StagingBlock, event: object | None = None) -> None:
        """Take a block back, once; its memory is kept until the event given has happened. Else EPLB-T010.

        Notes
        -----
        An event is anything whose ``query()`` says whether what reads or writes the block has completed.
        """
        self._accounts.take_back(block, event)

    def stats(self) -> StagingStats:
        """Return bytes of blocks handed out now and at the peak, and of released ones that wait for their event.

        Notes
        -----
        Memory that torch's own pools round up to or cache is not counted.
        """
        return self._accounts.stats()


def _can_pin(device: torch.device) -> bool:
    if device.type == "cuda":
        return True  # if pinning fails, allocate raises; it never goes on unpinned
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False
    try:
        torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # raised by torch for an accelerator without pinned memory
        return False
    return True


def _pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda" and not torch.cuda.device_count():
        raise RuntimeError("torch sees no cuda device here")
    # On CUDA pinning sets up a context on the current device, which may be another one than the weights'.
    with torch.cuda.device(device) if device.type == "cuda" and device.index is not None else nullcontext():
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _plain(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
