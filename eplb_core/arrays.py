"""Integer arrays as the core passes them, and the alignment of memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

ALIGNMENT = 64
"""Bytes; grids and messages start at multiples of it in landing memory (a cache line, and what gloo and NICs like)."""


def frozen(array: IntArray) -> IntArray:
    """Return the array, contiguous and read-only."""
    array = np.ascontiguousarray(array)
    array.setflags(write=False)
    return array


def aligned(nbytes: IntArray) -> IntArray:
    """Round up to multiples of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
