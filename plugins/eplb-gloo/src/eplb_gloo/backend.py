"""The ``torch_gloo`` backend: the four hooks over a gloo group of its own."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
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
from eplb_core.backend.toolkit import Lifecycle
from eplb_core.errors import error_for
from eplb_gloo.connect import connect_members
from eplb_gloo.forks import keep_in_children
from eplb_gloo.group import GlooGroup
from eplb_gloo.hooks import NAME, why_not_available
from eplb_gloo.messages import MisfitError, Registered, cut_messages
from eplb_gloo.metadata import NONCE_NBYTES, encode_payload, nonce_of
from eplb_gloo.options import COALESCE_NBYTES, GlooOptions
from eplb_gloo.sources import DeviceSource, HostSource, Source
from eplb_gloo.staging import SendSlots, send_slot_nbytes
from eplb_gloo.transfer import GlooTransfer, await_end

_ASK_S = 50e-3  # for what is complete but not yet seen to be: the thread that looks has to get a core first
_CLOSE_S = 0.5  # a thread that closing wakes needs milliseconds


class GlooBackend:
    """Moves rows between CPU ranks straight from live memory into landing memory, others by way of host memory.

    Parameters
    ----------
    options : GlooOptions
        Options of the backend, checked.
    context : BackendContext
        What the core gives a backend (`eplb_core.backend.BackendContext`).
    """

    landing_layout: ClassVar[Literal["rows", "packed_by_peer"]] = "packed_by_peer"
    landing_device: ClassVar[Literal["weights", "host"]] = "host"
    needs_progress: ClassVar[bool] = False
    row_lists: ClassVar[bool] = True
    coalesce_nbytes: int = COALESCE_NBYTES

    def __init__(self, options: GlooOptions, context: BackendContext) -> None:
        self.coalesce_nbytes = options.coalesce_nbytes
        self._options = options
        self._context = context
        self._life: Lifecycle[GlooTransfer] = Lifecycle(context, NAME)
        self._nonce = os.urandom(NONCE_NBYTES)
        self._buffers: Buffers | None = None
        self._registered: Registered | None = None
        self._source: Source | None = None
        self._staging: SendSlots | None = None
        self._group: GlooGroup | None = None
        self._shut_when_dropped: weakref.finalize[..., GlooBackend] | None = None

    @classmethod
    def probe(cls, options: GlooOptions) -> Mapping[str, str]:
        """Open a gloo device on loopback, as connecting will."""
        reason = why_not_available()
        if reason is None:
            try:
                dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
            except RuntimeError as error:
                reason = f"gloo opens no device on 127.0.0.1: {error}"
        if reason is not None:
            raise error_for("EPLB-D004", backend=NAME, reason=reason)
        return {"torch": torch.__version__, "threads": str(options.threads)}

    @property
    def shared_options(self) -> Mapping[str, str | int | float | bool]:
        """All of them: both ends must cut the same messages and use the same number of connections."""
        return dict(self._options.model_dump())

    @hookimpl
    def register_buffers(self, buffers: Buffers) -> LocalMetadata:
        """Take the buffers and allocate send staging; see `eplb_core.hookspecs.BackendSpec.register_buffers`."""
        self._life.registering()
        context = self._context
        if buffers.landing_rows is not None or len(buffers.landing) != context.staging_layers:
            problem = f"{NAME} receives into {context.staging_layers} packed landing slots of the core's own"
            raise error_for("EPLB-C010", problem=problem)
        slot_nbytes = {slot.numel() for slot in buffers.landing}
        if len(slot_nbytes) != 1 or any(slot.device.type != "cpu" for slot in buffers.landing):
            raise error_for("EPLB-C010", problem=f"{NAME} receives into landing slots of one size in host memory")
        group_rank = np.full(context.world_size, -1, np.int64)
        group_rank[list(context.members)] = np.arange(len(context.members))
        self._registered = Registered(
            row_nbytes=[np.array([tensor.shape[1] for tensor in layer], np.int64) for layer in buffers.rows],
            num_rows=max((tensor.shape[0] for layer in buffers.rows for tensor in layer), default=0),
            slot_nbytes=slot_nbytes.pop(),
            group_rank=group_rank,
            own=int(group_rank[context.rank]),
        )
        self._staging = SendSlots(context, send_slot_nbytes(buffers, context, self.coalesce_nbytes))
        slots = self._staging.tensors
        on_host = context.device.type == "cpu"
        self._source = HostSource(buffers.rows, slots) if on_host else DeviceSource(buffers.rows, slots, context.stream)
        self._buffers = buffers
        return LocalMetadata(encode_payload(context.staging_layers, self._registered.slot_nbytes, self._nonce))

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        """Connect all members at the first call; see `eplb_core.hookspecs.BackendSpec.exchange_metadata`."""
        self._life.connecting()
        context, slot_nbytes = self._context, 0 if self._registered is None else self._registered.slot_nbytes
        nonces = {peer.rank: nonce_of(peer, context, slot_nbytes) for peer in peers}
        if not self._life.is_connected and len(context.members) > 1:
            group = self._group = connect_members(context, self._nonce, self._options.threads)
            self._shut_when_dropped = weakref.finalize(self, _shut, group, self._life.in_flight, self._staging)
            keep_in_children(self)
        self._life.connected()
        for rank, nonce in nonces.items():
            if self._group is None or self._group.nonces.get(rank) != nonce:
                raise error_for("EPLB-M005", peer=rank, problem="it does not belong to the process that connected")
        return ConnectReceipt(tuple(nonces))

    @hookimpl
    def transfer(self, plan: TransferPlan) -> GlooTransfer:
        """Post receives, then sends as they become ready; see `eplb_core.hookspecs.BackendSpec.transfer`."""
        self._life.starting(plan.slot)
        registered, source, buffers = self._registered, self._source, self._buffers
        if registered is None or source is None or buffers is None:  # another thread has just closed it
            raise error_for("EPLB-T008", name=self._context.name)
        try:
            receives = cut_messages(plan.receives, plan.layer, plan.sequence, registered)
            sends = cut_messages(plan.sends, plan.layer, plan.sequence, registered)
            outgoing = source.outgoing(plan.layer, plan.slot, sends)
        except MisfitError as misfit:
            detail = f"(the plan of layer {plan.layer} does not fit what was registered: {misfit})."
            raise error_for("EPLB-T001", label=NAME, state="refused", detail=detail) from misfit
        transfer = GlooTransfer(plan)
        if self._group is None or not len(receives) + len(sends):
            transfer.complete()
            return transfer
        self._life.begin(transfer)
        transfer.post(self._group, receives, buffers.landing[plan.slot], sends, outgoing)
        return transfer

    @hookimpl
    def wait(self, handle: object, timeout_s: float) -> TransferReceipt:
        """Wait for receives and sends; see `eplb_core.hookspecs.BackendSpec.wait`."""
        transfer = _own(handle)
        if transfer.receipt is not None:
            return transfer.receipt
        self._life.waiting(transfer)
        group = self._group
        if group is None:  # another thread has just closed it
            raise error_for("EPLB-T008", name=self._context.name)
        receipt = await_end(transfer, group, self._context, timeout_s)
        self._life.end(transfer)
        return receipt

    def progress(self) -> None:
        """Do nothing: gloo's threads move the bytes."""

    def connected(self) -> bool:
        """Say so at once: gloo connects all members before its constructor returns."""
        return self._life.is_connected

    def abort(self, handle: object, reason: str) -> bool:
        """Stop a transfer.

        Parameters
        ----------
        handle : GlooTransfer
            In flight, or failed in `wait`.
        reason : str
            For those who use the backend afterwards.

        Returns
        -------
        bool
            True when everything was complete already. Otherwise every connection is closed, which wakes the peers'
            waits too, and nothing goes over this backend any more.
        """
        transfer = _own(handle)
        if transfer.receipt is None and transfer.over(_ASK_S) and transfer.failure is None:
            transfer.complete()
        if transfer.receipt is None:
            self._life.poison(f"layer {transfer.layer}, phase abort", reason)
            if self._group is not None:
                self._group.sever()
            transfer.give_up(reason)
        self._life.end(transfer)
        return transfer.receipt is not None

    def close(self, force: bool = False) -> bool:
        """Give connections, threads and staging back, at once in either case.

        Returns
        -------
        bool
            True when gloo holds no memory of ours any more: its threads are gone. False when a peer died in the middle
            of a message, and a thread is left behind in the wait for it; or, in the worst case, when it is out of that
            wait but had no time to say so, after which a second call returns True.
        """
        self._life.close()
        if self._group is not None and self._group.is_inherited:
            return True
        if self._shut_when_dropped is not None:
            self._shut_when_dropped.detach()
        self._source = self._buffers = None
        if self._group is not None and not _shut(self._group, self._life.in_flight, self._staging):
            return False
        if self._staging is not None:
            self._staging.release()
        self._group = None
        return True


def _shut(group: GlooGroup, in_flight: dict[int, GlooTransfer], staging: SendSlots | None) -> bool:
    """Close the connections; of a backend that is dropped without a close, too, so it does not refer to one.

    Returns
    -------
    bool
        True when no thread is inside gloo any more; else send staging is kept for the life of the process. A forked
        child leaves everything as it is.
    """
    if group.is_inherited:
        return True
    if in_flight:
        group.sever()
    for transfer in in_flight.values():
        transfer.give_up("the backend was closed")
    in_flight.clear()
    return group.close(_CLOSE_S, keep=staging)


def _own(handle: object) -> GlooTransfer:
    if not isinstance(handle, GlooTransfer):
        raise error_for("EPLB-P004", problem=f"{handle!r} is not a transfer of {NAME}")
    return handle
