"""The ``pynccl`` backend: the four hooks over an NCCL communicator of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, Literal

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
from eplb_core.backend.toolkit import Lifecycle, Wait, cancelled_error, check_member, failed_error, row_batches
from eplb_core.errors import TransferError, error_for
from eplb_pynccl.binding import Binding, NcclError, load_binding, spell
from eplb_pynccl.connect import WHERE, join, meet
from eplb_pynccl.connection import Batch, Connection, silent_in
from eplb_pynccl.driver import driver_facts
from eplb_pynccl.hooks import NAME
from eplb_pynccl.metadata import NONCE_NBYTES, member_of, pack, publish
from eplb_pynccl.options import PyNcclOptions
from eplb_pynccl.streams import CudaStream, OperationStream
from eplb_pynccl.transfer import LayerTransfer


class PyNcclBackend:
    """Moves rows from live memory into landing memory by grouped sends and receives of bytes.

    Parameters
    ----------
    options : PyNcclOptions
        Options of the backend, checked.
    context : BackendContext
        What the core gives a backend (`eplb_core.backend.BackendContext`).
    """

    landing_layout: ClassVar[Literal["rows", "packed_by_peer"]] = "rows"
    landing_device: ClassVar[Literal["weights", "host"]] = "weights"
    coalesce_nbytes: ClassVar[int] = 0
    needs_progress: ClassVar[bool] = True
    row_lists: ClassVar[bool] = True

    def __init__(self, options: PyNcclOptions, context: BackendContext) -> None:
        self._context = context
        self._nonce = os.urandom(NONCE_NBYTES)
        try:
            self._binding: Binding = load_binding(options)
        except NcclError as error:
            raise error_for("EPLB-D004", backend=NAME, reason=str(error)) from error
        self._stream: OperationStream | None = self.operation_stream(context)
        self._life: Lifecycle[LayerTransfer] = Lifecycle(context, NAME)
        self._unique_id: bytes | None = None
        self._buffers: Buffers | None = None
        self._connection: Connection | None = None
        self._undrained = False
        self._failure: NcclError | None = None

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
        self._life.registering()
        context = self._context
        if len(context.members) > 1 and context.rank == context.members[0]:
            try:
                self._unique_id = self._binding.unique_id()
            except NcclError as error:
                raise self._failed(error, "phase register") from error
        self._buffers = buffers
        return LocalMetadata(pack(self._nonce, self._unique_id))

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        """Make the communicator at the first call, then meet each new peer; see `eplb_core.hookspecs.BackendSpec`."""
        self._life.connecting()
        context, stream = self._context, self._stream
        members = {}
        for peer in peers:
            check_member(peer.rank, context)
            members[peer.rank] = member_of(peer, context.members[0])
        if len(context.members) > 1 and stream is not None:
            wait = Wait(context, context.timeout_s, label=NAME, where=WHERE)
            try:
                if self._connection is None:
                    if self._unique_id is not None:
                        publish(context.store, local.payload)  # for members that exchange nothing with this one
                    self._connection = join(self._binding, stream, context, self._unique_id, members, wait)
                meet(self._connection, stream, context, self._nonce, members, wait)
            except NcclError as error:
                raise self._failed(error, WHERE) from error
            except TransferError as ended:
                self._sever(WHERE, str(ended))
                raise
        self._life.connected()
        return ConnectReceipt(tuple(members))

    @hookimpl
    def transfer(self, plan: TransferPlan) -> LayerTransfer:
        """Queue every batch and launch what NCCL takes at once; see `eplb_core.hookspecs.BackendSpec.transfer`."""
        self._life.starting(plan.slot)
        buffers, connection = self._buffers, self._connection
        handle = LayerTransfer(plan)
        if buffers is None or connection is None or not len(plan.receives) + len(plan.sends):
            handle.complete()
            return handle
        handle.batches = [Batch(batch) for batch in row_batches(plan, buffers, self._context, NAME)]
        self._life.begin(handle)
        connection.enqueue(handle.batches)
        self.progress()
        return handle

    @hookimpl
    def wait(self, handle: object, timeout_s: float) -> TransferReceipt:
        """Wait for receives and sends; see `eplb_core.hookspecs.BackendSpec.wait`."""
        transfer = LayerTransfer.own(handle, NAME)
        if transfer.receipt is not None:
            return transfer.receipt
        self._life.waiting(transfer)
        where = f"layer {transfer.layer}, phase wait"
        try:
            if self._failure is not None:
                raise self._failure
            if self._connection is not None:
                wait = Wait(self._context, timeout_s, label=NAME, where=where)
                self._connection.finish(transfer.batches, wait)
        except NcclError as error:
            raise self._explained(error, where, silent_in(transfer.batches)) from error
        except TransferError as ended:
            # Aborted at once, so that the peers learn of it.
            self._sever(where, str(ended))
            raise
        self._life.end(transfer)
        transfer.batches = []
        return transfer.complete()

    def progress(self) -> None:
        """Launch what waits for NCCL to take it; a failure is kept for `wait`."""
        connection, life = self._connection, self._life
        if connection is None or self._failure is not None or life.is_poisoned or life.is_closed:
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
        transfer = LayerTransfer.own(handle, NAME)
        if transfer.receipt is not None:
            return True
        self.progress()
        drained = all(batch.done for batch in transfer.batches)
        if drained:
            transfer.complete()
            transfer.batches = []
        else:
            self._sever(f"layer {transfer.layer}, phase abort", reason)
        self._life.end(transfer)
        return drained

    def connected(self) -> bool:
        """Say so at once: `exchange_metadata` returns when every pair has met."""
        return self._life.is_connected

    def close(self, force: bool = False) -> bool:
        """Free the communicator; abort it when forced, after a failure, or with something in flight.

        Returns
        -------
        bool
            True when nothing writes landing memory any more.
        """
        connection, life = self._connection, self._life
        if life.close() and connection is not None:
            if force or life.in_flight or life.is_poisoned or self._failure is not None:
                self._sever("close", "the backend was closed")
            else:
                with suppress(NcclError):  # nothing is outstanding; what it could not free ends with the process
                    connection.close()
        if self._undrained and connection is not None:
            self._undrained = not connection.abort()
        if self._undrained:
            return False
        life.in_flight.clear()
        self._connection = self._buffers = self._stream = None
        return True

    # --- behind the hooks -----------------------------------------------------------------------------------------

    def _sever(self, where: str, reason: str) -> None:
        self._life.poison(where, reason)
        if self._connection is not None:
            self._undrained = not self._connection.abort()

    def _failed(self, error: NcclError, where: str) -> Exception:
        self._sever(where, str(error))
        return self._explained(error, where)

    def _explained(self, error: NcclError, where: str, peers: Iterable[int] = ()) -> Exception:
        """Say why NCCL failed: what it saw is often only what a death or an abort elsewhere did to it."""
        cancelled = self._context.cancelled()
        if cancelled is not None:
            return cancelled_error(NAME, cancelled, where)
        return failed_error(NAME, str(error), where, peers)
