"""The ``nixl`` backend: this rank reads what it needs from its peers' registered memory into landing memory."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
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
from eplb_core.backend.toolkit import Backoff, Lifecycle, Wait
from eplb_core.errors import MetadataError, TransferError
from eplb_nixl.agent import Agent
from eplb_nixl.descriptors import RowIndex
from eplb_nixl.exposure import Exposure, expose
from eplb_nixl.flight import Flight
from eplb_nixl.guard import Guard, make_immortal
from eplb_nixl.hooks import LABEL
from eplb_nixl.landing import Landing
from eplb_nixl.library import NixlError, load_library
from eplb_nixl.memory import RegisteredMemory
from eplb_nixl.options import NixlOptions
from eplb_nixl.probe import probe
from eplb_nixl.sources import Sources, agent_name_prefix
from eplb_nixl.transfer import FAILED, LayerTransfer, raise_failure
from eplb_nixl.transport import restriction

logger = logging.getLogger(__name__)

ABORT_LIMIT_S = 0.5
FIRST_PAUSE_S = 2e-5


class NixlBackend:
    """Moves rows by one NIXL READ per source peer and layer.

    Thread rule: every method takes the agent's one lock for as long as it touches NIXL or the backend's state, so any
    thread may call any method; `wait` and `abort` sleep outside it.

    Parameters
    ----------
    options : NixlOptions or None
        None takes the defaults.
    context : BackendContext
        See `eplb_core.backend.BackendContext`.
    """

    landing_layout: ClassVar[Literal["rows", "packed_by_peer"]] = "rows"
    landing_device: ClassVar[Literal["weights", "host"]] = "weights"
    coalesce_nbytes: ClassVar[int] = 0
    needs_progress: ClassVar[bool] = True
    row_lists: ClassVar[bool] = True

    def __init__(self, options: NixlOptions | None, context: BackendContext) -> None:
        self._options = options or NixlOptions()
        self._context = context
        self._guard = Guard(context.cancelled)
        self._life: Lifecycle[LayerTransfer] = Lifecycle(context, LABEL)
        self._flight: Flight | None = None
        prefix = agent_name_prefix(context.name, context.rank)
        try:
            self._agent = Agent(
                load_library(),
                prefix + secrets.token_hex(8),
                backends=self._options.backends,
                num_threads=self._options.num_threads,
                progress_thread=self._options.progress_thread == "on",
                transport=restriction(self._options.require_transport),
            )
        except NixlError as error:
            raise self._trouble("building the nixl backend", error) from error

    @classmethod
    def probe(cls, options: NixlOptions | None) -> Mapping[str, str]:
        """Import NIXL and try it; see `eplb_nixl.probe.probe`."""
        return probe(options or NixlOptions())

    @property
    def shared_options(self) -> Mapping[str, str | int | float | bool]:
        """Options that must be equal on all ranks: those without which agents cannot talk to one another."""
        return {
            "backends": ",".join(self._options.backends),
            "require_transport": ",".join(self._options.require_transport),
        }

    @property
    def exposure(self) -> Exposure | None:
        """How peers read from this rank, and why so; None before `register_buffers` and after `close`."""
        return None if self._flight is None else self._flight.exposure

    @hookimpl
    def register_buffers(self, buffers: Buffers) -> LocalMetadata:
        with self._agent.lock:
            self._life.registering()
            nbytes = [[rows.shape[1] for rows in layer] for layer in buffers.rows]
            index = RowIndex.of(nbytes, [len(layer[0]) for layer in buffers.rows])
            landing = Landing(self._agent, buffers)
            try:
                exposure = expose(self._agent, self._context, self._options.mode, buffers, landing)
            except NixlError as error:
                raise self._trouble("registering memory", error) from error
            sources = Sources(self._agent, self._context, index, exposure.warm_up)
            self._guard.memory = RegisteredMemory(buffers)
            self._flight = Flight(
                self._agent,
                self._context,
                self._guard,
                self._life,
                landing=landing,
                exposure=exposure,
                sources=sources,
            )
            return LocalMetadata(exposure.record.to_bytes())

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        with self._agent.lock:
            self._life.connecting()
            sources = self._registered("connecting").sources
            records = [(peer.rank, sources.accept(peer)) for peer in peers]
            for rank, record in records:
                try:
                    sources.connect(rank, record)
                except NixlError as error:
                    raise self._trouble(f"connecting to rank {rank}", error) from error
            self._life.connected()
            return ConnectReceipt(tuple(rank for rank, _ in records))

    def connected(self) -> bool:
        """Say whether every peer given to `exchange_metadata` has answered the first READ.

        Returns
        -------
        bool
            False while some have not; the core pumps `progress` on every rank and asks again.

        Raises
        ------
        TransferError
            EPLB-T001, when a first READ failed.
        """
        with self._agent.lock:
            if self._flight is None:
                return True
            warm_up = self._flight.exposure.warm_up
            if self._guard.may_progress():
                warm_up.advance()
            for rank, words in warm_up.failures.items():
                detail = f"while rank {self._context.rank} connected to rank {rank}: {words}"
                raise TransferError("EPLB-T001", label=LABEL, state=FAILED, detail=detail)
            return not warm_up.waiting_for

    @hookimpl
    def transfer(self, plan: TransferPlan) -> LayerTransfer:
        with self._agent.lock:
            self._life.starting(plan.slot)
            where = f"layer {plan.layer}, phase transfer"
            flight = self._registered(where)
            self._check_memory(plan.layer)
            if not self._guard.may_progress():
                raise self._trouble(where, "a peer is gone")
            try:
                return flight.start(plan)
            except NixlError as error:
                raise self._trouble(where, error) from error

    @hookimpl
    def wait(self, handle: object, timeout_s: float) -> TransferReceipt:
        transfer = LayerTransfer.own(handle, LABEL)
        where = f"layer {transfer.layer}, phase wait"
        backoff = Backoff(FIRST_PAUSE_S, self._options.poll_limit_s, 2.0, spin_s=self._options.spin_s)
        wait = Wait(self._context, timeout_s, label=LABEL, where=where, backoff=backoff)
        while True:
            with self._agent.lock:
                self._life.waiting(transfer)
                flight = self._registered(where)
                try:
                    if not transfer.is_complete and self._guard.may_progress():
                        flight.advance(transfer)
                except NixlError as error:
                    raise self._trouble(where, error) from error
                if transfer.is_complete:
                    flight.finish(transfer)
                    return transfer.complete()
                raise_failure(transfer, self._context.rank)
                self._check_memory()
                pending = transfer.pending
            wait.pause(pending)

    def progress(self) -> None:
        """Let READs and notifications move on, here and, over transports without one-sided READs, at the readers.

        Does nothing once a peer, or registered memory, is gone; `eplb_nixl.guard` says why.
        """
        with self._agent.lock:
            flight = self._flight
            if flight is None or self._life.is_poisoned or not self._guard.may_progress():
                return
            try:
                flight.sources.take_announcements()
            except NixlError as error:
                raise self._trouble("making progress", error) from error
            flight.exposure.warm_up.advance()
            for transfer in self._life.in_flight.values():
                flight.push(transfer)

    def abort(self, handle: object, reason: str) -> bool:
        """Stop a transfer: nothing more is posted, and what was posted gets half a second to end.

        Returns
        -------
        bool
            True when every READ is known to be over or was never posted. Otherwise landing memory may still be written
            (giving a request back does not stop it), and this backend, its agent and that memory are kept for the life
            of the process.
        """
        transfer, flight = LayerTransfer.own(handle, LABEL), self._flight
        if flight is not None:
            flight.settle(transfer, ABORT_LIMIT_S, self._options.poll_limit_s)
        if not transfer.drained:
            self._quarantine(f"READs of layer {transfer.layer} could not be drained: {reason}")
        return bool(transfer.drained)

    def close(self, force: bool = False) -> bool:
        """Give everything back; without waiting for peers, forced or not, for reading is one-sided.

        A READ that nobody waited for gets half a second first, unless forced. In a forked child nothing is done: what
        there is belongs to the parent.

        Returns
        -------
        bool
            True when landing memory is certainly not written any more; False when it is quarantined.
        """
        self._life.close()
        if self._agent.is_inherited:
            return True
        flight = self._flight
        if flight is not None:
            for transfer in list(self._life.in_flight.values()):
                if not flight.settle(transfer, 0.0 if force else ABORT_LIMIT_S, self._options.poll_limit_s):
                    self._quarantine(f"it was closed with READs of layer {transfer.layer} in flight")
        with self._agent.lock:
            if flight is not None and flight.exposure.warm_up.waiting_for:
                # Giving a first READ back makes progress, and ends this process when the peer's agent has ended by
                # then, as it has when it gave the connect up too. So the agent stays as it is, never asked again, with
                # what first READs write; landing memory has nothing to do with them.
                make_immortal(self)
                return not self._life.is_poisoned
            if self._life.is_poisoned:
                return False
            self._agent.close()
            if flight is not None and flight.exposure.outbox is not None:
                flight.exposure.outbox.release()
            # Memory is let go last: while there is an agent, a peer's late request may still be served from it.
            self._flight = self._guard.memory = None
            return True

    # --- behind the hooks -----------------------------------------------------------------------------------------

    def _registered(self, where: str) -> Flight:
        if self._flight is None:
            raise self._trouble(where, "nothing is registered, or the backend is closed")
        return self._flight

    def _check_memory(self, layer: int | None = None) -> None:
        """Raise when memory was taken away: of one layer's rows, looked at now, or of any, as far as is known."""
        memory = self._guard.memory
        if memory is not None and (memory.missing or (layer is not None and not memory.layer_is_there(layer))):
            problem = "the memory that was registered was given back, or the tensor was resized, since"
            raise MetadataError("EPLB-M001", key=memory.missing, problem=problem)

    def _quarantine(self, why: str) -> None:
        with self._agent.lock:
            if not self._life.is_poisoned:
                self._life.poison("an abort or close with READs in flight", why)
                make_immortal(self)
                logger.warning(
                    "nixl rank %d keeps its landing memory until the process ends: %s", self._context.rank, why
                )

    def _trouble(self, where: str, reason: object) -> TransferError:
        return TransferError("EPLB-T007", rank=self._context.rank, where=where, reason=str(reason))
