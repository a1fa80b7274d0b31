"""The encoding of a record: packed JSON and raw bytes, no pickle; decoding checks every size and type."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from eplb_core.weights.layout import LayoutRecord
from eplb_core.weights.tensor import TensorRecord

MAX_KEYS = 1 << 18
"""Most (layer, tensor) pairs of a layout."""
MAX_TEXT_NBYTES = 2 << 20
"""Most bytes of JSON, unpacked."""
MAX_PACKED_NBYTES = (1 << 20) - 4
"""Most bytes of JSON, packed."""

_LENGTH = struct.Struct("<I")


class MalformedError(Exception):
    """What is wrong with an encoded record; the caller adds which rank sent it."""


def canonical(document: object) -> bytes:
    """Encode as JSON so that equal documents are equal bytes."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True, allow_nan=False).encode("ascii")


def pack(document: dict[str, Any], raw: bytes) -> bytes:
    """Encode as length of the packed JSON, the packed JSON, the raw bytes; MalformedError beyond the bounds."""
    text = canonical(document)
    if len(text) > MAX_TEXT_NBYTES:
        raise MalformedError(f"its record takes {len(text)} bytes of JSON where at most {MAX_TEXT_NBYTES} are accepted")
    packed = zlib.compress(text)
    if len(packed) > MAX_PACKED_NBYTES:
        raise MalformedError(f"its record takes {len(packed)} bytes where at most {MAX_PACKED_NBYTES} are accepted")
    return b"".join((_LENGTH.pack(len(packed)), packed, raw))


def unpack(blob: bytes) -> tuple[dict[str, Any], bytes]:
    """Decode what `pack` made into (document, raw bytes); MalformedError for anything else."""
    if len(blob) < _LENGTH.size:
        raise MalformedError("its record is empty")
    end = _LENGTH.size + int(_LENGTH.unpack_from(blob)[0])
    if end > len(blob):
        raise MalformedError(f"its record is truncated, {len(blob)} bytes of {end}")
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(blob[_LENGTH.size : end], MAX_TEXT_NBYTES)
    except zlib.error as error:
        raise MalformedError(f"its record cannot be unpacked ({error})") from None
    if unpacker.unconsumed_tail:
        raise MalformedError(f"its record unpacks to more than {MAX_TEXT_NBYTES} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise MalformedError("its record does not end where it says")
    try:
        document = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"its record is no JSON ({error})") from None
    return typed(document, dict, "it"), blob[end:]


def layout_document(layout: LayoutRecord) -> dict[str, Any]:
    """Encode a layout; equal lists of names and equal layers are stored once, numbered in order of appearance."""
    names: dict[tuple[str, ...], int] = {}
    tensors: dict[tuple[TensorRecord, ...], int] = {}
    layers = [
        [names.setdefault(layer_names, len(names)), tensors.setdefault(layer_tensors, len(tensors)), num_experts]
        for layer_names, layer_tensors, num_experts in zip(
            layout.names, layout.tensors, layout.num_experts, strict=True
        )
    ]
    return {
        "names": list(names),
        "tensors": [[[t.dtype, t.shape, t.stride, t.nbytes, t.alias] for t in layer] for layer in tensors],
        "layers": layers,
    }


LAYOUT_TYPES: dict[str, type] = {"names": list, "tensors": list, "layers": list}
"""Keys of `layout_document` and their types."""


def read_layout(document: dict[str, Any]) -> LayoutRecord:
    """Decode what `layout_document` made, with types of keys checked before; MalformedError for anything else."""
    names = [strings(each, "names") for each in document["names"]]
    tensors = [
        tuple(_tensor(fields, index) for index, fields in enumerate(typed(each, list, "tensors")))
        for each in document["tensors"]
    ]
    layers = [integers(each, "layers") for each in document["layers"]]
    if not all(len(each) == 3 and each[0] < len(names) and each[1] < len(tensors) for each in layers):
        raise MalformedError("layers in its record refer to names or tensors that are not there")
    if not all(num_experts for _, _, num_experts in layers):
        raise MalformedError("a layer of its record has no experts")
    if sum(len(names[name]) for name, _, _ in layers) > MAX_KEYS:
        raise MalformedError(f"its record has more than {MAX_KEYS} tensors")
    for name, tensor, _ in layers:
        if not 0 < len(set(names[name])) == len(names[name]) == len(tensors[tensor]):
            raise MalformedError(f"a layer of its record has {len(tensors[tensor])} tensors named {names[name][:8]}")
    return LayoutRecord(
        tuple(num_experts for _, _, num_experts in layers),
        tuple(names[name] for name, _, _ in layers),
        tuple(tensors[tensor] for _, tensor, _ in layers),
    )


def typed(value: Any, kind: type, name: str) -> Any:
    """Return a value of exactly that type (a bool is no int); MalformedError otherwise."""
    if type(value) is not kind:
        raise MalformedError(f"{name} in its record is a {type(value).__name__}, not a {kind.__name__}")
    return value


def strings(values: Any, name: str) -> tuple[str, ...]:
    """Return a list of strings as a tuple; MalformedError otherwise."""
    return tuple(typed(value, str, name) for value in typed(values, list, name))


def integers(values: Any, name: str) -> tuple[int, ...]:
    """Return a list of non-negative 64-bit integers as a tuple; MalformedError otherwise."""
    checked = tuple(typed(value, int, name) for value in typed(values, list, name))
    if checked and not 0 <= min(checked) <= max(checked) < 1 << 63:
        raise MalformedError(f"{name} in its record is out of range")
    return checked


def _tensor(fields: Any, index: int) -> TensorRecord:
    if type(fields) is not list or len(fields) != 5:
        raise MalformedError("a tensor of its record is not a list of five")
    dtype, shape, stride, nbytes, alias = fields
    record = TensorRecord(
        typed(dtype, str, "dtype"),
        integers(shape, "shape"),
        integers(stride, "stride"),
        typed(nbytes, int, "nbytes"),
        typed(alias, int, "alias"),
    )
    if len(record.shape) != len(record.stride) or not 0 <= nbytes < 1 << 63 or not -1 <= alias < index:
        raise MalformedError(f"a tensor of its record makes no sense: {str(fields)[:200]}")
    return record


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key stands twice")
    return document
