"""The ``torch_gloo`` backend: the four hooks over a gloo group of its own."""

from __future__ import annotations

import os
import struct
import time
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
from eplb_core.errors import error_for
from eplb_gloo.flight import Failure, LayerTransfer, finish_all
from eplb_gloo.group import NONCE_NBYTES, GlooGroup, name_ranks
from eplb_gloo.hooks import NAME, why_not_available
from eplb_gloo.messages import MisfitError, Registered, cut_messages
from eplb_gloo.options import COALESCE_NBYTES, GlooOptions
from eplb_gloo.sources import DeviceSource, HostSource, Source
from eplb_gloo.staging import SendSlots, send_slot_nbytes
from eplb_gloo.watch import CancelWatch

_PAYLOAD = struct.Struct(f"!8sBQ{NONCE_NBYTES}s")  # magic, landing slots, bytes of each, nonce
_MAGIC = b"eplbglo1"


class GlooBackend:
    """Moves rows between CPU ranks straight from live memory into landing memory, others by way of host memory.

    Parameters
    ----------
    options : GlooOptions
        See there.
    context : BackendContext
        See there.
    """

    landing_layout: ClassVar[Literal["rows", "packed_by_peer"]] = "packed_by_peer"
    landing_device: ClassVar[Literal["weights", "host"]] = "host"
    needs_progress: ClassVar[bool] = False
    coalesce_nbytes: int = COALESCE_NBYTES

    def __init__(self, options: GlooOptions, context: BackendContext) -> None:
        self.coalesce_nbytes = options.coalesce_nbytes
        self._options = options
        self._context = context
        self._nonce = os.urandom(NONCE_NBYTES)
        self._buffers: Buffers | None = None
        self._registered: Registered | None = None
        self._source: Source | None = None
        self._staging: SendSlots | None = None
        self._connected = False
        self._group: GlooGroup | None = None
        self._watch: CancelWatch | None = None
        self._in_flight: dict[int, LayerTransfer] = {}  # by slot
        self._poisoned: tuple[str, str] | None = None  # since where, why
        self._closed = False

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
        self._refuse_if_unusable()
        if self._buffers is not None:
            raise error_for("EPLB-P004", problem=f"{NAME} was given its buffers before")
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
        return LocalMetadata(_PAYLOAD.pack(_MAGIC, context.staging_layers, self._registered.slot_nbytes, self._nonce))

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        """Connect all members at the first call; see `eplb_core.hookspecs.BackendSpec.exchange_metadata`."""
        self._refuse_if_unusable()
        context, registered = self._context, self._registered
        if registered is None:
            raise error_for("EPLB-P004", problem=f"{NAME} is connected before it was given its buffers")
        nonces = {peer.rank: self._check_peer(peer, registered) for peer in peers}
        if not self._connected and len(context.members) > 1:
            group = GlooGroup(
                context.store,
                members=context.members,
                rank=context.rank,
                host=context.host,
                threads=self._options.threads,
                nonce=self._nonce,
                timeout_s=context.timeout_s,
                cancelled=context.cancelled,
            )
            self._group = group
            self._watch = CancelWatch(context.cancelled, group.sever)
        self._connected = True
        for rank, nonce in nonces.items():
            if self._group is None or self._group.nonces.get(rank) != nonce:
                raise error_for("EPLB-M005", peer=rank, problem="it does not belong to the process that connected")
        return ConnectReceipt(tuple(nonces))

    @hookimpl
    def transfer(self, plan: TransferPlan) -> LayerTransfer:
        """Post receives, then sends as they become ready; see `eplb_core.hookspecs.BackendSpec.transfer`."""
        self._refuse_if_unusable()
        registered, source, buffers = self._registered, self._source, self._buffers
        if not self._connected or registered is None or source is None or buffers is None:
            raise error_for("EPLB-P004", problem=f"a transfer over {NAME} before it is connected")
        if not 0 <= plan.slot < len(buffers.landing) or plan.slot in self._in_flight:
            raise error_for("EPLB-P004", problem=f"a transfer into slot {plan.slot}, which is in use or not there")
        try:
            receives = cut_messages(plan.receives, plan.layer, plan.sequence, registered)
            sends = cut_messages(plan.sends, plan.layer, plan.sequence, registered)
            outgoing = source.outgoing(plan.layer, plan.slot, sends)
        except MisfitError as misfit:
            detail = f"(the plan of layer {plan.layer} does not fit what was registered: {misfit})."
            raise error_for("EPLB-T001", label=NAME, state="refused", detail=detail) from misfit
        transfer = LayerTransfer(plan.layer, plan.slot, sum(receives.nbytes), sum(sends.nbytes))
        if self._group is None or not len(receives) + len(sends):
            transfer.complete()
            return transfer
        self._in_flight[plan.slot] = transfer
        transfer.post(self._group, receives, buffers.landing[plan.slot], sends, outgoing)
        return transfer

    @hookimpl
    def wait(self, handle: object, timeout_s: float) -> TransferReceipt:
        """Wait for receives and sends; see `eplb_core.hookspecs.BackendSpec.wait`."""
        transfer = _own(handle)
        if transfer.receipt is not None:
            return transfer.receipt
        self._refuse_if_unusable()
        watch = self._watch
        if watch is None or self._in_flight.get(transfer.slot) is not transfer:
            raise error_for("EPLB-P004", problem=f"a wait over {NAME} for a transfer that is not in flight")
        started = time.monotonic()
        failure: Failure | None
        if transfer.failure is not None:
            failure = Failure(transfer.failure)
        else:
            with watch:
                failure = finish_all(transfer, started + timeout_s)
            if failure is None and watch.acted:  # it came through, but the connections are closed
                failure = Failure("cancelled")
        if failure is not None:
            transfer.failure = failure.reason
            raise self._explain(transfer, failure, time.monotonic() - started, watch)
        self._leave(transfer)
        return transfer.complete()

    def progress(self) -> None:
        """Do nothing: gloo's threads move the bytes."""

    def connected(self) -> bool:
        """Say so at once: gloo connects all members before its constructor returns."""
        return self._connected

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
            True when everything was complete already. Otherwise every connection is closed, which wakes the peers'
            waits too, and nothing goes over this backend any more.
        """
        transfer = _own(handle)
        if transfer.receipt is not None:
            return True
        # Asking is waiting, and a wait of 1 ms that finds work outstanding closes the connections: just what is due.
        if transfer.failure is None and finish_all(transfer, time.monotonic()) is None:
            self._leave(transfer)
            transfer.complete()
            return True
        self._sever(f"layer {transfer.layer}, phase abort", reason)
        self._leave(transfer)
        transfer.give_up(reason)
        return False

    def close(self, force: bool = False) -> bool:
        """Give connections, threads and staging back, at once in either case.

        Returns
        -------
        bool
            True when gloo holds no memory of ours any more: its threads are gone. False only while another thread is
            still inside a wait, which this has woken.
        """
        if self._closed:
            return not self._waiting
        self._closed = True
        reason = "the backend was closed"
        if self._in_flight:
            self._sever("close", reason)
        for transfer in self._in_flight.values():
            transfer.give_up(reason)
        self._in_flight = {}
        if self._watch is not None:
            self._watch.close()
        if self._group is not None:
            self._group.close()
        if self._waiting:
            return False
        if self._staging is not None:
            self._staging.release()
        self._group = self._source = self._buffers = None
        return True

    # --- behind the hooks -----------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> bool:
        return self._watch is not None and self._watch.waiting

    def _refuse_if_unusable(self) -> None:
        if self._closed:
            raise error_for("EPLB-T008", name=self._context.name)
        if self._poisoned is not None:
            where, reason = self._poisoned
            raise error_for("EPLB-T004", name=self._context.name, where=where, reason=reason)

    def _check_peer(self, peer: PeerMetadata, registered: Registered) -> bytes:
        """Return a peer's nonce, after comparing what gloo would not survive if it differed."""
        if peer.rank not in self._context.members or peer.rank == self._context.rank:
            raise error_for("EPLB-M005", peer=peer.rank, problem="it is not another member")
        if len(peer.payload) != _PAYLOAD.size or not peer.payload.startswith(_MAGIC):
            raise error_for("EPLB-M005", peer=peer.rank, problem=f"its metadata was not written by this {NAME}")
        _, slots, slot_nbytes, nonce = _PAYLOAD.unpack(peer.payload)
        for field_name, local, remote in (
            ("landing slots", self._context.staging_layers, slots),
            ("landing slot nbytes", registered.slot_nbytes, slot_nbytes),
        ):
            if local != remote:
                raise error_for("EPLB-M004", label=NAME, field=field_name, peer=peer.rank, local=local, remote=remote)
        return bytes(nonce)

    def _leave(self, transfer: LayerTransfer) -> None:
        if self._in_flight.get(transfer.slot) is transfer:
            del self._in_flight[transfer.slot]

    def _sever(self, where: str, reason: str) -> None:
        if self._poisoned is None:
            self._poisoned = (where, reason)
        if self._group is not None:
            self._group.sever()
            self._group.close()

    def _explain(self, transfer: LayerTransfer, failure: Failure, elapsed_s: float, watch: CancelWatch) -> Exception:
        """Say why a wait failed: because of what happened elsewhere, if anything did, else what gloo says."""
        where = f"layer {transfer.layer}, phase wait"
        if watch.failure is not None:
            return watch.failure
        reason = watch.reason or self._context.cancelled()
        if reason:
            return error_for("EPLB-T001", label=NAME, state="cancelled", detail=f"{reason} ({where}).")
        if failure.timed_out:
            late = name_ranks(failure.silent or failure.untaken)
            waiting_for = late if failure.silent else f"{late} to take what was sent"
            where = f"{where} over {NAME}"
            return error_for("EPLB-T002", seconds=elapsed_s, where=where, waiting_for=waiting_for)
        whose = "" if failure.peer is None else f"with rank {failure.peer}, "
        return error_for("EPLB-T001", label=NAME, state=failure.reason, detail=f"({whose}{where}).")


def _own(handle: object) -> LayerTransfer:
    if not isinstance(handle, LayerTransfer):
        raise error_for("EPLB-P004", problem=f"{handle!r} is no transfer of {NAME}")
    return handle
