"""Experts of a checkpoint on disk, found by their usual names and read row by row, so a rank reads only its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eplb_core.errors import BenchError
from eplb_core.sources.provider import ByteArray, byte_rows
from eplb_core.sources.specs import TensorSpec

# One expert a tensor, "model.layers.3.mlp.experts.17.gate_proj.weight", or all experts of a layer in one tensor,
# "model.layers.3.mlp.experts.down_proj"; Mixtral's parent module is block_sparse_moe. Shared experts do not match.
_NAME = re.compile(r"(?P<prefix>(?:.*\.)?layers\.(?P<layer>\d+)\.(?:.*\.)?experts\.)(?:(?P<expert>\d+)\.)?(?P<part>.+)")
_ENGINE_NAMES = {"gate_up_proj": "w13", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_UP_OF = {"gate_proj": "up_proj", "w1": "w3"}
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip

_Header = tuple[tuple[int, ...], str]
"""Shape and torch dtype of a tensor of the checkpoint."""
_Parts = dict[str, "set[int] | None"]
"""Part of an expert -> experts that have it; None where the experts are stacked in one tensor."""


@dataclass(frozen=True)
class _Row:
    """The tensors of the checkpoint that, one after another, make up one row."""

    parts: tuple[str, ...]
    stacked: bool


@dataclass(frozen=True)
class _Layer:
    number: int
    prefix: str
    specs: tuple[TensorSpec, ...]
    rows: tuple[_Row, ...]


class CheckpointExperts:
    """The first MoE layers of a safetensors checkpoint, read row by row; an `ExpertSource`.

    Gate and up projections that agree in shape and dtype are held fused, ``w13``, as engines hold them; whatever else
    an expert has (scales, zero points) moves along as a tensor of its own.

    Parameters
    ----------
    path : str or Path
        Folder with ``model.safetensors.index.json`` and its shards, or with ``*.safetensors`` alone.
    num_layers : int or None
        MoE layers to take, from the first on; None takes as many as fit into the budget, at least one.
    budget_nbytes : int or None
        Most bytes that the logical experts of these layers may take where `num_layers` is None; None is no limit.

    Attributes
    ----------
    title : str
        Name of the folder.
    layer_numbers : tuple of int
        Numbers of the layers in the model.
    num_layers_found : int
        MoE layers of the whole checkpoint.
    top_k : int
        From ``config.json`` where there is one, else 8 or all experts.
    nbytes_read : int
        Bytes of rows read so far by this object.

    Raises
    ------
    BenchError
        EPLB-B003 when no experts are found by name, or a layer lacks some; EPLB-B004 when a file
        cannot be read; EPLB-B005 when a JSON file is damaged.
    """

    def __init__(self, path: str | Path, num_layers: int | None = None, budget_nbytes: int | None = None) -> None:
        folder = Path(path)
        self._open_files: dict[Path, Any] = {}
        self._file_of = _tensor_files(folder)
        found = _experts_by_layer(self._file_of)
        if not found:
            raise BenchError(
                "EPLB-B003",
                f"{folder} holds no routed experts: no tensor is named like "
                "model.layers.0.mlp.experts.0.gate_proj.weight or model.layers.0.block_sparse_moe.experts.0.w1.weight",
            )
        if num_layers is not None and not 1 <= num_layers <= len(found):
            raise BenchError("EPLB-B003", f"{num_layers} layers asked for; {folder} has {len(found)} with experts")
        self.title = folder.resolve().name
        self.nbytes_read = 0
        self.num_layers_found = len(found)
        self.num_experts = self._count_experts(*next(iter(found.items())))
        self.top_k = _top_k(folder, self.num_experts)
        self._layers: list[_Layer] = []
        nbytes = 0
        for (number, prefix), parts in list(found.items())[:num_layers]:
            layer = self._inspect(number, prefix, parts)
            nbytes += self.num_experts * sum(spec.nbytes for spec in layer.specs)
            if num_layers is None and budget_nbytes is not None and nbytes > budget_nbytes and self._layers:
                break
            self._layers.append(layer)
        self.layer_numbers = tuple(layer.number for layer in self._layers)
        self.specs: Sequence[tuple[TensorSpec, ...]] = [layer.specs for layer in self._layers]

    def write(self, layer: int, tensor: int, expert: int, out: ByteArray) -> None:
        """Read one expert's row; see `ExpertSource`."""
        source = self._layers[layer]
        row = source.rows[tensor]
        start = 0
        for part in row.parts:
            name = f"{source.prefix}{part}" if row.stacked else f"{source.prefix}{expert}.{part}"
            with _readable(self._file_of[name]):
                handle = self._open(name)
                found = handle.get_slice(name)[expert : expert + 1] if row.stacked else handle.get_tensor(name)[None]
            piece = byte_rows(found.contiguous())[0]
            out[start : start + piece.size] = piece
            start += piece.size
        self.nbytes_read += start

    def _count_experts(self, layer: tuple[int, str], parts: _Parts) -> int:
        part, experts = next(iter(parts.items()))
        if experts is not None:
            return max(experts) + 1
        shape, _ = self._header(f"{layer[1]}{part}")
        return shape[0] if shape else 0

    def _inspect(self, number: int, prefix: str, parts: _Parts) -> _Layer:
        headers = {part: self._part_header(prefix, part, experts) for part, experts in parts.items()}
        tensors: list[tuple[TensorSpec, _Row]] = []
        for part, (shape, dtype) in headers.items():
            projection, _, suffix = part.partition(".")
            up = None if parts[part] is None else _fusable(part, headers)
            if up is not None:
                spec = TensorSpec(f"w13_{suffix}", (2 * shape[0], *shape[1:]), dtype)
                tensors.append((spec, _Row((part, up), stacked=False)))
            elif not any(_fusable(gate, headers) == part for gate in headers):
                name = "_".join(filter(None, (_ENGINE_NAMES.get(projection, projection), suffix.replace(".", "_"))))
                tensors.append((TensorSpec(name, shape, dtype), _Row((part,), stacked=parts[part] is None)))
        tensors.sort(key=lambda tensor: _engine_order(tensor[0].name))
        return _Layer(number, prefix, tuple(spec for spec, _ in tensors), tuple(row for _, row in tensors))

    def _part_header(self, prefix: str, part: str, experts: set[int] | None) -> _Header:
        """Return shape and dtype of one expert's part, the same for all of them."""
        if experts is None:
            shape, dtype = self._header(f"{prefix}{part}")
            if not shape or shape[0] != self.num_experts:
                problem = f"{prefix}{part} has shape {shape}, not a row for each of {self.num_experts} experts"
                raise BenchError("EPLB-B003", problem)
            return shape[1:], dtype
        missing = sorted(set(range(self.num_experts)) - experts)
        if missing or len(experts) != self.num_experts:
            lacking = f"no expert {missing[0]}" if missing else f"{len(experts)} experts"
            problem = f"{prefix}*.{part}: {lacking}, while the first layer has {self.num_experts} experts"
            raise BenchError("EPLB-B003", problem)
        first = self._header(f"{prefix}0.{part}")
        for expert in range(1, self.num_experts):
            other = self._header(f"{prefix}{expert}.{part}")
            if other != first:
                raise BenchError("EPLB-B003", f"{prefix}{expert}.{part} is {other}, while that of expert 0 is {first}")
        return first

    def _header(self, name: str) -> _Header:
        with _readable(self._file_of[name]):
            found = self._open(name).get_slice(name)
            shape, dtype = tuple(found.get_shape()), str(found.get_dtype())
        if dtype not in _DTYPES:
            raise BenchError("EPLB-B003", f"{name} has dtype {dtype}, which torch does not know")
        return shape, _DTYPES[dtype]

    def _open(self, name: str) -> Any:
        """Return the open file that holds a tensor; it is mapped, so that only rows asked for are read."""
        file = self._file_of[name]
        if file not in self._open_files:
            from safetensors import safe_open

            self._open_files[file] = safe_open(str(file), framework="pt", device="cpu")
        return self._open_files[file]


