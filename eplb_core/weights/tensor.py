"""One expert tensor seen as rows of bytes: which memory layouts are accepted, and which are refused and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from eplb_core.backend import RowList
from eplb_core.errors import EplbError

Key = tuple[int, str]
"""(layer, tensor name)."""

Refuse = Callable[[str, str], EplbError]
"""``refuse(key, problem)`` builds the error; weights and landing memory belong to different families."""


@dataclass(frozen=True)
class TensorRecord:
    """Properties of one tensor that must be equal on every rank.

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


class Span(NamedTuple):
    """Memory of one tensor, in bytes; sorts by where it starts, then where it ends, then order of registration."""

    start: int
    end: int
    layer: int
    number: int


def view_rows(tensor: Any, key: str, refuse: Refuse) -> tuple[TensorRecord, torch.Tensor]:
    """Check one tensor, and view its memory as uint8 rows ``[num_experts, nbytes]``, contiguous, on its device.

    Notes
    -----
    The tensor is ``[num_experts, ...]``, dense with the expert axis slowest; otherwise ``refuse(key, problem)`` is
    raised. The view keeps the memory valid whatever the host deletes. The record comes without alias.
    """
    problem = _unaddressable(tensor)
    if problem:
        raise refuse(key, problem)
    num_experts, *shape = tensor.shape
    problem, stride, numel = _walk(tensor)
    if problem:
        raise refuse(key, f"{problem} (shape {tuple(tensor.shape)}, strides {tensor.stride()})")
    itemsize = tensor.element_size()
    nbytes = numel * itemsize
    start = tensor.storage_offset() * itemsize
    end = start + num_experts * nbytes
    try:
        address, storage = tensor.data_ptr(), tensor.untyped_storage()
        held = storage.nbytes()
    except RuntimeError as error:  # opaque and functional tensors
        raise refuse(key, f"its memory has no address ({error})") from None
    if nbytes and (address == 0 or held < end):
        raise refuse(key, f"its storage has {held} bytes where {end} are needed: freed, or never allocated")
    # By storage: Tensor.view(dtype) knows neither permuted rows nor every dtype (packed fp4). And outside of inference
    # mode, whatever mode the host builds in: a view made there could not be written later.
    with torch.inference_mode(mode=False):
        view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        view.set_(storage, start, (num_experts, nbytes), (nbytes, 1))
    return TensorRecord(str(tensor.dtype).removeprefix("torch."), tuple(shape), stride, nbytes), view


def view_experts(given: Any, key: str, refuse: Refuse) -> tuple[TensorRecord, Any]:
    """Check what holds the experts of one key, a tensor as in `view_rows` or a list with a tensor each.

    Returns
    -------
    TensorRecord
        The same for all experts.
    torch.Tensor or RowList
        uint8 ``[num_experts, nbytes]``.
    """
    if not isinstance(given, (list, tuple)) or not given:
        return view_rows(given, key, refuse)
    records: list[TensorRecord] = []
    rows: list[torch.Tensor] = []
    for expert, tensor in enumerate(given):
        problem = _unaddressable(tensor, of_one_expert=True)
        if problem:
            raise refuse(f"{key} expert {expert}", problem)
        record, view = view_rows(tensor.detach().unsqueeze(0), f"{key} expert {expert}", refuse)
        records.append(record)
        if record != records[0]:
            raise refuse(f"{key} expert {expert}", f"it is {_told(record)}, expert 0 is {_told(records[0])}")
        if view.device != (rows or [view])[0].device:
            raise refuse(f"{key} expert {expert}", f"it is on {view.device}, expert 0 on {rows[0].device}")
        rows.append(view[0])
    return records[0], RowList(rows)


def _told(record: TensorRecord) -> str:
    return f"{record.dtype} of shape {record.shape}, strides {record.stride}"


def other_memory(tensor: Any, view: Any) -> str | None:
    """Return how a tensor's memory differs from the view that `view_experts` made of it, or None."""
    if not view.numel():
        return None
    if isinstance(view, RowList):
        if len(tensor) != len(view):
            return f"it holds {len(tensor)} tensors, and {len(view)} were registered"
        if view.addresses == [one.data_ptr() for one in tensor if isinstance(one, torch.Tensor)]:
            return _shrunk(view)  # the usual case, and there are thousands
        changes = ((expert, other_memory(one, view[expert])) for expert, one in enumerate(tensor))
        return next((f"of expert {expert}, {change}" for expert, change in changes if change is not None), None)
    try:
        address, held = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except RuntimeError as error:  # swapped for a tensor of another kind
        return f"it has no address any more ({error})"
    end = tensor.storage_offset() * tensor.element_size() + view.numel()
    if address == 0 or held < end:
        return f"its storage has {held} bytes where {end} are needed"
    if address != view.data_ptr():
        return f"it is at {address:#x}, and {view.data_ptr():#x} was registered"
    return None


