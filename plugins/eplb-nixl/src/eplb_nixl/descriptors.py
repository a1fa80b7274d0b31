"""Rows as descriptors: from base addresses and strides to NIXL's arrays, and from a plan's columns to indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from eplb_core.backend import MoveColumns
from eplb_nixl.metadata import AddressArray

IndexArray = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Numbers the rows of every (layer, tensor) of one rank; the same on every rank, for layouts are equal.

    Parameters
    ----------
    nbytes : tuple of IntArray
        ``[num_layers]`` of ``[num_tensors]``, bytes of one expert's row.
    num_experts : IntArray
        ``[len(flat)]``, rows of each tensor that has bytes.
    num_rows : int
        Rows of one slot.
    starts : tuple of IntArray
        ``[num_layers]`` of ``[num_tensors]``: number of the tensor's first row; -1 for rows without bytes, which NIXL
        cannot describe and no plan names.
    flat : IntArray
        Indices, counted over the layers, of the tensors that have bytes.
    """

    nbytes: tuple[IntArray, ...]
    num_experts: IntArray
    num_rows: int
    starts: tuple[IntArray, ...]
    flat: IntArray

    @classmethod
    def of(cls, nbytes: Sequence[Sequence[int]], num_experts: Sequence[int]) -> RowIndex:
        """Build it from ``[num_layers][num_tensors]`` bytes of a row, and the rows of each layer's tensors."""
        layers = tuple(np.array(layer, np.int64) for layer in nbytes)
        sizes = np.concatenate(layers) if layers else np.zeros(0, np.int64)
        counts = np.repeat(np.array(num_experts, np.int64), [len(layer) for layer in layers]) * (sizes > 0)
        starts = np.where(sizes > 0, np.cumsum(counts) - counts, -1)
        flat = np.flatnonzero(sizes)
        ends = np.cumsum([len(layer) for layer in layers])[:-1]
        return cls(layers, counts[flat], int(counts.sum()), tuple(np.split(starts, ends)), flat)

    @property
    def num_tensors(self) -> int:
        """Tensors over all layers, those without bytes included."""
        return sum(map(len, self.nbytes))

    def blocks(self, bases: AddressArray, device_index: int) -> AddressArray:
        """Describe every row of a rank, slot by slot.

        Parameters
        ----------
        bases : AddressArray
            ``[num_slots, num_tensors]``.
        device_index : int
            Where they lie.

        Returns
        -------
        AddressArray
            See `blocks_of`.
        """
        nbytes = np.concatenate(self.nbytes)[self.flat]
        chosen = bases[:, self.flat]
        counts = np.tile(self.num_experts, len(chosen))
        return blocks_of(chosen.reshape(-1), np.tile(nbytes, len(chosen)), counts, device_index)

    def rows_apart(self, addresses: AddressArray, device_index: int) -> AddressArray:
        """Describe every row of a rank whose rows lie apart.

        Parameters
        ----------
        addresses : AddressArray
            ``[1, num_rows]``, in the order of `starts`.
        device_index : int
            Where they lie.

        Returns
        -------
        AddressArray
            See `blocks_of`; a block per row.
        """
        nbytes = np.repeat(np.concatenate(self.nbytes)[self.flat], self.num_experts)
        return blocks_of(addresses.reshape(-1), nbytes, 1, device_index)

    def rows(self, layer: int, slot: int, tensor: IntArray, row: IntArray) -> IndexArray:
        """Return the numbers of rows of one layer as they stand in `blocks`."""
        return (slot * self.num_rows + self.starts[layer][tensor] + row).astype(np.int32)


def blocks_of(bases: AddressArray, nbytes: IntArray, num_rows: int | IntArray, device_index: int) -> AddressArray:
    """Describe grids of rows by base and stride.

    Parameters
    ----------
    bases : AddressArray
        ``[num_blocks]``, addresses.
    nbytes : IntArray
        ``[num_blocks]``, bytes of a row, which is also the stride.
    num_rows : int or IntArray
        Rows of each, ``[num_blocks]`` or one number for all.
    device_index : int
        Where they lie.

    Returns
    -------
    AddressArray
        ``[num_blocks, 5]``: address, length, device, stride, count, as NIXL 1.5 takes them.
    """
    blocks = np.empty((len(bases), 5), np.uint64)
    blocks[:, 0] = bases
    blocks[:, 1] = nbytes
    blocks[:, 2] = device_index
    blocks[:, 3] = nbytes
    blocks[:, 4] = num_rows
    return blocks


def expand(blocks: AddressArray) -> AddressArray:
    """Turn strided descriptors into one (address, length, device) per row, in the same order, for older NIXL."""
    counts = blocks[:, 4].astype(np.int64)
    each = np.repeat(blocks, counts, axis=0)
    within = np.arange(len(each), dtype=np.uint64) - np.repeat(np.cumsum(counts) - counts, counts).astype(np.uint64)
    each[:, 0] += within * each[:, 3]
    return np.ascontiguousarray(each[:, :3])


def by_peer(columns: MoveColumns) -> Iterator[tuple[int, slice]]:
    """Cut columns, which are ordered by peer, into (peer, its rows)."""
    peers = columns.peer
    if not len(peers):
        return
    cuts = [0, *(np.flatnonzero(np.diff(peers)) + 1).tolist(), len(peers)]
    for start, end in pairwise(cuts):
        yield int(peers[start]), slice(start, end)
