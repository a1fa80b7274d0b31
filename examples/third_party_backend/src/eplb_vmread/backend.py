"""Each rank reads its peers' live rows straight into its landing rows, one system call per source."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from eplb_core import hookimpl
from eplb_core.backend import (
    BackendContext,
    Buffers,
    ConnectReceipt,
    LocalMetadata,
    PeerMetadata,
    TransferReceipt,
)
from eplb_core.errors import TransferError
from eplb_core.plan import TransferPlan

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
_MAX_PARTS = 1024  # IOV_MAX on Linux


class VmReadBackend:
    """One-sided reads; the source does nothing, so nothing needs pumping and nothing can be left in flight."""

    landing_layout: ClassVar[Literal["rows"]] = "rows"
    landing_device: ClassVar[Literal["weights"]] = "weights"
    coalesce_nbytes: ClassVar[int] = 0
    needs_progress: ClassVar[bool] = False

    def __init__(self, options: None, context: BackendContext) -> None:
        self._context = context
        self._peers: dict[int, tuple[int, list[list[int]]]] = {}

    @classmethod
    def probe(cls, options: None) -> Mapping[str, str]:
        """Read this process's own memory, to see that the system allows it."""
        source, target = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
        _read(os.getpid(), np.array([[source.ctypes.data, 8]]), np.array([[target.ctypes.data, 8]]))
        return {"process_vm_readv": "works"}

    @property
    def shared_options(self) -> Mapping[str, str | int | float | bool]:
        """None: no option must be equal on all ranks."""
        return {}

    @hookimpl
    def register_buffers(self, buffers: Buffers) -> LocalMetadata:
        """Tell the peers where the rows are."""
        self._buffers = buffers
        self._rows = [[tensor.data_ptr() for tensor in layer] for layer in buffers.rows]
        return LocalMetadata(json.dumps([os.getpid(), self._rows]).encode())

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        """Note the peers' addresses."""
        for peer in peers:
            pid, rows = json.loads(peer.payload)
            self._peers[peer.rank] = (int(pid), rows)
        return ConnectReceipt(tuple(peer.rank for peer in peers))

    @hookimpl
    def transfer(self, plan: TransferPlan) -> TransferPlan:
        """Keep the plan: the reads block, so they are done in `wait`."""
        return plan

    @hookimpl
    def wait(self, handle: TransferPlan, timeout_s: float) -> TransferReceipt:
        """Read every row, peer by peer."""
        moves = handle.receives
        for peer in np.unique(moves.peer):
            reason = self._context.cancelled()
            if reason is not None:
                raise TransferError("EPLB-T007", rank=self._context.rank, where="wait", reason=reason)
            pid, rows = self._peers[int(peer)]
            mine = moves.peer == peer
            bases = np.array(rows[handle.layer], dtype=np.int64)
            nbytes = moves.nbytes[mine]
            remote = np.stack([bases[moves.tensor[mine]] + moves.peer_row[mine] * nbytes, nbytes], axis=1)
            local = np.stack([self._landing(handle.slot, moves.tensor[mine], moves, mine), nbytes], axis=1)
            try:
                _read(pid, remote, local)
            except OSError as error:
                raise TransferError(
                    "EPLB-T001",
                    label="vmread",
                    state=error.strerror,
                    detail=f"Reading layer {handle.layer} from rank {int(peer)} (process {pid}).",
                ) from error
        return TransferReceipt(int(moves.nbytes.sum()), int(handle.sends.nbytes.sum()))

    def _landing(self, slot: int, tensor: np.ndarray, moves: Any, mine: np.ndarray) -> np.ndarray:
        if self._buffers.landing_rows is None:
            return self._buffers.landing[slot].data_ptr() + moves.landing_offset[mine]
        bases = np.array([rows.data_ptr() for rows in self._buffers.landing_rows[slot]], dtype=np.int64)
        return bases[tensor] + moves.row[mine] * moves.nbytes[mine]

    def progress(self) -> None:
        """Nothing moves on its own."""

    def abort(self, handle: object, reason: str) -> bool:
        """Nothing is in flight outside `wait`."""
        return True

    def close(self, force: bool = False) -> bool:
        """Forget the peers."""
        self._peers.clear()
        return True


def _read(pid: int, remote: np.ndarray, local: np.ndarray) -> None:
    """Copy parts (address, nbytes) of another process into parts of this one."""
    for start in range(0, len(remote), _MAX_PARTS):
        theirs = np.ascontiguousarray(remote[start : start + _MAX_PARTS], dtype=np.uint64)
        ours = np.ascontiguousarray(local[start : start + _MAX_PARTS], dtype=np.uint64)
        wanted = int(ours[:, 1].sum())
        got = _readv(pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0)
        if got != wanted:
            code = ctypes.get_errno() if got < 0 else 0
            raise OSError(code, os.strerror(code) if code else f"{got} of {wanted} bytes were read")