def _shrunk(rows: RowList) -> str | None:
    """Return which row's storage does not hold it any more, or None."""
    for expert, row in enumerate(rows.unbind()):
        held, end = row.untyped_storage().nbytes(), row.storage_offset() + rows.shape[1]
        if held < end:
            return f"of expert {expert}, its storage has {held} bytes where {end} are needed"
    return None


def spans_of(view: Any, layer: int, number: int) -> list[Span]:
    """Return the memory of what `view_experts` returned: one span, or one a row; none when rows have no bytes."""
    if isinstance(view, RowList):
        return [span for row in view.unbind() for span in spans_of(row, layer, number)]
    start, nbytes = view.data_ptr(), view.numel()
    return [Span(start, start + nbytes, layer, number)] if nbytes else []


def overlapping(spans: Iterable[Span]) -> list[tuple[Span, Span]]:
    """Find memory that two tensors share: (later registered, earlier registered), in order of registration.

    Notes
    -----
    The result does not depend on where the allocator put the tensors. A span that shares memory with one that starts
    before it comes once. Identical spans all come with the first of them, so the earlier of a pair of aliases is always
    the one that moves.
    """
    pairs: list[tuple[Span, Span]] = []
    reach: Span | None = None
    for span in sorted(spans):
        if reach is not None and span.start < reach.end:
            earlier, later = sorted((reach, span), key=lambda each: each[2:])
            pairs.append((later, earlier))
        if reach is None or span.end > reach.end:
            reach = span
    return sorted(pairs, key=lambda pair: (pair[0][2:], pair[1][2:]))


def _unaddressable(tensor: Any, *, of_one_expert: bool = False) -> str | None:
    """Return why a value has no bytes of its own to move, or None."""
    if not isinstance(tensor, torch.Tensor):
        return f"it is a {type(tensor).__name__}, not a torch.Tensor"
    if is_lazy(tensor) or tensor.is_meta:
        return "nothing is allocated for it (a lazy parameter, or the meta device)"
    wrapper: object = tensor
    if is_traceable_wrapper_subclass(wrapper):
        return f"a {type(tensor).__name__} wraps other tensors; register those (of a DTensor its to_local())"
    problem = _not_plain(tensor)
    if problem is None and not of_one_expert and (tensor.dim() == 0 or tensor.shape[0] == 0):
        return f"its shape {tuple(tensor.shape)} has no experts along the first axis"
    return problem


def _not_plain(tensor: torch.Tensor) -> str | None:
    """Return why a tensor's values are not just the bytes in its memory, or None."""
    if tensor.is_nested:
        return "it is nested, not dense"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}, not dense"
    if tensor.is_quantized:
        return "it is quantized, with scales outside its memory; register int_repr() and the scales instead"
    if tensor.is_conj():
        return "its conj bit is set, so its bytes are not its values; register resolve_conj()"
    if tensor.is_neg():
        return "its neg bit is set, so its bytes are not its values; register resolve_neg()"
    return None


def _walk(tensor: torch.Tensor) -> tuple[str | None, tuple[int, ...], int]:
    """Walk one expert from its fastest axis to its slowest: (problem or None, its strides, its number of elements)."""
    num_experts, *shape = tensor.shape
    between, *given = tensor.stride()
    contiguous = tensor.is_contiguous()  # true also of every tensor without elements, whatever its strides
    axes = [axis for axis in range(len(shape) - 1, -1, -1) if shape[axis] != 1]
    if not contiguous:
        axes.sort(key=lambda axis: given[axis])
    stride = [1] * len(shape)
    numel = 1
    for axis in axes:
        stride[axis] = numel
        if not contiguous and given[axis] != numel:
            if given[axis] < numel:
                return "elements of one expert overlap in memory", (), 0
            if num_experts > 1 and 0 < between < given[axis]:
                return "its expert axis is not the slowest in memory", (), 0
            return "there are gaps between the elements of one expert", (), 0
        numel *= shape[axis]
    if not contiguous and num_experts > 1 and between != numel:
        return ("its experts overlap in memory" if between < numel else "there are gaps between its experts"), (), 0
    return None, tuple(stride), numel
