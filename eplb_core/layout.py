"""What is registered: expert tensors checked once and seen from then on as rows of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
Key = tuple[int, str]

ALIGNMENT = 64
"""Bytes; where grids and messages start in landing memory."""


@dataclass(frozen=True)
class TensorRecord:
    """What must be equal about one tensor on every rank.

    Parameters
    ----------
    dtype : str
        Such as ``"bfloat16"``.
    shape : tuple of int
        One expert's shape, without the expert axis.
    stride : tuple of int
        One expert's strides in elements; 1 where the size is 1, for torch leaves those arbitrary.
    nbytes : int
        Bytes of one expert's row.
    alias : int
        Index of the earlier tensor of the layer that is the same memory; -1 for none.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int
    alias: int = -1


@dataclass(frozen=True)
class LayoutRecord:
    """What must be equal about a layout on every rank; plain data, encoded by `eplb_core.metadata`.

    Parameters
    ----------
    num_local_physical_experts : int
        Rows of every tensor.
    names : tuple of tuple of str
        ``[num_layers][num_tensors]``.
    tensors : tuple of tuple of TensorRecord
        ``[num_layers][num_tensors]``; equal layers are one object.
    """

    num_local_physical_experts: int
    names: tuple[tuple[str, ...], ...]
    tensors: tuple[tuple[TensorRecord, ...], ...]


@dataclass(frozen=True, eq=False)
class LayerGeometry:
    """Sizes of one layer's rows and of the landing memory they need. Arrays are read-only.

    Parameters
    ----------
    nbytes : IntArray
        ``[num_tensors]``, bytes of one expert's row.
    moving : IntArray
        Indices of the tensors that move, ascending: exact aliases of an earlier tensor of the layer, and rows of
        0 bytes, are left out.
    num_local_physical_experts : int
        Rows of every tensor.
    offsets : IntArray
        ``[num_tensors]``, 64-byte-aligned start of each tensor's grid in a "rows" landing slot; an alias has the start
        of the tensor it is.
    nbytes_grid : int
        Bytes of a "rows" landing slot.
    """

    nbytes: IntArray
    moving: IntArray
    num_local_physical_experts: int
    offsets: IntArray
    nbytes_grid: int

    @property
    def nbytes_rows(self) -> int:
        """Bytes of all rows that move, every row once, without padding."""
        raise NotImplementedError

    def nbytes_packed(self, num_peers: int) -> int:
        """Bytes that suffice for a "packed_by_peer" landing slot."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Layout:
    """Registered tensors. Holds their memory for as long as it lives itself, whatever the host deletes.

    Parameters
    ----------
    weights : list of list of torch.Tensor
        ``[num_layers][num_tensors]``, detached, sharing the host's memory.
    rows : list of list of torch.Tensor
        The same memory, uint8 ``[num_local_physical_experts, nbytes_per_expert]``.
    geometries : tuple of LayerGeometry
        ``[num_layers]``; identical ones are one object.
    keys : tuple of (int, str)
        (layer, tensor name), in the order of registration.
    device : torch.device
        Where every tensor lies.
    num_layers : int
        Layers registered.
    num_local_physical_experts : int
        Rows of every tensor.
    """

    weights: list[list[torch.Tensor]]
    rows: list[list[torch.Tensor]]
    geometries: tuple[LayerGeometry, ...]
    keys: tuple[Key, ...]
    device: torch.device
    num_layers: int
    num_local_physical_experts: int

    def record(self) -> LayoutRecord:
        """Return what must be equal on every rank."""
        raise NotImplementedError


def build_layout(
    weights: Sequence[Sequence[torch.Tensor]],
    tensor_names: Sequence[str] | Sequence[Sequence[str]] | None = None,
) -> Layout:
    """Check the host's expert tensors and view them as rows of bytes; MetadataError EPLB-M001 names the tensor."""
    raise NotImplementedError


def check_landing(
    landing: Any, layout: Layout, *, staging_layers: int | None = None
) -> list[list[torch.Tensor]]:
    """View a host's own ``landing=`` as rows of bytes; ConfigError EPLB-C010 when it does not fit every layer."""
    raise NotImplementedError
