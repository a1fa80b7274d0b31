"""What a rank tells the others: its record, encoded without pickle and decoded without trust."""

from __future__ import annotations

import hashlib
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core import __version__, codec
from eplb_core.comparison import difference
from eplb_core.envelope import seal, unseal
from eplb_core.errors import MetadataError, PlanError
from eplb_core.layout import LayoutRecord
from eplb_core.rows import TensorRecord

__all__ = [
    "MAX_PAYLOAD_NBYTES",
    "MAX_RECORD_NBYTES",
    "LayoutRecord",
    "RankRecord",
    "TensorRecord",
    "difference",
    "map_digest",
    "node_ids",
    "read_boot_id",
    "seal",
    "unseal",
]

Scalar = str | int | float | bool

MAX_PAYLOAD_NBYTES = 1 << 20
"""Most bytes of a backend's `LocalMetadata.payload`."""
MAX_RECORD_NBYTES = MAX_PAYLOAD_NBYTES + (1 << 20)
"""Most bytes of an encoded `RankRecord`: the limit to give to `unseal`."""
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
"""Where Linux offers one."""


@dataclass(frozen=True)
class RankRecord:
    """What one rank tells the others at connect.

    Parameters
    ----------
    rank : int
        Whose it is.
    backend, backend_version : str
        Chosen backend, and the version of the distribution it comes from.
    core_version : str
        Of eplb-core.
    api_version : int
        Of the plugin contract.
    label : str
        Leading word of the texts of `difference`.
    options : mapping of str to str, int, float or bool
        The backend's shared options; floats finite. Kept as a copy, in order of name.
    members : tuple of int
        Ranks that take part, ascending.
    boot_id : str
        See `read_boot_id`.
    host : str
        Address under which other ranks reach this one.
    layout : LayoutRecord
        What is registered.
    payload : bytes
        The backend's own, at most 1 MiB.

    Raises
    ------
    MetadataError
        EPLB-M005 for options or sizes that no peer would accept.
    """

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

    def __post_init__(self) -> None:
        ordered = sorted(self.options.items(), key=lambda item: str(item[0]))
        object.__setattr__(self, "options", dict(ordered))
        object.__setattr__(self, "members", tuple(self.members))
        problem = _unacceptable(self)
        if problem:
            raise MetadataError("EPLB-M005", peer=self.rank, problem=problem)

    def to_bytes(self) -> bytes:
        """Encode: length of the packed JSON, the packed JSON, the payload as it is.

        Returns
        -------
        bytes
            At most `MAX_RECORD_NBYTES`.

        Raises
        ------
        MetadataError
            EPLB-M005 when it would be longer.
        """
        document = _shared_document(self) | {
            "rank": self.rank,
            "label": self.label,
            "boot_id": self.boot_id,
            "host": self.host,
            "payload_nbytes": len(self.payload),
        }
        try:
            return codec.pack(document, self.payload)
        except codec.MalformedError as malformed:
            raise MetadataError("EPLB-M005", peer=self.rank, problem=str(malformed)) from None

    @classmethod
    def from_bytes(cls, blob: bytes, *, rank: int) -> RankRecord:
        """Decode what `to_bytes` made.

        Parameters
        ----------
        blob : bytes
            Encoded record, as unsealed.
        rank : int
            Whose it must be.

        Returns
        -------
        RankRecord
            Equal to what was encoded.

        Raises
        ------
        MetadataError
            EPLB-M005 for anything else: unknown or missing keys, wrong types, values out of range, sizes out of
            bounds, bytes to spare, another rank's record.
        """
        try:
            return _decode(blob, rank)
        except codec.MalformedError as malformed:
            raise MetadataError("EPLB-M005", peer=rank, problem=str(malformed)) from None

    def shared_digest(self) -> bytes:
        """Return 16 bytes, equal on two ranks exactly when `difference` finds none."""
        return hashlib.blake2b(codec.canonical(_shared_document(self)), digest_size=16).digest()


