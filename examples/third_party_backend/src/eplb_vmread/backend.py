"""The four hooks: each rank reads its peers' live rows straight into its landing rows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from eplb_core import hookimpl
from eplb_core.backend import (
    BackendContext,
    Buffers,
    ConnectReceipt,
    LocalMetadata,
    MoveColumns,
    PeerMetadata,
    TransferPlan,
    TransferReceipt,
)
from eplb_core.errors import DiscoveryError, MetadataError, StalledError, TransferError
from eplb_vmread.memory import Parts, ProcessMemory, StrangerError, Token
from eplb_vmread.options import VmReadOptions
from eplb_vmread.permission import allow_readers, boot_id, pid_namespace, remedy, why_not, yama_scope

_LABEL = "vmread"


class _Peer:
    """A peer's memory, and where the rows of each layer and tensor begin in it."""

    def __init__(self, memory: ProcessMemory, rows: list[npt.NDArray[np.int64]]) -> None:
        self.memory = memory
        self.rows = rows


class VmReadBackend:
    """One-sided reads. The source does nothing, so nothing needs pumping, and nothing is in flight outside `wait`."""

    landing_layout: ClassVar[Literal["rows"]] = "rows"
    landing_device: ClassVar[Literal["weights"]] = "weights"
    coalesce_nbytes: ClassVar[int] = 0
    needs_progress: ClassVar[bool] = False

    def __init__(self, options: VmReadOptions, context: BackendContext) -> None:
        self._options = options
        self._context = context
        self._token = Token()
        self._peers: dict[int, _Peer] = {}

    @classmethod
    def probe(cls, options: VmReadOptions) -> Mapping[str, str]:
        """See that the system allows the call, and say what Yama has to say about others."""
        reason = why_not()
        if reason is not None:
            raise DiscoveryError("EPLB-D004", backend=_LABEL, reason=reason)
        scope = yama_scope()
        return {
            "process_vm_readv": "works",
            "yama": "not in this kernel" if scope is None else f"ptrace_scope={scope}",
            "pid namespace": pid_namespace(),
        }

    @property
    def shared_options(self) -> Mapping[str, str | int | float | bool]:
        """None: each rank says for itself who may read it."""
        return {}

    @hookimpl
    def register_buffers(self, buffers: Buffers) -> LocalMetadata:
        """Let the peers read, and tell them who this is and where its rows are."""
        try:
            allow_readers(self._options.readers)
            identity = {"boot": boot_id(), "namespace": pid_namespace(), "pid": os.getpid()}
        except OSError as error:
            detail = "Telling Yama who may read this process, and who it is."
            raise TransferError("EPLB-T001", label=_LABEL, state=error.strerror, detail=detail) from error
        self._buffers = buffers
        token = {"token": self._token.value.hex(), "token_at": self._token.address}
        rows = {"rows": [[tensor.data_ptr() for tensor in layer] for layer in buffers.rows]}
        return LocalMetadata(json.dumps({**identity, **token, **rows}).encode())

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        """See that each peer is on this host, has the number it gave, and may be read."""
        mine = json.loads(local.payload)
        for peer in peers:
            try:
                theirs = json.loads(peer.payload)
                facts = {"host (boot id)": str(theirs["boot"]), "PID namespace": str(theirs["namespace"])}
                token = bytes.fromhex(theirs["token"])
                memory = ProcessMemory(int(theirs["pid"]), int(theirs["token_at"]), token)
                rows = [np.array(layer, np.int64) for layer in theirs["rows"]]
                if [len(layer) for layer in rows] != [len(layer) for layer in self._buffers.rows] or not token:
                    raise ValueError("it lists other rows than are registered, or no token")
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                problem = f"its metadata is not vmread's ({error})"
                raise MetadataError("EPLB-M005", peer=peer.rank, problem=problem) from error
            for (field, remote), here in zip(facts.items(), (mine["boot"], mine["namespace"]), strict=True):
                if remote != here:
                    raise MetadataError(
                        "EPLB-M004",
                        label=_LABEL,
                        field=field,
                        peer=peer.rank,
                        local=here,
                        remote=remote,
                        detail="vmread reads processes by their number, which means nothing there: run the ranks on "
                        "one host and in one PID namespace, or use another backend.",
                    )
            try:
                memory.check()
            except StrangerError as error:
                raise MetadataError("EPLB-M005", peer=peer.rank, problem=str(error)) from error
            except OSError as error:
                raise self._failed(error, peer.rank, memory.pid, "at connect") from error
            self._peers[peer.rank] = _Peer(memory, rows)
        return ConnectReceipt(tuple(peer.rank for peer in peers))

    @hookimpl
    def transfer(self, plan: TransferPlan) -> TransferPlan:
        """Keep the plan: the reads block, so they are done in `wait`."""
        return plan

    @hookimpl
    def wait(self, handle: TransferPlan, timeout_s: float) -> TransferReceipt:
        """Read every row, peer by peer."""
        moves, began = handle.receives, time.monotonic()
        for source in np.unique(moves.peer).tolist():
            peer, mine = self._peers[source], moves.peer == source

            def look_around(source: int = source) -> None:
                where = f"layer {handle.layer}, phase wait"
                reason = self._context.cancelled()
                if reason is not None:
                    raise TransferError("EPLB-T007", rank=self._context.rank, where=where, reason=reason)
                seconds = time.monotonic() - began
                if seconds > timeout_s:
                    waiting_for = f"the rows of rank {source}"
                    raise StalledError("EPLB-T002", seconds=seconds, where=where, waiting_for=waiting_for)

            nbytes = moves.nbytes[mine]
            starts = peer.rows[handle.layer][moves.tensor[mine]] + moves.peer_row[mine] * nbytes
            remote: Parts = np.stack([starts, nbytes], axis=1)
            local: Parts = np.stack([self._landing(handle.slot, moves)[mine], nbytes], axis=1)
            try:
                peer.memory.read(remote, local, look_around)
            except (OSError, StrangerError) as error:
                raise self._failed(error, source, peer.memory.pid, f"in layer {handle.layer}") from error
        return TransferReceipt(int(moves.nbytes.sum()), int(handle.sends.nbytes.sum()))

    def _landing(self, slot: int, moves: MoveColumns) -> npt.NDArray[np.int64]:
        """Return the address of each row that is received."""
        if self._buffers.landing_rows is None:
            return np.asarray(moves.landing_offset + self._buffers.landing[slot].data_ptr(), np.int64)
        bases = np.array([rows.data_ptr() for rows in self._buffers.landing_rows[slot]], np.int64)
        return np.asarray(bases[moves.tensor] + moves.row * moves.nbytes, np.int64)

    def _failed(self, error: OSError | StrangerError, peer: int, pid: int, where: str) -> TransferError:
        detail = f"Reading rank {peer} (process {pid}) {where}."
        if isinstance(error, StrangerError):
            return TransferError("EPLB-T001", label=_LABEL, state=str(error), detail=detail)
        hint = remedy(error.errno or 0, pid)
        return TransferError("EPLB-T001", label=_LABEL, state=error.strerror, detail=f"{detail} {hint}".strip())

    def progress(self) -> None:
        """Nothing moves on its own."""

    def abort(self, handle: object, reason: str) -> bool:
        """Nothing is in flight outside `wait`."""
        return True

    def close(self, force: bool = False) -> bool:
        """Forget the peers; nothing writes into landing memory any more."""
        self._peers.clear()
        return True