def _fusable(gate: str, headers: dict[str, _Header]) -> str | None:
    """Return the up projection whose rows can be held right behind those of this gate projection."""
    projection, _, suffix = gate.partition(".")
    up = f"{_UP_OF.get(projection)}.{suffix}"
    # Only what is called "weight..." has its outputs along the first axis; GPTQ's qweight has not.
    fits = suffix.startswith("weight") and len(headers[gate][0]) == 2 and headers.get(up) == headers[gate]
    return up if fits else None


def _engine_order(name: str) -> tuple[bool, str, str]:
    """Sort weights before their scales, and these before everything else."""
    projection, _, suffix = name.partition("_")
    return not suffix.startswith("weight"), suffix, projection


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Map every tensor's name to its file."""
    if not folder.is_dir():
        raise BenchError("EPLB-B004", f"{folder} is not a folder")
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if indices:
        weight_map = _read_json(indices[0]).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BenchError("EPLB-B005", f"{indices[0]} has no weight_map")
        return {str(name): folder / str(file) for name, file in weight_map.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BenchError("EPLB-B004", f"{folder} holds no *.safetensors files")
    found: dict[str, Path] = {}
    for file in files:
        with _readable(file):
            from safetensors import safe_open

            with safe_open(str(file), framework="pt", device="cpu") as handle:
                found.update(dict.fromkeys(handle.keys(), file))
    return found


def _experts_by_layer(names: dict[str, Path]) -> dict[tuple[int, str], _Parts]:
    """Group the names of experts by layer, ascending, and within a layer by part."""
    layers: dict[tuple[int, str], _Parts] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        parts = layers.setdefault((int(match["layer"]), match["prefix"]), {})
        if match["expert"] is None:
            parts[match["part"]] = None
            continue
        experts = parts.setdefault(match["part"], set())
        if experts is not None:
            experts.add(int(match["expert"]))
    return dict(sorted(layers.items()))


def _top_k(folder: Path, num_experts: int) -> int:
    config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    for holder in (config, config.get("text_config")):
        top_k = holder.get("num_experts_per_tok") if isinstance(holder, dict) else None
        if isinstance(top_k, int) and 1 <= top_k <= num_experts:
            return top_k
    return min(8, num_experts)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError("EPLB-B004", f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise BenchError("EPLB-B005", f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise BenchError("EPLB-B005", f"{file} holds {type(content).__name__}, not an object")
    return content


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn an error of safetensors about a file into the typed error."""
    try:
        from safetensors import SafetensorError
    except ImportError as error:
        raise BenchError("EPLB-B003", "reading a checkpoint needs safetensors: pip install 'eplb-core[cli]'") from error
    try:
        yield
    except SafetensorError as error:
        raise BenchError("EPLB-B004", f"{file}: {error}") from error
    except OSError as error:
        raise BenchError("EPLB-B004", f"{file}: {error.strerror or error}") from error
