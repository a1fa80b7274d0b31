"""Landing memory: where rows wait until a layer commits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from eplb_core.arrays import ALIGNMENT
from eplb_core.backend import StagingAllocator, StagingBlock
from eplb_core.weights.layout import LayerGeometry, Layout

if TYPE_CHECKING:
    from eplb_core.backend import MoveColumns


class LandingMemory:
    """``staging_layers`` slots, each big enough for what one rank receives of any layer, and spare rows.

    Notes
    -----
    The allocator owns the slots, but for those that the host gave, uint8 ``[num_slots][num_tensors]`` of
    ``[rows, nbytes]``, for "rows" landing only. ``num_peers`` is the most ranks that one slot receives from.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        staging_layers: int,
        landing_layout: str,
        landing_device: torch.device,
        num_peers: int,
        allocator: StagingAllocator,
        host_landing: list[list[torch.Tensor]] | None,
    ) -> None:
        self.rows = None if host_landing is None else list(host_landing)
        self._allocator = allocator
        self._layout_name = landing_layout
        nbytes = max((_slot_nbytes(g, landing_layout, num_peers) for g in layout.geometries), default=0)
        self._first_own = 0 if host_landing is None else len(host_landing)
        if host_landing is not None:
            landing_device = host_landing[0][0].device
            nbytes = sum(_padded(tensor.numel()) for tensor in host_landing[0])
        count = staging_layers - self._first_own if layout.num_layers else 0
        self._blocks: list[StagingBlock] = []
        self._spare: dict[int, torch.Tensor] = {}
        try:
            for _ in range(count):
                self._blocks.append(allocator.allocate(nbytes, landing_device))
        except BaseException:
            self.release()
            raise
        self.slots = [block.data for block in self._blocks]
        self.nbytes = sum(slot.numel() for slot in self.slots)
        if self.rows is not None:
            self.rows += [_like(self.rows[0], slot) for slot in self.slots]
            self.slots = []
        self._device = layout.device
        self._widest: dict[int, int] = {}
        for geometry in {id(g): g for g in layout.geometries}.values():
            for tensor, nbytes_row in enumerate(geometry.nbytes.tolist()):
                self._widest[tensor] = max(self._widest.get(tensor, 0), nbytes_row)

    def spare_row(self, tensor: int, nbytes: int) -> torch.Tensor:
        """Return the spare row of a tensor, uint8 ``[nbytes]``, on the weights' device.

        Notes
        -----
        A cycle of local moves is broken by saving one of its rows. A tensor gets its spare row when the first commit
        that needs one is laid out, before the vote: a commit allocates nothing.
        """
        spare = self._spare.get(tensor)
        if spare is None:
            spare = torch.empty(self._widest[tensor], dtype=torch.uint8, device=self._device)
            self._spare[tensor] = spare
        return spare[:nbytes]

    @property
    def nbytes_spare(self) -> int:
        """Bytes of the spare rows."""
        return sum(spare.numel() for spare in self._spare.values())

    def landed_rows(self, slot: int, receives: MoveColumns) -> list[torch.Tensor]:
        """Return where each received row lies, uint8 ``[nbytes]``."""
        if self.rows is not None:
            rows = self.rows[slot]
            return [rows[t][r] for t, r in zip(receives.tensor.tolist(), receives.row.tolist(), strict=True)]
        slot_bytes = self.slots[slot]
        ends = (receives.landing_offset + receives.nbytes).tolist()
        return [slot_bytes[start:end] for start, end in zip(receives.landing_offset.tolist(), ends, strict=True)]

    @property
    def is_grid(self) -> bool:
        """Has every row a place of its own, which follows from its tensor and number?"""
        return self.rows is not None or self._layout_name == "rows"

    def grid_row(self, slot: int, geometry: LayerGeometry, tensor: int, row: int) -> torch.Tensor:
        """Return the place of a row in a grid, uint8 ``[nbytes]``."""
        if self.rows is not None:
            return self.rows[slot][tensor][row]
        nbytes = int(geometry.nbytes[tensor])
        start = int(geometry.offsets[tensor]) + row * nbytes
        return self.slots[slot][start : start + nbytes]

    def release(self, events: Mapping[int, object] | None = None, rest: object | None = None) -> None:
        """Give the slots back to their allocator, each with the event after which nothing touches it.

        Notes
        -----
        ``events`` holds the event of each slot, ``rest`` that of all other slots; None: nothing touches them now.
        """
        blocks, self._blocks, self.slots = self._blocks, [], []
        for slot, block in enumerate(blocks, self._first_own):
            self._allocator.release(block, (events or {}).get(slot) or rest)

    def let_go(self) -> None:
        """Drop the spare rows and the host's landing rows."""
        self._spare.clear()
        self.rows = None


def _slot_nbytes(geometry: LayerGeometry, landing_layout: str, num_peers: int) -> int:
    return geometry.nbytes_grid if landing_layout == "rows" else geometry.nbytes_packed(num_peers)


def _like(slot: list[torch.Tensor], memory: torch.Tensor) -> list[torch.Tensor]:
    """Cut a slot of the core's own into rows shaped as a slot of the host's."""
    rows, begin = [], 0
    for tensor in slot:
        rows.append(memory[begin : begin + tensor.numel()].view(tensor.shape))
        begin += _padded(tensor.numel())
    return rows


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
