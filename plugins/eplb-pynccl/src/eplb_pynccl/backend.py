"""The ``pynccl`` backend: the four hooks over an NCCL communicator of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

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
from eplb_pynccl.binding import Binding, NcclError, load_binding, spell
from eplb_pynccl.connection import Batch, Connection, Operation, WaitEnded
from eplb_pynccl.driver import driver_facts
from eplb_pynccl.hooks import NAME
from eplb_pynccl.metadata import NONCE_NBYTES, Member, await_unique_id, pack, publish, unpack, withdraw
from eplb_pynccl.options import PyNcclOptions
from eplb_pynccl.streams import CudaStream, OperationStream


@dataclass(eq=False)
class LayerTransfer:
    """One layer's batches: what `transfer` returns."""

    layer: int
    slot: int
    nbytes_received: int = 0
    nbytes_sent: int = 0
    batches: list[Batch] = field(default_factory=list)
    receipt: TransferReceipt | None = None
    """Set when everything is complete."""


class PyNcclBackend:
    """Moves rows from live memory into landing memory by grouped sends and receives of bytes.

    Parameters
    ----------
    options : PyNcclOptions
        See there.
    context : BackendContext
        See there.
    """

    landing_layout: ClassVar[Literal["rows", "packed_by_peer"]] = "rows"
    landing_device: ClassVar[Literal["weights", "host"]] = "weights"
    coalesce_nbytes: ClassVar[int] = 0
    needs_progress: ClassVar[bool] = True

    def __init__(self, options: PyNcclOptions, context: BackendContext) -> None:
        self._context = context
        self._place = {rank: place for place, rank in enumerate(context.members)}
        self._lowest = context.members[0]
        self._nonce = os.urandom(NONCE_NBYTES)
        try:
            self._binding: Binding = load_binding(options)
        except NcclError as error:
            raise error_for("EPLB-D004", backend=NAME, reason=str(error)) from error
        self._stream: OperationStream | None = self.operation_stream(context)
        self._unique_id: bytes | None = None
        self._buffers: Buffers | None = None
        self._connection: Connection | None = None
        self._connected = False
        self._in_flight: dict[int, LayerTransfer] = {}  # by slot
        self._undrained = False
        self._failure: NcclError | None = None
        self._poisoned: tuple[str, str] | None = None  # since where, why
        self._closed = False

    # --- what depends on the device -------------------------------------------------------------------------------

    @classmethod
    def device_facts(cls) -> Mapping[str, str]:
        """Say in which state the driver is; `NcclError` when it cannot be used."""
        return driver_facts()

    @classmethod
    def operation_stream(cls, context: BackendContext) -> OperationStream:
        """Return the stream that operations are queued on."""
        if context.device.type != "cuda" or context.stream is None:
            raise error_for("EPLB-C010", problem=f"{NAME} moves CUDA tensors on a CUDA stream, not {context.device}")
        return CudaStream(context.stream)

    # --- the hooks ------------------------------------------------------------------------------------------------

    @classmethod
    def probe(cls, options: PyNcclOptions) -> Mapping[str, str]:
        """Load NCCL and ask the driver; creates no context and no communicator."""
        try:
            binding = load_binding(options)
            facts = {"nccl": spell(binding.version()), "library": binding.library_path(), "binding": binding.name}
            return {**facts, **cls.device_facts()}
        except NcclError as error:
            raise error_for("EPLB-D004", backend=NAME, reason=str(error)) from error

    @property
    def shared_options(self) -> Mapping[str, str | int | float | bool]:
        """NCCL's version: two releases do not talk to each other."""
        return {"nccl": spell(self._binding.version())}

    @hookimpl
    def register_buffers(self, buffers: Buffers) -> LocalMetadata:
        """Keep the buffers; the lowest member makes the unique id. See `eplb_core.hookspecs.BackendSpec`."""
        self._refuse_if_unusable()
        if self._buffers is not None:
            raise error_for("EPLB-P004", problem=f"{NAME} was given its buffers before")
        context = self._context
        shares = len(context.members) > 1 and context.rank == self._lowest
        if shares:
            try:
                self._unique_id = self._binding.unique_id()
            except NcclError as error:
                raise self._failed(error, "phase register") from error
        payload = pack(self._nonce, self._unique_id)
        if shares:
            publish(context.store, payload)
        self._buffers = buffers
        return LocalMetadata(payload)

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        """Make the communicator at the first call, then meet each new peer; see `eplb_core.hookspecs.BackendSpec`."""
        self._refuse_if_unusable()
        if self._buffers is None:
            raise error_for("EPLB-P004", problem=f"{NAME} is connected before it was given its buffers")
        members = {peer.rank: self._check_peer(peer) for peer in peers}
        started_s = time.monotonic()
        deadline_s = started_s + self._context.timeout_s
        where = f"phase connect ({NAME})"
        if len(self._context.members) > 1:
            try:
                if self._connection is None:
                    self._connection = self._connect(members, deadline_s)
                self._greet(self._connection, members, deadline_s)
            except NcclError as error:
                raise self._failed(error, where) from error
            except WaitEnded as ended:
                others = members or [rank for rank in self._place if rank != self._context.rank]
                raise self._stopped(ended, where, time.monotonic() - started_s, set(others)) from ended
        self._connected = True
        return ConnectReceipt(tuple(members))

    @hookimpl
    def transfer(self, plan: TransferPlan) -> LayerTransfer:
        """Queue every batch and launch what NCCL takes at once; see `eplb_core.hookspecs.BackendSpec.transfer`."""
        self._refuse_if_unusable()
        buffers, connection = self._buffers, self._connection
        if buffers is None or not self._connected:
            raise error_for("EPLB-P004", problem=f"a transfer over {NAME} before it is connected")
        if plan.slot in self._in_flight or not 0 <= plan.slot < self._context.staging_layers:
            raise error_for("EPLB-P004", problem=f"a transfer into slot {plan.slot}, which is in use or not there")
        nbytes_received, nbytes_sent = int(plan.receives.nbytes.sum()), int(plan.sends.nbytes.sum())
        handle = LayerTransfer(plan.layer, plan.slot, nbytes_received, nbytes_sent)
        if connection is None or not len(plan.receives) + len(plan.sends):
            handle.receipt = TransferReceipt(0, 0)
            return handle
        handle.batches = self._batches(plan, buffers)
        self._in_flight[plan.slot] = handle
        connection.enqueue(handle.batches)
        self.progress()
        return handle

    @hookimpl
    def wait(self, handle: object, timeout_s: float) -> TransferReceipt:
        """Wait for receives and sends; see `eplb_core.hookspecs.BackendSpec.wait`."""
        transfer = _own(handle)
        if transfer.receipt is not None:
            return transfer.receipt
        self._refuse_if_unusable()
        connection = self._connection
        if connection is None or self._in_flight.get(transfer.slot) is not transfer:
            raise error_for("EPLB-P004", problem=f"a wait over {NAME} for a transfer that is not in flight")
        started_s = time.monotonic()
        where = f"layer {transfer.layer}, phase wait"
        try:
            if self._failure is not None:
                raise self._failure
            connection.finish(transfer.batches, started_s + timeout_s)
        except NcclError as error:
            # What NCCL saw is often only what a death or an abort elsewhere did to it.
            reason = self._context.cancelled()
            if reason:
                raise error_for("EPLB-T001", label=NAME, state="cancelled", detail=f"{reason} ({where}).") from error
            peers = ", ".join(map(str, sorted(_silent(transfer))))
            detail = f"(with rank(s) {peers}, {where})."
            raise error_for("EPLB-T001", label=NAME, state=str(error), detail=detail) from error
        except WaitEnded as ended:
            raise self._stopped(ended, where, time.monotonic() - started_s, _silent(transfer)) from ended
        return self._done(transfer)

    def progress(self) -> None:
        """Launch what waits for NCCL to take it; a failure is kept for `wait`."""
        connection = self._connection
        if connection is None or self._failure is not None or self._poisoned is not None or self._closed:
            return
        try:
            connection.advance()
        except NcclError as error:
            self._failure = error

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
            True when everything was complete already. Otherwise the communicator is aborted, which the peers see as an
            error, and nothing goes over it any more.
        """
        transfer = _own(handle)
        if transfer.receipt is not None:
            return True
        self.progress()
        if all(batch.done for batch in transfer.batches):
            self._done(transfer)
            return True
        self._sever(f"layer {transfer.layer}, phase abort", reason)
        self._in_flight.pop(transfer.slot, None)
        return False

    def connected(self) -> bool:
        """Say so at once: `exchange_metadata` returns when every pair has met."""
        return self._connected

    def close(self, force: bool = False) -> bool:
        """Free the communicator; abort it when forced, after a failure, or with something in flight.

        Returns
        -------
        bool
            True when nothing writes landing memory any more.
        """
        connection = self._connection
        if not self._closed:
            self._closed = True
            if connection is not None:
                if force or self._in_flight or self._poisoned is not None or self._failure is not None:
                    self._sever("close", "the backend was closed")
                else:
                    with suppress(NcclError):  # nothing is outstanding; what it could not free ends with the process
                        connection.close()
        if self._undrained and connection is not None:
            self._undrained = not connection.abort()
        if self._undrained:
            return False
        self._in_flight = {}
        self._connection = self._buffers = self._stream = None
        return True

    # --- behind the hooks -----------------------------------------------------------------------------------------

    def _refuse_if_unusable(self) -> None:
        if self._closed:
            raise error_for("EPLB-T008", name=self._context.name)
        if self._poisoned is not None:
            where, reason = self._poisoned
            raise error_for("EPLB-T004", name=self._context.name, where=where, reason=reason)

    def _check_peer(self, peer: PeerMetadata) -> Member:
        if peer.rank not in self._place or peer.rank == self._context.rank:
            raise error_for("EPLB-M005", peer=peer.rank, problem="it is not another member")
        member = unpack(peer.payload, peer.rank)
        if (member.unique_id is not None) != (peer.rank == self._lowest):
            problem = f"rank {self._lowest}, and no other, makes the unique id"
            raise error_for("EPLB-M005", peer=peer.rank, problem=problem)
        return member

    def _connect(self, members: Mapping[int, Member], deadline_s: float) -> Connection:
        context = self._context
        unique_id = self._unique_id
        if unique_id is None:
            unique_id = await_unique_id(context.store, self._lowest, deadline_s, context.cancelled)
            lowest = members.get(self._lowest)
            if lowest is not None and lowest.unique_id != unique_id:
                problem = "the unique id in its metadata is not the one it published"
                raise error_for("EPLB-M005", peer=self._lowest, problem=problem)
        stream = self._own_stream()
        with stream.copy_order():
            connection = Connection(
                self._binding,
                stream,
                unique_id=unique_id,
                size=len(context.members),
                own=self._place[context.rank],
                deadline_s=deadline_s,
                cancelled=context.cancelled,
            )
        if self._unique_id is not None:
            withdraw(context.store)
        return connection

    def _greet(self, connection: Connection, members: Mapping[int, Member], deadline_s: float) -> None:
        """Exchange nonces with peers that are new: connects each pair, and proves who is behind a rank of NCCL's."""
        device, stream = self._context.device, self._own_stream()
        with stream.copy_order():
            mine = torch.frombuffer(bytearray(self._nonce), dtype=torch.uint8).to(device)
            heard = {rank: torch.zeros_like(mine) for rank in members}
        batches = []
        for ranks in self._rounds(members):
            operations = [Operation(r, self._place[r], False, heard[r].data_ptr(), NONCE_NBYTES) for r in ranks]
            operations += [Operation(r, self._place[r], True, mine.data_ptr(), NONCE_NBYTES) for r in ranks]
            batches.append(Batch(operations))
        connection.enqueue(batches)
        connection.finish(batches, deadline_s)
        for rank, member in members.items():
            if bytes(heard[rank].cpu().numpy()) != member.nonce:
                problem = f"rank {self._place[rank]} of the communicator is not the process that is rank {rank} here"
                raise error_for("EPLB-M005", peer=rank, problem=problem)

    def _rounds(self, ranks: Mapping[int, Any]) -> Iterator[list[int]]:
        """Group peers so that both ends of a pair meet in the same batch: i and j in round (i + j) mod size."""
        size, own = len(self._place), self._place[self._context.rank]
        per_batch = max(1, self._context.max_ops_per_batch // 2)
        batches: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            batches.setdefault((self._place[rank] + own) % size // per_batch, []).append(rank)
        for _, batch in sorted(batches.items()):
            yield batch

    def _batches(self, plan: TransferPlan, buffers: Buffers) -> list[Batch]:
        """Return this rank's operations batch by batch; both ends list a pair's rows alike."""
        batches: dict[int, list[Operation]] = {}
        for is_send, columns in ((False, plan.receives), (True, plan.sends)):
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
                operation = Operation(peer, self._place[peer], is_send, buffer.data_ptr(), nbytes)
                batches.setdefault(batch, []).append(operation)
        return [Batch(operations) for _, operations in sorted(batches.items())]

    def _own_stream(self) -> OperationStream:
        if self._stream is None:
            raise error_for("EPLB-T008", name=self._context.name)
        return self._stream

    def _done(self, transfer: LayerTransfer) -> TransferReceipt:
        self._in_flight.pop(transfer.slot, None)
        transfer.batches = []
        transfer.receipt = TransferReceipt(transfer.nbytes_received, transfer.nbytes_sent)
        return transfer.receipt

    def _sever(self, where: str, reason: str) -> None:
        if self._poisoned is None:
            self._poisoned = (where, reason)
        if self._connection is not None:
            self._undrained = not self._connection.abort()

    def _failed(self, error: NcclError, where: str) -> Exception:
        self._sever(where, str(error))
        reason = self._context.cancelled()
        if reason:
            return error_for("EPLB-T001", label=NAME, state="cancelled", detail=f"{reason} ({where}).")
        return error_for("EPLB-T001", label=NAME, state=str(error), detail=f"({where}).")

    def _stopped(self, ended: WaitEnded, where: str, elapsed_s: float, silent: set[int]) -> Exception:
        """Abort at once, so that the peers learn of it, and say why."""
        self._sever(where, str(ended))
        if not ended.timed_out:
            return error_for("EPLB-T001", label=NAME, state="cancelled", detail=f"{ended} ({where}).")
        waiting_for = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, sorted(silent)))}"
        return error_for("EPLB-T002", seconds=elapsed_s, where=f"{where} over {NAME}", waiting_for=waiting_for)


def _silent(transfer: LayerTransfer) -> set[int]:
    """Return the peers of batches that are not complete; which of them it is, NCCL does not say."""
    return {peer for batch in transfer.batches if not batch.done for peer in batch.peers}


def _own(handle: object) -> LayerTransfer:
    if not isinstance(handle, LayerTransfer):
        raise error_for("EPLB-P004", problem=f"{handle!r} is no transfer of {NAME}")
    return handle
