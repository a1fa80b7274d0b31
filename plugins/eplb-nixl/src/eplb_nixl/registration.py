"""Which memory is registered: the storages behind tensors, each once, and whether a GPU's can be read from outside."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from eplb_core.errors import MetadataError
from eplb_nixl.agent import Agent, Memory
from eplb_nixl.library import NixlError

_CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10
_CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14
_CU_MEM_HANDLE_TYPE_FABRIC = 8


@dataclass(frozen=True)
class Piece:
    """Memory to register, and the first tensor in it, which errors name.

    Parameters
    ----------
    memory : Memory
        Where it lies.
    key : str
        Such as ``"layer 3 tensor 1"``.
    exported : bool
        Do peers read from it?
    """

    memory: Memory
    key: str
    exported: bool = False


def memory_type_of(device: torch.device) -> str:
    """Return NIXL's name of a device's memory."""
    return "DRAM" if device.type == "cpu" else "VRAM"


def device_index_of(device: torch.device) -> int:
    """Return NIXL's number of a device; 0 for host memory."""
    return 0 if device.type == "cpu" else device.index or 0


def pieces_of(
    exported: Iterable[tuple[str, torch.Tensor]], own: Iterable[tuple[str, torch.Tensor]] = ()
) -> list[Piece]:
    """Gather tensors into pieces that share no byte.

    Views of one storage become one piece, from the first of them to the last, so that hundreds of views cost one
    registration; so do storages that overlap. NIXL frees an overlapping registration twice and crashes, so this is what
    keeps aliases safe. Neighbours that merely touch stay apart: a registration over two device allocations fails.

    Parameters
    ----------
    exported, own : iterable of (str, torch.Tensor)
        Key and contiguous tensor, those that peers read and those that only this rank touches. Tensors without bytes
        are left out.

    Returns
    -------
    list of Piece
        By address.
    """
    of_storage: dict[int, Piece] = {}
    for (key, tensor), is_exported in [*((each, True) for each in exported), *((each, False) for each in own)]:
        nbytes = tensor.numel() * tensor.element_size()
        if not nbytes:
            continue
        memory = Memory(tensor.data_ptr(), nbytes, memory_type_of(tensor.device), device_index_of(tensor.device))
        piece = Piece(memory, key, is_exported)
        storage = tensor.untyped_storage().data_ptr()
        of_storage[storage] = _union(of_storage[storage], piece) if storage in of_storage else piece
    pieces: list[Piece] = []
    for piece in sorted(of_storage.values(), key=lambda each: each.memory.start):
        if pieces and piece.memory.start < pieces[-1].memory.start + pieces[-1].memory.nbytes:
            pieces[-1] = _union(pieces[-1], piece)
        else:
            pieces.append(piece)
    return pieces


def register(agent: Agent, pieces: Iterable[Piece]) -> None:
    """Register pieces one by one, so that a refusal names a tensor.

    Raises
    ------
    MetadataError
        EPLB-M001, naming the tensor.
    """
    for piece in pieces:
        try:
            agent.register(piece.memory)
        except NixlError as error:
            raise MetadataError("EPLB-M001", key=piece.key, problem=str(error)) from error


def cannot_be_exported(pieces: Iterable[Piece], driver: str = "libcuda.so.1") -> str | None:
    """Say why other processes cannot read device memory where it lies, or None.

    Memory mapped by CUDA's virtual memory management (PyTorch's expandable segments) registers without complaint, but
    has no handle that another process could open, and UCX then carries it over TCP, hundreds of times slower. The
    driver is asked because nothing above it knows about every allocator.

    Parameters
    ----------
    pieces : iterable of Piece
        Any memory.
    driver : str
        Library to ask. Without it, or for memory that is not CUDA's, there is nothing to hold against a piece.

    Returns
    -------
    str or None
        Names the first tensor that is in such memory.
    """
    on_device = [piece for piece in pieces if piece.memory.memory_type == "VRAM"]
    if not on_device:
        return None
    try:
        attribute = ctypes.CDLL(driver).cuPointerGetAttribute
    except (OSError, AttributeError):
        return None
    for piece in on_device:
        address = ctypes.c_uint64(piece.memory.start)
        capable, handles = ctypes.c_int(0), ctypes.c_uint64(0)
        if attribute(ctypes.byref(capable), _CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address):
            continue  # the driver does not know the pointer
        if capable.value:
            continue
        attribute(ctypes.byref(handles), _CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address)
        if not handles.value & _CU_MEM_HANDLE_TYPE_FABRIC:
            return f"{piece.key} lies in memory without a CUDA IPC handle (expandable segments, or the like)"
    return None


def _union(first: Piece, second: Piece) -> Piece:
    start = min(first.memory.start, second.memory.start)
    end = max(first.memory.start + first.memory.nbytes, second.memory.start + second.memory.nbytes)
    memory = replace(first.memory, start=start, nbytes=end - start)
    return Piece(memory, first.key, first.exported or second.exported)
