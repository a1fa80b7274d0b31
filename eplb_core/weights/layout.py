"""The registered tensors: every expert tensor of every layer, checked once, and the sizes needed to move them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from eplb_core.arrays import IntArray, aligned
from eplb_core.backend import RowList
from eplb_core.errors import MetadataError
from eplb_core.weights.tensor import Key, Refuse, TensorRecord, other_memory, overlapping, spans_of, view_experts


@dataclass(frozen=True)
class LayoutRecord:
    """Properties of a layout that must be equal on every rank: plain data, which `eplb_core.wire` encodes and compares.

    Parameters
    ----------
    num_experts : tuple of int
        ``[num_layers]``, rows of every tensor of a layer.
    names : tuple of tuple of str
        ``[num_layers][num_tensors]``.
    tensors : tuple of tuple of TensorRecord
        ``[num_layers][num_tensors]``; equal layers are one object.
    """

    num_experts: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    tensors: tuple[tuple[TensorRecord, ...], ...]


@dataclass(frozen=True, eq=False)
class LayerGeometry:
    """Sizes of one layer's rows and of the landing memory they need. Its arrays are read-only.

    Parameters
    ----------
    nbytes : IntArray
        ``[num_tensors]``, bytes of one expert's row.
    moving : IntArray
        Indices of the tensors that move, ascending: exact aliases of an earlier tensor of the layer, and rows of
        0 bytes, are left out.
    num_local_physical_experts : int
        Rows of each of the layer's tensors.
    offsets : IntArray
        ``[num_tensors]``, 64-byte-aligned start of each tensor's grid in a "rows" landing slot; an alias has the start
        of the tensor it repeats.
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
        """Bytes of all rows that move, each once, without padding."""
        return self.num_local_physical_experts * int(self.nbytes[self.moving].sum())

    def nbytes_packed(self, num_peers: int) -> int:
        """Return an upper bound for a "packed_by_peer" slot, each row a message of its own; 0 without peers."""
        if num_peers == 0:
            return 0
        return self.num_local_physical_experts * int(aligned(self.nbytes[self.moving]).sum())


@dataclass(frozen=True, eq=False)
class Layout:
    """Registered tensors. Their memory stays valid for as long as this object lives, whatever the host deletes.

    Parameters
    ----------
    weights : list of list of torch.Tensor, or of list of torch.Tensor
        ``[num_layers][num_tensors]``, the host's own, to see whether they still have the memory that was registered.
    rows : list of list of torch.Tensor or RowList
        That memory, uint8 ``[rows of the layer, nbytes_per_expert]``, each row contiguous.
    geometries : tuple of LayerGeometry
        ``[num_layers]``; equal ones are one object.
    keys : tuple of (int, str)
        (layer, tensor name) in the order of registration.
    device : torch.device
        Where every tensor lies; the CPU where there is none.
    num_layers : int
        Layers registered; 0 for a pipeline stage without MoE layers.
    num_local_physical_experts : int
        Columns of a rank in the maps: rows of the layer that has most.
    shared : LayoutRecord
        What `record` returns.
    """

    weights: list[list[Any]]
    rows: list[list[Any]]
    geometries: tuple[LayerGeometry, ...]
    keys: tuple[Key, ...]
    device: torch.device
    num_layers: int
    num_local_physical_experts: int
    shared: LayoutRecord
    _row_views: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict, repr=False)

    def row_views(self, layer: int) -> list[list[torch.Tensor]]:
        """Return the live rows of a layer, ``[num_tensors][num_local_physical_experts]``, made once."""
        views = self._row_views.get(layer)
        if views is None:
            views = self._row_views[layer] = [list(tensor.unbind(0)) for tensor in self.rows[layer]]
        return views

    @property
    def has_row_lists(self) -> bool:
        """Is there a tensor whose experts lie apart?"""
        return any(isinstance(rows, RowList) for layer in self.rows for rows in layer)

    def record(self) -> LayoutRecord:
        """Return what must be equal on every rank."""
        return self.shared

    def first_replaced(self) -> tuple[int, str, str] | None:
        """Return the layer and name of the first tensor whose memory was replaced, and how it differs."""
        for layer, (tensors, views) in enumerate(zip(self.weights, self.rows, strict=True)):
            for name, tensor, view in zip(self.shared.names[layer], tensors, views, strict=True):
                problem = other_memory(tensor, view)
                if problem is not None:
                    return layer, name, problem
        return None

    def let_go(self) -> None:
        """Drop the memory; nothing can be moved any more."""
        for layer in (*self.weights, *self.rows):
            layer.clear()
        self._row_views.clear()


