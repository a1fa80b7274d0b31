"""The ``torch_nccl`` backend: the four hooks over the host's device group, batch by batch."""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

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
from eplb_nccl.group import DeviceGroup, Failure, Operation, Posted, brief, name_ranks
from eplb_nccl.hooks import NAME, why_not_available
from eplb_nccl.watch import BlockedCallWatch

_NONCE_NBYTES = 16
_PAYLOAD = struct.Struct(f"!8sII{_NONCE_NBYTES}s")  # magic, rank and size of the device group, nonce
_MAGIC = b"eplbtnc1"
_DRAIN_S = 0.5


@dataclass(eq=False)
class LayerTransfer:
    """One layer's operations in flight: what `transfer` returns."""

    layer: int
    slot: int
    nbytes_received: int = 0
    nbytes_sent: int = 0
    posted: list[Posted] = field(default_factory=list)
    failure: str | None = None
    """Why posting stopped early, or its wait."""
    receipt: TransferReceipt | None = None
    """Set when everything is complete."""


class TorchNcclBackend:
    """Moves rows from live memory into landing memory over ``context.device_group``.

    Parameters
    ----------
    options : None
        It takes none.
    context : BackendContext
        With a ``device_group`` whose ranks are the members in order.
    """

    landing_layout: ClassVar[Literal["rows", "packed_by_peer"]] = "rows"
    landing_device: ClassVar[Literal["weights", "host"]] = "weights"
    coalesce_nbytes: ClassVar[int] = 0
    needs_progress: ClassVar[bool] = False

    def __init__(self, options: None, context: BackendContext) -> None:
        self._context = context
        self._place = {rank: place for place, rank in enumerate(context.members)}
        self._group: DeviceGroup | None = None
        if len(context.members) > 1:
            self._group = DeviceGroup(
                context.device_group, device=context.device, members=context.members, rank=context.rank
            )
        self._nonce = os.urandom(_NONCE_NBYTES)
        self._buffers: Buffers | None = None
        self._watch: BlockedCallWatch | None = None
        self._connected = False
        self._in_flight: dict[int, LayerTransfer] = {}  # by slot
        self._undrained: list[Posted] = []
        self._poisoned: tuple[str, str] | None = None  # since where, why
        self._closed = False

    @classmethod
    def probe(cls, options: None) -> Mapping[str, str]:
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
        self._refuse_if_unusable()
        if self._buffers is not None:
            raise error_for("EPLB-P004", problem=f"{NAME} was given its buffers before")
        self._buffers = buffers
        members = self._context.members
        return LocalMetadata(_PAYLOAD.pack(_MAGIC, self._place[self._context.rank], len(members), self._nonce))

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        """Warm the group up, then every pair; see `eplb_core.hookspecs.BackendSpec.exchange_metadata`."""
        self._refuse_if_unusable()
        if self._buffers is None:
            raise error_for("EPLB-P004", problem=f"{NAME} is connected before it was given its buffers")
        nonces = {peer.rank: self._check_peer(peer) for peer in peers}
        group = self._group
        if group is not None:
            watch = self._watch = self._watch or BlockedCallWatch(self._context.cancelled, group.sever)
            deadline_s = time.monotonic() + self._context.timeout_s
            if not self._connected:
                self._meet_all(group, watch, deadline_s)
            self._greet(group, watch, deadline_s, nonces)
        self._connected = True
        return ConnectReceipt(tuple(nonces))

    @hookimpl
    def transfer(self, plan: TransferPlan) -> LayerTransfer:
        """Post every batch; see `eplb_core.hookspecs.BackendSpec.transfer`."""
        self._refuse_if_unusable()
        buffers, group, watch = self._buffers, self._group, self._watch
        if buffers is None or not self._connected:
            raise error_for("EPLB-P004", problem=f"a transfer over {NAME} before it is connected")
        if plan.slot in self._in_flight or not 0 <= plan.slot < self._context.staging_layers:
            raise error_for("EPLB-P004", problem=f"a transfer into slot {plan.slot}, which is in use or not there")
        handle = LayerTransfer(plan.layer, plan.slot, int(plan.receives.nbytes.sum()), int(plan.sends.nbytes.sum()))
        if group is None or watch is None or not len(plan.receives) + len(plan.sends):
            handle.receipt = TransferReceipt(0, 0)
            return handle
        batches = list(self._batches(plan, buffers))
        tag = self._tag(f"{plan.sequence}")
        self._in_flight[plan.slot] = handle
        deadline_s = time.monotonic() + self._context.timeout_s
        try:
            # NCCL blocks where a pair has not connected yet; gloo never does, and the watch would only cost.
            with self._stream(), watch.until(deadline_s) if group.polls else nullcontext():
                for batch in batches:
                    handle.posted.extend(group.post(batch, tag))
        except RuntimeError as error:
            # A connection closed meanwhile, or the device failed. What is posted is in flight, so there must be a
            # handle to abort; its wait raises.
            handle.failure = brief(error)
        return handle

    @hookimpl
    def wait(self, handle: object, timeout_s: float) -> TransferReceipt:
        """Wait for receives and sends; see `eplb_core.hookspecs.BackendSpec.wait`."""
        transfer = _own(handle)
        if transfer.receipt is not None:
            return transfer.receipt
        self._refuse_if_unusable()
        group, watch = self._group, self._watch
        if group is None or watch is None or self._in_flight.get(transfer.slot) is not transfer:
            raise error_for("EPLB-P004", problem=f"a wait over {NAME} for a transfer that is not in flight")
        started_s = time.monotonic()
        failure = Failure(transfer.failure) if transfer.failure is not None else None
        if failure is None:
            failure = self._finish(group, watch, transfer.posted, started_s + timeout_s)
        if failure is not None:
            transfer.failure = failure.reason
            raise self._explain(watch, failure, f"layer {transfer.layer}, phase wait", time.monotonic() - started_s)
        return self._done(transfer)

    def progress(self) -> None:
        """Do nothing: the group's own threads, or the device, move the bytes."""

    def connected(self) -> bool:
        """Say so at once: `exchange_metadata` returns when every pair has met."""
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
            True when everything was complete already. Otherwise the group is severed, which frees the peers' waits too,
            and nothing goes over it any more.
        """
        transfer = _own(handle)
        group = self._group
        if transfer.receipt is not None or group is None:
            return True
        # Over gloo asking is waiting, and 1 ms of it with work outstanding closes the connections: just what is due.
        if transfer.failure is None and group.finish(transfer.posted, time.monotonic(), lambda: None) is None:
            self._done(transfer)
            return True
        self._sever(group, f"layer {transfer.layer}, phase abort", reason)
        self._drop(transfer, reason)
        return False

    def close(self, force: bool = False) -> bool:
        """Let go of the group, which is the host's; sever it first when something is still in flight.

        Returns
        -------
        bool
            True when nothing writes landing memory any more.
        """
        group = self._group
        if not self._closed:
            self._closed = True
            if group is not None and self._in_flight:
                self._sever(group, "close", "the backend was closed")
            for transfer in list(self._in_flight.values()):
                self._drop(transfer, "the backend was closed")
            if self._watch is not None:
                self._watch.close()
        if group is not None and self._undrained:
            failure = group.finish(self._undrained, time.monotonic() + _DRAIN_S, lambda: None)
            if failure is not None and failure.timed_out and group.polls:
                return False
            self._undrained = []
        if self._watch is not None and self._watch.watching:
            return False
        self._group = self._buffers = None
        return True

    # --- behind the hooks -----------------------------------------------------------------------------------------

    def _refuse_if_unusable(self) -> None:
        if self._closed:
            raise error_for("EPLB-T008", name=self._context.name)
        if self._poisoned is not None:
            where, reason = self._poisoned
            raise error_for("EPLB-T004", name=self._context.name, where=where, reason=reason)
        if self._group is not None and self._group.severed:
            reason = "another communicator closed the connections of the device_group they share"
            raise error_for("EPLB-T004", name=self._context.name, where="some transfer of the other one", reason=reason)

    def _check_peer(self, peer: PeerMetadata) -> bytes:
        """Return a peer's nonce, after checking that its group is ours."""
        if peer.rank not in self._place or peer.rank == self._context.rank:
            raise error_for("EPLB-M005", peer=peer.rank, problem="it is not another member")
        if len(peer.payload) != _PAYLOAD.size or not peer.payload.startswith(_MAGIC):
            raise error_for("EPLB-M005", peer=peer.rank, problem=f"its metadata was not written by this {NAME}")
        _, place, size, nonce = _PAYLOAD.unpack(peer.payload)
        for what, expected, theirs in (
            ("device_group rank", self._place[peer.rank], place),
            ("device_group size", len(self._place), size),
        ):
            if expected != theirs:
                raise error_for("EPLB-M004", label=NAME, field=what, peer=peer.rank, local=expected, remote=theirs)
        return bytes(nonce)

    def _meet_all(self, group: DeviceGroup, watch: BlockedCallWatch, deadline_s: float) -> None:
        where = f"phase connect ({NAME})"
        started_s = time.monotonic()
        try:
            with self._stream(), watch.until(deadline_s):
                ones, posted = group.sum_of_ones()
            failure = self._finish(group, watch, posted, deadline_s)
        except RuntimeError as error:
            failure = Failure(brief(error))
        if failure is not None:
            others = tuple(rank for rank in self._context.members if rank != self._context.rank)
            self._sever(group, where, failure.reason)
            raise self._explain(watch, failure._replace(peers=others), where, time.monotonic() - started_s)
        if int(ones.item()) != len(self._place):
            problem = f"the members' device groups are not one: it counted {int(ones.item())} of {len(self._place)}"
            raise error_for("EPLB-C010", problem=problem)

    def _greet(
        self, group: DeviceGroup, watch: BlockedCallWatch, deadline_s: float, nonces: Mapping[int, bytes]
    ) -> None:
        """Exchange nonces with peers that are new: connects each pair, and proves who is behind a rank of the group."""
        where = f"phase connect ({NAME})"
        device, started_s = self._context.device, time.monotonic()
        with self._stream():
            mine = torch.frombuffer(bytearray(self._nonce), dtype=torch.uint8).to(device)
            heard = {rank: torch.zeros_like(mine) for rank in nonces}
        posted: list[Posted] = []
        failure: Failure | None = None
        try:
            with self._stream(), watch.until(deadline_s) if group.polls else nullcontext():
                for ranks in self._rounds(nonces):
                    receives = [Operation(rank, self._place[rank], False, heard[rank]) for rank in ranks]
                    sends = [Operation(rank, self._place[rank], True, mine) for rank in ranks]
                    posted.extend(group.post([*receives, *sends], self._tag("greeting")))
        except RuntimeError as error:
            failure = Failure(brief(error))
        failure = failure or self._finish(group, watch, posted, deadline_s)
        if failure is not None:
            self._sever(group, where, failure.reason)
            raise self._explain(watch, failure, where, time.monotonic() - started_s)
        for rank, nonce in nonces.items():
            if bytes(heard[rank].cpu().numpy()) != nonce:
                problem = f"rank {self._place[rank]} of the device_group is not the process that is rank {rank} here"
                raise error_for("EPLB-M005", peer=rank, problem=problem)

    def _rounds(self, ranks: Mapping[int, bytes]) -> Iterator[list[int]]:
        """Group peers so that both ends of a pair meet in the same batch: i and j in round (i + j) mod size."""
        size, own = len(self._place), self._place[self._context.rank]
        per_batch = max(1, self._context.max_ops_per_batch // 2)
        batches: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            batches.setdefault((self._place[rank] + own) % size // per_batch, []).append(rank)
        for _, batch in sorted(batches.items()):
            yield batch

    def _batches(self, plan: TransferPlan, buffers: Buffers) -> Iterator[list[Operation]]:
        """Return this rank's operations batch by batch, receives first; both ends list a pair's rows alike."""
        batches: dict[int, list[Operation]] = {}
        receives, sends = plan.receives, plan.sends
        for is_send, columns in ((False, receives), (True, sends)):
            for peer, tensor, row, nbytes, offset, batch in zip(
                columns.peer.tolist(),
                columns.tensor.tolist(),
                columns.row.tolist(),
                columns.nbytes.tolist(),
                columns.landing_offset.tolist(),
                columns.batch.tolist(),
                strict=True,
            ):
                if is_send:
                    buffer = buffers.rows[plan.layer][tensor][row]
                elif buffers.landing_rows is not None:
                    buffer = buffers.landing_rows[plan.slot][tensor][row]
                else:
                    buffer = buffers.landing[plan.slot][offset : offset + nbytes]
                if buffer.numel() != nbytes or peer not in self._place or peer == self._context.rank:
                    detail = f"(the plan of layer {plan.layer} does not fit what was registered)."
                    raise error_for("EPLB-T001", label=NAME, state="refused", detail=detail)
                batches.setdefault(batch, []).append(Operation(peer, self._place[peer], is_send, buffer))
        for _, operations in sorted(batches.items()):
            yield operations

    def _tag(self, topic: str) -> int:
        text = f"{self._context.name}/{self._context.epoch}/{topic}"
        return zlib.crc32(text.encode()) & 0x3FFF_FFFF

    def _stream(self) -> AbstractContextManager[Any]:
        """Make the backend's stream current, and with it its device: NCCL orders itself after it."""
        return nullcontext() if self._context.stream is None else self._context.stream

    def _finish(
        self, group: DeviceGroup, watch: BlockedCallWatch, posted: Sequence[Posted], deadline_s: float
    ) -> Failure | None:
        if group.polls:
            return group.finish(posted, deadline_s, self._context.cancelled)
        # gloo's own limit is the exact one; the watch is there for what happens elsewhere
        with watch.until(deadline_s + 1.0):
            return group.finish(posted, deadline_s, lambda: None)

    def _done(self, transfer: LayerTransfer) -> TransferReceipt:
        transfer.posted = []
        del self._in_flight[transfer.slot]
        transfer.receipt = TransferReceipt(transfer.nbytes_received, transfer.nbytes_sent)
        return transfer.receipt

    def _drop(self, transfer: LayerTransfer, failure: str) -> None:
        transfer.failure = transfer.failure or failure
        self._undrained.extend(transfer.posted)
        transfer.posted = []
        if self._in_flight.get(transfer.slot) is transfer:
            del self._in_flight[transfer.slot]

    def _sever(self, group: DeviceGroup, where: str, reason: str) -> None:
        if self._poisoned is None:
            self._poisoned = (where, reason)
        group.sever()

    def _explain(self, watch: BlockedCallWatch, failure: Failure, where: str, elapsed_s: float) -> Exception:
        """Say why a wait failed: because of what happened elsewhere, if anything did, else what the group says."""
        if watch.failure is not None:
            return watch.failure
        reason = watch.reason or self._context.cancelled()
        if reason:
            return error_for("EPLB-T001", label=NAME, state="cancelled", detail=f"{reason} ({where}).")
        if failure.timed_out or watch.timed_out:
            late = name_ranks(failure.peers) if failure.peers else "a peer"
            waiting_for = late if failure.receives else f"{late} to take what was sent"
            return error_for("EPLB-T002", seconds=elapsed_s, where=f"{where} over {NAME}", waiting_for=waiting_for)
        whose = f"with {name_ranks(failure.peers)}, " if failure.peers else ""
        return error_for("EPLB-T001", label=NAME, state=failure.reason, detail=f"({whose}{where}).")


def _own(handle: object) -> LayerTransfer:
    if not isinstance(handle, LayerTransfer):
        raise error_for("EPLB-P004", problem=f"{handle!r} is no transfer of {NAME}")
    return handle
