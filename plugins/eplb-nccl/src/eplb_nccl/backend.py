"""The ``torch_nccl`` backend: the four hooks over the host's device group, batch by batch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.distributed as dist

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
from eplb_core.backend.toolkit import Deadline, Lifecycle, check_member, row_batches
from eplb_core.errors import error_for
from eplb_nccl.connect import meet, meet_all
from eplb_nccl.group import DeviceGroup, Failure, Posted
from eplb_nccl.hooks import NAME, why_not_available
from eplb_nccl.metadata import NONCE_NBYTES, nonce_of, pack
from eplb_nccl.options import TorchNcclOptions
from eplb_nccl.transfer import LayerTransfer, tag_of
from eplb_nccl.watched import WatchedGroup

_DRAIN_S = 0.5


class TorchNcclBackend:
    """Moves rows from live memory into landing memory over ``context.device_group``.

    Parameters
    ----------
    options : TorchNcclOptions
        There are none.
    context : BackendContext
        With a ``device_group`` whose ranks are the members in order.
    """

    landing_layout: ClassVar[Literal["rows", "packed_by_peer"]] = "rows"
    landing_device: ClassVar[Literal["weights", "host"]] = "weights"
    coalesce_nbytes: ClassVar[int] = 0
    needs_progress: ClassVar[bool] = False
    row_lists: ClassVar[bool] = True

    def __init__(self, options: TorchNcclOptions, context: BackendContext) -> None:
        self._context = context
        self._place = {rank: place for place, rank in enumerate(context.members)}
        self._life: Lifecycle[LayerTransfer] = Lifecycle(context, NAME)
        self._group: DeviceGroup | None = None
        self._watched: WatchedGroup | None = None
        if len(context.members) > 1:
            self._group = DeviceGroup(
                context.device_group, device=context.device, members=context.members, rank=context.rank
            )
            self._watched = WatchedGroup(self._group, context, self._life)
        self._nonce = os.urandom(NONCE_NBYTES)
        self._buffers: Buffers | None = None
        self._undrained: list[Posted] = []

    @classmethod
    def probe(cls, options: TorchNcclOptions) -> Mapping[str, str]:
        """Say which NCCL torch was built with; whether the group works is seen at connect."""
        reason = why_not_available()
        if reason is not None:
            raise error_for("EPLB-D004", backend=NAME, reason=reason)
        nccl = "none in this build of torch: CPU tensors over the host's own group only"
        if dist.is_nccl_available():
            nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        return {"torch": torch.__version__, "nccl": nccl}

    @property
    def shared_options(self) -> Mapping[str, str | int | float | bool]:
        """The kind of group: two kinds do not meet."""
        return {"group": "none" if self._group is None else self._group.kind}

    @hookimpl
    def register_buffers(self, buffers: Buffers) -> LocalMetadata:
        """Keep the buffers; see `eplb_core.hookspecs.BackendSpec.register_buffers`."""
        self._check_usable()
        self._life.registering()
        self._buffers = buffers
        return LocalMetadata(pack(self._place[self._context.rank], len(self._place), self._nonce))

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        """Warm the group up, then every pair; see `eplb_core.hookspecs.BackendSpec.exchange_metadata`."""
        self._check_usable()
        self._life.connecting()
        nonces = {}
        for peer in peers:
            check_member(peer.rank, self._context)
            nonces[peer.rank] = nonce_of(peer, place=self._place[peer.rank], size=len(self._place))
        if self._watched is not None:
            deadline = Deadline(self._context.timeout_s)
            if not self._life.is_connected:
                meet_all(self._watched, self._context, deadline)
            meet(self._watched, self._context, self._nonce, nonces, deadline)
        self._life.connected()
        return ConnectReceipt(tuple(nonces))

    @hookimpl
    def transfer(self, plan: TransferPlan) -> LayerTransfer:
        """Post every batch; see `eplb_core.hookspecs.BackendSpec.transfer`."""
        self._check_usable()
        self._life.starting(plan.slot)
        buffers, watched = self._buffers, self._watched
        handle = LayerTransfer(plan)
        if buffers is None or watched is None or not len(plan.receives) + len(plan.sends):
            handle.complete()
            return handle
        batches = row_batches(plan, buffers, self._context, NAME)
        self._life.begin(handle)
        # What is posted is in flight, so there is a handle to abort whatever happens to the rest; its wait raises.
        tag, deadline = tag_of(self._context, f"{plan.sequence}"), Deadline(self._context.timeout_s)
        failure = watched.post(batches, tag, deadline, handle.posted)
        handle.failure = None if failure is None else failure.reason
        return handle

    @hookimpl
    def wait(self, handle: object, timeout_s: float) -> TransferReceipt:
        """Wait for receives and sends; see `eplb_core.hookspecs.BackendSpec.wait`."""
        transfer, deadline = LayerTransfer.own(handle, NAME), Deadline(timeout_s)
        if transfer.receipt is not None:
            return transfer.receipt
        self._check_usable()
        self._life.waiting(transfer)
        watched = self._connected_group()
        failure = Failure(transfer.failure) if transfer.failure is not None else None
        failure = failure or watched.finish(transfer.posted, deadline)
        if failure is not None:
            transfer.failure = failure.reason
            raise watched.explain(failure, f"layer {transfer.layer}, phase wait", deadline.elapsed_s)
        self._life.end(transfer)
        transfer.posted = []
        return transfer.complete()

    def progress(self) -> None:
        """Do nothing: the group's own threads, or the device, move the bytes."""

    def connected(self) -> bool:
        """Say so at once: `exchange_metadata` returns when every pair has met."""
        return self._life.is_connected

    def abort(self, handle: object, reason: str) -> bool:
        """Stop a transfer.

        Parameters
        ----------
        handle : LayerTransfer
            In flight, or failed in `wait`.
        reason : str
            For those who use the backend afterwards.

        Returns
        -------
        bool
            True when everything was complete already. Otherwise the group is severed, which frees the peers' waits too,
            and nothing goes over it any more.
        """
        transfer = LayerTransfer.own(handle, NAME)
        group, watched = self._group, self._watched
        if transfer.receipt is not None or group is None or watched is None:
            return True
        # Over gloo asking is waiting, and 1 ms of it with work outstanding closes the connections: just what is due.
        if transfer.failure is None and group.finish(transfer.posted, Deadline(0.0), lambda: None) is None:
            self._life.end(transfer)
            transfer.complete()
            transfer.posted = []
            return True
        watched.sever(f"layer {transfer.layer}, phase abort", reason)
        self._give_up(transfer, reason)
        return False

    def close(self, force: bool = False) -> bool:
        """Let go of the group, which is the host's; sever it first when something is still in flight.

        Returns
        -------
        bool
            True when nothing writes landing memory any more.
        """
        watched = self._watched
        if self._life.close() and watched is not None:
            reason = "the backend was closed"
            if self._life.in_flight:
                watched.sever("close", reason)
            for transfer in list(self._life.in_flight.values()):
                self._give_up(transfer, reason)
            watched.close()
        if watched is not None:
            if self._undrained and not watched.has_drained(self._undrained, _DRAIN_S):
                return False
            self._undrained = []
            if watched.is_blocked:
                return False
        self._group = self._watched = self._buffers = None
        return True

    # --- behind the hooks -----------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        self._life.check_usable()
        if self._group is not None and self._group.severed:
            reason = "another communicator closed the connections of the device_group they share"
            raise error_for("EPLB-T004", name=self._context.name, where="some transfer of the other one", reason=reason)

    def _connected_group(self) -> WatchedGroup:
        if self._watched is None:
            raise error_for("EPLB-T008", name=self._context.name)
        return self._watched

    def _give_up(self, transfer: LayerTransfer, reason: str) -> None:
        self._undrained.extend(transfer.give_up(reason))
        self._life.end(transfer)