def map_digest(array: npt.ArrayLike) -> bytes:
    """Digest a map.

    Parameters
    ----------
    array : array_like of int
        Any shape, integer dtype and strides.

    Returns
    -------
    bytes
        16 bytes over the shape and the values as int64.

    Raises
    ------
    PlanError
        EPLB-P001 when the values are no integers, or do not fit int64.
    """
    values = np.asarray(array)
    if values.dtype.kind not in "iu":
        raise PlanError("EPLB-P001", problem=f"it holds {values.dtype}, not integers")
    if values.dtype == np.uint64 and values.size and int(values.max()) >= 1 << 63:
        raise PlanError("EPLB-P001", problem=f"{values.max()} does not fit int64")
    digest = hashlib.blake2b(repr(values.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(values, dtype="<i8").data)
    return digest.digest()


def node_ids(boot_ids: Sequence[str]) -> tuple[int, ...]:
    """Give every host of the ranks a number.

    Parameters
    ----------
    boot_ids : sequence of str
        By rank; see `read_boot_id`.

    Returns
    -------
    tuple of int
        By rank, equal for equal boot ids, counted from 0 in order of first appearance.
    """
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(boot_id, len(numbers)) for boot_id in boot_ids)


def read_boot_id() -> str:
    """Return a string that is equal for all processes of one host until it restarts.

    Containers of one host share it on Linux, whatever their host names; where the kernel offers none, it is the host's
    name.
    """
    try:
        boot_id = BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        boot_id = ""
    return boot_id or f"host {socket.gethostname()}"


def _unacceptable(record: RankRecord) -> str | None:
    for name, value in record.options.items():
        if type(name) is not str or type(value) not in (str, int, float, bool):
            return f"shared option {name!r} is a {type(value).__name__}; str, int, float and bool travel"
        if type(value) is float and not math.isfinite(value):
            return f"shared option {name!r} is {value}, which equals nothing"
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            return f"shared option {name!r} does not fit 64 bits"
    if len(record.payload) > MAX_PAYLOAD_NBYTES:
        return (
            f"the backend's payload takes {len(record.payload)} bytes where at most {MAX_PAYLOAD_NBYTES} are accepted"
        )
    num_keys = sum(map(len, record.layout.names))
    if num_keys > codec.MAX_KEYS:
        return f"{num_keys} tensors are registered where at most {codec.MAX_KEYS} are accepted"
    return None


def _shared_document(record: RankRecord) -> dict[str, Any]:
    """Collect what must be equal on all ranks."""
    return {
        "core_version": record.core_version,
        "api_version": record.api_version,
        "backend": record.backend,
        "backend_version": record.backend_version,
        "members": record.members,
        "options": record.options,
    } | codec.layout_document(record.layout)


_TYPES: dict[str, type] = {
    "core_version": str,
    "api_version": int,
    "backend": str,
    "backend_version": str,
    "members": list,
    "options": dict,
    "rank": int,
    "label": str,
    "boot_id": str,
    "host": str,
    "payload_nbytes": int,
} | codec.LAYOUT_TYPES


def _decode(blob: bytes, rank: int) -> RankRecord:
    if len(blob) > MAX_RECORD_NBYTES:
        raise codec.MalformedError(f"its record takes {len(blob)} bytes where at most {MAX_RECORD_NBYTES} are accepted")
    document, payload = codec.unpack(blob)
    if document.keys() != _TYPES.keys():
        release = str(document.get("core_version"))[:64]
        origin = "" if release == __version__ else f"; it comes from eplb-core {release!r}, this is {__version__!r}"
        unknown = sorted(key[:64] for key in document.keys() - _TYPES.keys())
        lacking = sorted(_TYPES.keys() - document.keys())
        raise codec.MalformedError(f"its record has unknown keys {unknown[:8]} and lacks {lacking}{origin}")
    for name, kind in _TYPES.items():
        codec.typed(document[name], kind, name)
    if document["rank"] != rank:
        raise codec.MalformedError(f"the record in it is that of rank {document['rank']}")
    if document["payload_nbytes"] != len(payload):
        announced = document["payload_nbytes"]
        raise codec.MalformedError(f"its payload takes {len(payload)} bytes where {announced} are announced")
    return RankRecord(
        rank=rank,
        backend=document["backend"],
        backend_version=document["backend_version"],
        core_version=document["core_version"],
        api_version=document["api_version"],
        label=document["label"],
        options=document["options"],
        members=codec.integers(document["members"], "members"),
        boot_id=document["boot_id"],
        host=document["host"],
        layout=codec.read_layout(document),
        payload=payload,
    )
