"""The record that each rank publishes: encoded without pickle, checked in full when decoded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eplb_core._version import __version__
from eplb_core.errors import MetadataError
from eplb_core.weights.layout import LayoutRecord
from eplb_core.wire import codec

Scalar = str | int | float | bool


MAX_PAYLOAD_NBYTES = 1 << 20
"""Most bytes of a backend's `LocalMetadata.payload`."""


MAX_RECORD_NBYTES = MAX_PAYLOAD_NBYTES + (1 << 20)
"""Most bytes of an encoded `RankRecord`: the limit to give to `unseal`."""


@dataclass(frozen=True)
class RankRecord:
    """What one rank publishes about itself at a meeting.

    Parameters
    ----------
    rank : int
        Rank that the record describes.
    backend, backend_version : str
        Chosen backend, and the version of the distribution it comes from.
    core_version : str
        Release of eplb-core.
    api_version : int
        Version of the plugin contract.
    label : str
        Leading word of the texts of `difference`.
    options : mapping of str to str, int, float or bool
        The backend's shared options; floats finite. Kept as a copy, in order of name.
    members : tuple of int
        Ranks that take part, ascending.
    boot_id : str
        Equal for ranks on one machine, from `read_boot_id`.
    host : str
        Address under which other ranks reach this one.
    layout : LayoutRecord
        What is registered.
    payload : bytes
        Metadata of the backend, at most 1 MiB.

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
        """Encode: length of the packed JSON, packed JSON, payload; EPLB-M005 beyond `MAX_RECORD_NBYTES`."""
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
        """Decode what `to_bytes` made of rank ``rank``; anything else is refused (EPLB-M005).

        Notes
        -----
        Unknown or missing keys, wrong types, values out of range, sizes out of bounds, trailing bytes and the record of
        another rank are refused.
        """
        try:
            return _decode(blob, rank)
        except codec.MalformedError as malformed:
            raise MetadataError("EPLB-M005", peer=rank, problem=str(malformed)) from None

    def shared_digest(self) -> bytes:
        """Return 16 bytes that are equal on two ranks exactly when `difference` finds nothing."""
        return hashlib.blake2b(codec.canonical(_shared_document(self)), digest_size=16).digest()


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
