"""Send buffers of a staged source: rows copied once, at the places they have in live memory, then announced."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from eplb_core.backend import BackendContext, MoveColumns, StagingBlock
from eplb_nixl.metadata import AddressArray

_ALIGNMENT = 64


class Outbox:
    """One send buffer per landing slot, each a grid that holds any layer's rows.

    Parameters
    ----------
    context : BackendContext
        Its allocator, device and stream.
    rows : list of list of torch.Tensor or RowList
        Live rows, uint8 ``[num_experts, nbytes]`` per (layer, tensor).

    Raises
    ------
    Exception
        What the allocator raises.
    """

    def __init__(self, context: BackendContext, rows: list[list[Any]]) -> None:
        self._context = context
        self._rows = rows
        self._offsets = [_offsets(layer) for layer in rows]
        nbytes = max(int(offsets[-1]) for offsets in self._offsets)
        self._blocks: list[StagingBlock] = []
        self._filled: dict[int, object] = {}  # by slot: the event after the last copies into it
        try:
            for _ in range(context.staging_layers):
                self._blocks.append(context.staging.allocate(nbytes, context.device))
        except BaseException:
            self.release()
            raise
        self._grids = [[self._grid(block, layer) for layer in range(len(rows))] for block in self._blocks]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers, uint8, to register."""
        return [block.data for block in self._blocks]

    def bases(self) -> AddressArray:
        """Return ``[num_slots, num_tensors]`` addresses, tensors counted over all layers."""
        return np.array([[view.data_ptr() for layer in grids for view in layer] for grids in self._grids], np.uint64)

    def fill(self, layer: int, slot: int, sends: MoveColumns) -> object | None:
        """Copy the rows to send into a slot, each once, however many ranks read it.

        Parameters
        ----------
        layer, slot : int
            From where, to where.
        sends : MoveColumns
            The plan's sends.

        Returns
        -------
        object or None
            A recorded event after which the rows can be read; None when they can be read now.
        """
        if not len(sends):
            return None
        distinct = np.unique(np.stack((sends.tensor, sends.row)), axis=1).T.tolist()
        device, stream = self._context.device, self._context.stream
        if device.type == "cpu":
            self._copy(layer, slot, distinct)
            return None
        before = torch.accelerator.current_stream(device)
        stream = before if stream is None else stream
        torch.accelerator.set_stream(stream)
        try:
            self._copy(layer, slot, distinct)
            self._filled[slot] = stream.record_event()
            return self._filled[slot]
        finally:
            torch.accelerator.set_stream(before)

    def release(self) -> None:
        """Give the buffers back to their allocator, for use once the copies into them are done."""
        for slot, block in enumerate(self._blocks):
            self._context.staging.release(block, self._filled.get(slot))
        self._blocks = []
        self._grids = []

    def _copy(self, layer: int, slot: int, rows: list[list[int]]) -> None:
        for tensor, row in rows:
            self._grids[slot][layer][tensor][row].copy_(self._rows[layer][tensor][row], non_blocking=True)

    def _grid(self, block: StagingBlock, layer: int) -> list[torch.Tensor]:
        offsets = self._offsets[layer].tolist()
        return [
            block.data[start : start + live.numel()].view(live.shape)
            for start, live in zip(offsets, self._rows[layer], strict=False)
        ]


def is_complete(event: Any) -> bool:
    """Say whether what `Outbox.fill` returned has happened."""
    return event is None or bool(event.query())


def _offsets(layer: list[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return 64-byte-aligned starts of a layer's grids, and the end of the last."""
    sizes = np.array([-(-live.numel() // _ALIGNMENT) * _ALIGNMENT for live in layer], np.int64)
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
