"""CuPy's memory as torch tensors: always bytes, never copied, the same address on both sides.

Only uint8 crosses the border. CuPy and DLPack know no float8 or packed float4, and NumPy no bfloat16; whoever wants the
bytes as such views the tensor, in torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from eplb_core.errors import TransferError

ALIGNMENT = 64
"""Bytes; what `eplb_core.backend.StagingAllocator` promises of a block's start."""


def on_host(pointer: Any, nbytes: int) -> torch.Tensor:
    """Return the first bytes of a `cupy.cuda.PinnedMemoryPointer` as a tensor that keeps it alive.

    Parameters
    ----------
    pointer : cupy.cuda.PinnedMemoryPointer
        Memory of at least `nbytes`, and at least 1, bytes.
    nbytes : int
        Size of the block.

    Returns
    -------
    torch.Tensor
        uint8 ``[nbytes]``, CPU.

    Raises
    ------
    TransferError
        EPLB-T010: the tensor does not lie where the pointer points, or starts at no multiple of 64 bytes.
    """
    array = np.frombuffer(pointer, dtype=np.uint8, count=max(nbytes, 1))
    # Outside of inference mode, whatever the host builds in: a block made there could not be written later.
    with torch.inference_mode(mode=False):
        data = torch.from_numpy(array)
    _check(data, int(pointer.ptr))
    return data[:nbytes]


def on_device(cupy: Any, pointer: Any, nbytes: int) -> torch.Tensor:
    """Return the first bytes of a `cupy.cuda.MemoryPointer` as a tensor that keeps it alive.

    Parameters
    ----------
    cupy : module
        The module ``cupy``.
    pointer : cupy.cuda.MemoryPointer
        Memory of at least `nbytes`, and at least 1, bytes, on the current device.
    nbytes : int
        Size of the block.

    Returns
    -------
    torch.Tensor
        uint8 ``[nbytes]``, on the pointer's device.

    Raises
    ------
    TransferError
        EPLB-T010, as for `on_host`.
    """
    array = cupy.ndarray((max(nbytes, 1),), dtype=cupy.uint8, memptr=pointer)
    with torch.inference_mode(mode=False):
        data: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
    _check(data, int(pointer.ptr))
    return data[:nbytes]


def _check(data: torch.Tensor, address: int) -> None:
    if data.data_ptr() != address:
        problem = f"CuPy's memory at {address:#x} became a copy at {data.data_ptr():#x} on its way to torch"
        raise TransferError("EPLB-T010", problem=problem)
    if address % ALIGNMENT:
        raise TransferError("EPLB-T010", problem=f"CuPy's memory at {address:#x} starts at no multiple of {ALIGNMENT}")