def build_layout(
    weights: Sequence[Sequence[torch.Tensor | Sequence[torch.Tensor]]],
    tensor_names: Sequence[str] | Sequence[Sequence[str]] | None = None,
) -> Layout:
    """Check the host's expert tensors and view them as rows of bytes.

    Parameters
    ----------
    weights : sequence of sequence of torch.Tensor
        ``[num_layers][num_tensors]``, first axis the local physical expert, any dtype, dense in memory with the expert
        axis slowest; the axes of one expert may be permuted. The number of tensors may differ between layers, and so
        may the number of experts. An empty list is a pipeline stage without MoE layers. One memory under two keys of a
        layer is moved once. A list stands for a tensor whose experts lie apart: one tensor per local physical expert,
        all of one dtype, shape and strides.
    tensor_names : sequence of str, sequence of sequence of str, or None
        ``[num_tensors]`` for all layers or ``[num_layers][num_tensors]``; ``"0"``, ``"1"`` ... when None.

    Returns
    -------
    Layout
        Holds the memory.

    Raises
    ------
    MetadataError
        EPLB-M001, naming the first tensor that cannot be registered and why.
    """
    layers = [
        _listed(tensors, f"list of layer {layer}", _unregistrable)
        for layer, tensors in enumerate(_listed(weights, "list", _unregistrable, may_be_empty=True))
    ]
    names = _names(layers, tensor_names)
    held: list[list[torch.Tensor]] = []
    rows: list[list[Any]] = []
    records: list[list[TensorRecord]] = []
    for layer, tensors in enumerate(layers):
        held.append([])
        rows.append([])
        records.append([])
        for tensor, name in zip(tensors, names[layer], strict=True):
            record, view = view_experts(tensor, _key(layer, name), _unregistrable)
            first, of_layer = rows[0][0] if rows[0] else view, rows[-1][0] if rows[-1] else view
            if view.device != first.device:
                other = f"it is on {view.device}, {_key(0, names[0][0])} on {first.device}"
                raise _unregistrable(_key(layer, name), other)
            if len(view) != len(of_layer):
                other = f"it holds {len(view)} experts, {_key(layer, names[layer][0])} {len(of_layer)}"
                raise _unregistrable(_key(layer, name), other)
            held[-1].append(tensor)
            rows[-1].append(view)
            records[-1].append(record)
    _mark_aliases(rows, records, names)

    num_experts = tuple(len(views[0]) for views in rows)
    one_object: dict[tuple[TensorRecord, ...], tuple[TensorRecord, ...]] = {}
    tensors_of_layers = tuple(one_object.setdefault(record, record) for record in map(tuple, records))
    kinds = list(zip(tensors_of_layers, num_experts, strict=True))
    geometries = {kind: _geometry(*kind) for kind in set(kinds)}
    return Layout(
        weights=held,
        rows=rows,
        geometries=tuple(geometries[kind] for kind in kinds),
        keys=tuple((layer, name) for layer, layer_names in enumerate(names) for name in layer_names),
        device=rows[0][0].device if rows else torch.device("cpu"),
        num_layers=len(rows),
        num_local_physical_experts=max(num_experts, default=0),
        shared=LayoutRecord(num_experts, names, tensors_of_layers),
    )


def _key(layer: int, name: str) -> str:
    return f"layer {layer} {name!r}"


def _unregistrable(key: str, problem: str) -> MetadataError:
    return MetadataError("EPLB-M001", key=key, problem=problem)


def _listed(values: Any, key: str, refuse: Refuse, *, may_be_empty: bool = False) -> list[Any]:
    # A tensor, a string and a dict iterate too, over the wrong things.
    if isinstance(values, torch.Tensor | str | Mapping) or not isinstance(values, Iterable):
        raise refuse(key, f"it is a {type(values).__name__} where a list is needed")
    listed = list(values)
    if not (listed or may_be_empty):
        raise refuse(key, "it is empty")
    return listed


def _names(layers: list[list[Any]], tensor_names: Any) -> tuple[tuple[str, ...], ...]:
    if tensor_names is None or not layers:
        return tuple(tuple(map(str, range(len(tensors)))) for tensors in layers)
    given = _listed(tensor_names, "names", _unregistrable)
    flat = isinstance(given[0], str)
    if not flat and len(given) != len(layers):
        raise _unregistrable("names", f"they are for {len(given)} layers where {len(layers)} are registered")
    names: list[tuple[str, ...]] = []
    for layer, tensors in enumerate(layers):
        key = f"names of layer {layer}"
        layer_names = given if flat else _listed(given[layer], key, _unregistrable)
        for name in layer_names:
            if not isinstance(name, str) or not name or not name.isprintable():
                raise _unregistrable(key, f"{name!r} is not a printable string")
        if len(layer_names) != len(tensors):
            raise _unregistrable(key, f"there are {len(layer_names)} for {len(tensors)} tensors")
        repeated = [name for i, name in enumerate(layer_names) if name in layer_names[:i]]
        if repeated:
            raise _unregistrable(key, f"{repeated[0]!r} is given twice")
        names.append(tuple(layer_names))
    return tuple(names)


def _mark_aliases(
    rows: list[list[torch.Tensor]], records: list[list[TensorRecord]], names: tuple[tuple[str, ...], ...]
) -> None:
    """Mark the same memory under two keys of one layer; refuse any other sharing."""
    spans = [
        span
        for layer, views in enumerate(rows)
        for index, view in enumerate(views)
        for span in spans_of(view, layer, index)
    ]
    for span, other in overlapping(spans):
        listed = any(isinstance(rows[one.layer][one.number], RowList) for one in (span, other))
        if listed or span[:3] != other[:3]:
            problem = f"it shares memory with {_key(other.layer, names[other.layer][other.number])}"
            only = "; only the very same memory under two keys of one layer can be moved"
            raise _unregistrable(_key(span.layer, names[span.layer][span.number]), problem + only)
        records[span.layer][span.number] = replace(records[span.layer][span.number], alias=other.number)


def _geometry(records: tuple[TensorRecord, ...], num_experts: int) -> LayerGeometry:
    nbytes = np.array([record.nbytes for record in records], np.int64)
    moving = np.array([i for i, record in enumerate(records) if record.nbytes and record.alias < 0], np.int64)
    ends = np.cumsum(aligned(num_experts * nbytes[moving]))
    offsets = np.zeros(len(records), np.int64)
    offsets[moving[1:]] = ends[:-1]
    for index, record in enumerate(records):
        if record.alias >= 0:
            offsets[index] = offsets[record.alias]
    for array in (nbytes, moving, offsets):
        array.setflags(write=False)
    return LayerGeometry(nbytes, moving, num_experts, offsets, int(ends[-1]) if len(ends) else 0)
