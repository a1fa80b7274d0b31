"""Name, shape and dtype of one expert's part of a tensor; needs neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

_DTYPE_NBYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip


def dtype_nbytes(dtype: str) -> int:
    """Return the bytes of one element of a torch dtype, by name."""
    return _DTYPE_NBYTES[dtype]


@dataclass(frozen=True)
class TensorSpec:
    """One expert's part of one tensor.

    Parameters
    ----------
    name : str
        As engines call it, such as ``"w13_weight"``.
    shape : tuple of int
        Without the expert axis; ``()`` is one scalar per expert.
    dtype : str
        Name of the torch dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's row."""
        return prod(self.shape) * dtype_nbytes(self.dtype)
