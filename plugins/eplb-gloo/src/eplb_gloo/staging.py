"""Send staging: how much a layer needs, taken from the context's allocator and given back when nothing writes it."""

from __future__ import annotations

import torch

from eplb_core.backend import BackendContext, Buffers, StagingBlock

ALIGNMENT = 64
"""Bytes; every packed message starts at a multiple of it."""


def send_slot_nbytes(buffers: Buffers, context: BackendContext, coalesce_nbytes: int) -> int:
    """Return what one layer's sends take of send staging at most.

    From the host only packed rows take any, from a device every distinct row does, once. The core's plan packs a row
    again, for a further peer, only as long as the distinct rows leave room for it.

    Parameters
    ----------
    buffers : Buffers
        What is registered.
    context : BackendContext
        Says who the peers are and where the rows lie.
    coalesce_nbytes : int
        Rows below it are packed.

    Returns
    -------
    int
        Bytes, with room to align one message per peer; 0 when no staging is needed.
    """
    num_peers = len(context.members) - 1
    nbytes = buffers.send_nbytes if num_peers else 0
    if context.device.type == "cpu":
        small = [sum(tensor.numel() for tensor in layer if tensor.shape[1] < coalesce_nbytes) for layer in buffers.rows]
        nbytes = min(nbytes, num_peers * max(small, default=0))
    return nbytes + ALIGNMENT * num_peers if nbytes else 0


class SendSlots:
    """``staging_layers`` slots of host memory fit for the weights' device.

    Parameters
    ----------
    context : BackendContext
        Its allocator and stream are used.
    nbytes : int
        Size of each slot; 0 allocates nothing.

    Attributes
    ----------
    tensors : list of torch.Tensor
        uint8 ``[nbytes]`` each; empty when nothing was allocated.
    """

    def __init__(self, context: BackendContext, nbytes: int) -> None:
        self._allocator = context.staging
        self._stream = context.stream
        self._blocks: list[StagingBlock] = []
        try:
            for _ in range(context.staging_layers if nbytes else 0):
                self._blocks.append(self._allocator.allocate(nbytes, torch.device("cpu")))
        except BaseException:
            self.release()
            raise
        self.tensors = [block.data[:nbytes] for block in self._blocks]

    def release(self) -> None:
        """Give the slots back, to be used again once no copy into them is queued: a failed transfer leaves some."""
        event = None
        if self._stream is not None and self._blocks:
            try:
                event = self._stream.record_event()
            except RuntimeError:  # the device has failed, and nobody can say when its copies end: keep the memory
                return
        while self._blocks:
            self._allocator.release(self._blocks.pop(), event)
        self.tensors = []
