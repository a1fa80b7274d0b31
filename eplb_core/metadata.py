"""What goes on the wire: sealed messages, the record of a rank, and the comparison of two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy.typing as npt

from eplb_core.errors import MetadataError
from eplb_core.layout import LayoutRecord as LayoutRecord
from eplb_core.layout import TensorRecord as TensorRecord

Scalar = str | int | float | bool


def seal(kind: str, body: bytes, *, name: str, rank: int, epoch: int, generation: int) -> bytes:
    """Wrap a body so that only its addressee's `unseal` accepts it; `kind` is ASCII, 1 to 15 characters."""
    raise NotImplementedError


def unseal(blob: bytes, kind: str, *, name: str, rank: int, epoch: int, generation: int, limit: int) -> bytes:
    """Return the body of a sealed message of that kind from `rank`; MetadataError EPLB-M005 otherwise."""
    raise NotImplementedError


@dataclass(frozen=True)
class RankRecord:
    """What one rank tells the others at connect; `label` leads the texts of `difference`."""

    rank: int
    backend: str
    backend_version: str
    core_version: str
    api_version: int
    label: str
    options: Mapping[str, Scalar]
    members: tuple[int, ...]
    boot_id: str
    host: str
    layout: LayoutRecord
    payload: bytes = field(default=b"", repr=False)

    def to_bytes(self) -> bytes:
        """Encode; MetadataError EPLB-M005 when a bound is exceeded."""
        raise NotImplementedError

    @classmethod
    def from_bytes(cls, blob: bytes, *, rank: int) -> RankRecord:
        """Decode the record of `rank`; MetadataError EPLB-M005 for anything that is not one."""
        raise NotImplementedError

    def shared_digest(self) -> bytes:
        """Return 16 bytes that are equal on two ranks exactly when `difference` is None."""
        raise NotImplementedError


def difference(local: RankRecord, peer: RankRecord) -> MetadataError | None:
    """Return the typed error for the first thing that must be equal and is not, or None."""
    raise NotImplementedError


def map_digest(array: npt.ArrayLike) -> bytes:
    """Return 16 bytes over the shape and the int64 values of an integer array, whatever its dtype and strides."""
    raise NotImplementedError


def node_ids(boot_ids: Sequence[str]) -> tuple[int, ...]:
    """Number the hosts of ranks in order of first appearance."""
    raise NotImplementedError


def read_boot_id() -> str:
    """Return a string that is equal for processes of one boot of one host."""
    raise NotImplementedError
