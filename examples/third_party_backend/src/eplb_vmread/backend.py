"""The four hooks: each rank reads its peers' live rows straight into its landing rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from eplb_core import hookimpl
from eplb_core.backend import (
    BackendContext,
    Buffers,
    ConnectReceipt,
    LocalMetadata,
    PeerMetadata,
    TransferPlan,
    TransferReceipt,
)
from eplb_core.backend.toolkit import Wait
from eplb_core.errors import DiscoveryError, MetadataError, TransferError
from eplb_vmread.hooks import NAME
from eplb_vmread.memory import StrangerError, Token
from eplb_vmread.metadata import Peer, pack, unpack
from eplb_vmread.options import VmReadOptions
from eplb_vmread.permission import allow_readers, pid_namespace, remedy, why_not, yama_scope
from eplb_vmread.transfer import parts_of


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
        self._peers: dict[int, Peer] = {}

    @classmethod
    def probe(cls, options: VmReadOptions) -> Mapping[str, str]:
        """See that the system allows the call, and say what Yama has to say about others."""
        reason = why_not()
        if reason is not None:
            raise DiscoveryError("EPLB-D004", backend=NAME, reason=reason)
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
            payload = pack(buffers, self._token)
        except OSError as error:
            detail = "Telling Yama who may read this process, and who it is."
            raise TransferError("EPLB-T001", label=NAME, state=error.strerror, detail=detail) from error
        self._buffers = buffers
        return LocalMetadata(payload)

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        """See that each peer is on this host, has the number it gave, and may be read."""
        for each in peers:
            peer = unpack(each, local.payload, self._buffers)
            try:
                peer.memory.check()
            except StrangerError as error:
                raise MetadataError("EPLB-M005", peer=each.rank, problem=str(error)) from error
            except OSError as error:
                raise _failed(error, each.rank, peer.memory.pid, "at connect") from error
            self._peers[each.rank] = peer
        return ConnectReceipt(tuple(each.rank for each in peers))

    @hookimpl
    def transfer(self, plan: TransferPlan) -> TransferPlan:
        """Keep the plan: the reads block, so they are done in `wait`."""
        return plan

    @hookimpl
    def wait(self, handle: TransferPlan, timeout_s: float) -> TransferReceipt:
        """Read every row, peer by peer, looking around before each system call."""
        wait = Wait(self._context, timeout_s, label=NAME, where=f"layer {handle.layer}, phase wait")
        for source in np.unique(handle.receives.peer).tolist():
            peer = self._peers[source]
            remote, local = parts_of(handle, source, peer, self._buffers)
            look_around = partial(wait.check, f"the rows of rank {source}")
            try:
                peer.memory.read(remote, local, look_around)
            except (OSError, StrangerError) as error:
                raise _failed(error, source, peer.memory.pid, f"in layer {handle.layer}") from error
        return TransferReceipt(int(handle.receives.nbytes.sum()), int(handle.sends.nbytes.sum()))

    def progress(self) -> None:
        """Nothing moves on its own."""

    def abort(self, handle: object, reason: str) -> bool:
        """Nothing is in flight outside `wait`."""
        return True

    def close(self, force: bool = False) -> bool:
        """Forget the peers; nothing writes into landing memory any more."""
        self._peers.clear()
        return True


def _failed(error: OSError | StrangerError, peer: int, pid: int, where: str) -> TransferError:
    detail = f"Reading rank {peer} (process {pid}) {where}."
    if isinstance(error, StrangerError):
        return TransferError("EPLB-T001", label=NAME, state=str(error), detail=detail)
    hint = remedy(error.errno or 0, pid)
    return TransferError("EPLB-T001", label=NAME, state=error.strerror, detail=f"{detail} {hint}".strip())
