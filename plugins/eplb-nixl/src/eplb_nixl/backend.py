"""The ``nixl`` backend: this rank reads what it needs from its peers' registered memory into landing memory."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
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
from eplb_core.errors import StalledError, TransferError
from eplb_nixl.agent import Agent
from eplb_nixl.descriptors import RowIndex, by_peer
from eplb_nixl.exposure import Exposure, expose
from eplb_nixl.guard import PeerWatch, make_immortal
from eplb_nixl.landing import Landing
from eplb_nixl.library import NixlError, load_library
from eplb_nixl.options import NixlOptions
from eplb_nixl.outbox import is_complete
from eplb_nixl.probe import probe
from eplb_nixl.sources import LABEL, Sources, agent_name_prefix
from eplb_nixl.transfers import FAILED, UNPOSTED, Read, Transfer, give_back, named, poll, post_ready
from eplb_nixl.transport import restriction
from eplb_nixl.wire import announcement

logger = logging.getLogger(__name__)

ABORT_LIMIT_S = 0.5
FIRST_SLEEP_S = 2e-5


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

    def __init__(self, options: NixlOptions | None, context: BackendContext) -> None:
        self._options = options or NixlOptions()
        self._context = context
        self._watch = PeerWatch(context.cancelled)
        self._landing: Landing | None = None
        self._exposure: Exposure | None = None
        self._sources: Sources | None = None
        self._in_flight: list[Transfer] = []
        self._is_quarantined = False
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
        """How peers read from this rank, and why so; None before `register_buffers`."""
        return self._exposure

    @hookimpl
    def register_buffers(self, buffers: Buffers) -> LocalMetadata:
        with self._agent.lock:
            index = RowIndex.of([[rows.shape[1] for rows in layer] for layer in buffers.rows], len(buffers.rows[0][0]))
            landing = Landing(self._agent, buffers)
            try:
                exposure = expose(self._agent, self._context, self._options.mode, buffers, landing)
            except NixlError as error:
                raise self._trouble("registering memory", error) from error
            self._landing, self._exposure = landing, exposure
            self._sources = Sources(self._agent, self._context, index, exposure.warm_up)
            return LocalMetadata(exposure.record.to_bytes())

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        with self._agent.lock:
            if self._sources is None:
                raise self._trouble("connecting", "register_buffers comes first")
            records = [(peer.rank, self._sources.accept(peer)) for peer in peers]
            for rank, record in records:
                try:
                    self._sources.connect(rank, record)
                except NixlError as error:
                    raise self._trouble(f"connecting to rank {rank}", error) from error
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
            if self._exposure is None:
                return True
            warm_up = self._exposure.warm_up
            if self._watch.may_progress():
                warm_up.advance()
            for rank, words in warm_up.failures.items():
                detail = f"while rank {self._context.rank} connected to rank {rank}: {words}"
                raise TransferError("EPLB-T001", label=LABEL, state=FAILED, detail=detail)
            return not warm_up.waiting_for

    @hookimpl
    def transfer(self, plan: TransferPlan) -> Transfer:
        with self._agent.lock:
            transfer = Transfer(plan, [])
            try:
                if not self._watch.may_progress():
                    raise NixlError("a peer is gone")
                if self._landing is None or self._exposure is None:
                    raise NixlError("nothing is registered, or the backend is closed")
                self._in_flight.append(transfer)
                if len(plan.receives):
                    self._make_reads(transfer, self._landing)
                if self._exposure.outbox is not None and len(plan.sends):
                    transfer.filled = self._exposure.outbox.fill(plan.layer, plan.slot, plan.sends)
                    transfer.announce_to = np.unique(plan.sends.peer).tolist()
            except NixlError as error:
                self._finish(transfer)
                raise self._trouble(f"starting the transfer of layer {plan.layer}", error) from error
            self._push(transfer)
            return transfer

    @hookimpl
    def wait(self, handle: Transfer, timeout_s: float) -> TransferReceipt:
        plan, start = handle.plan, time.monotonic()
        where = f"the nixl transfer of layer {plan.layer} (generation {plan.generation})"
        warned, sleep_s = False, FIRST_SLEEP_S
        while True:
            with self._agent.lock:
                if handle.drained is not None:
                    raise self._trouble(where, "the handle was waited for or aborted before")
                if not handle.is_complete and self._watch.may_progress():
                    self._advance(handle)
                if handle.is_complete:
                    self._finish(handle)
                    received, sent = int(plan.receives.nbytes.sum()), int(plan.sends.nbytes.sum())
                    return TransferReceipt(nbytes_received=received, nbytes_sent=sent)
                self._raise_failure(handle)
                peers = named(handle.pending)
            reason = self._context.cancelled()
            if reason is not None:
                detail = f"in {where}, while rank {self._context.rank} waited for {peers}: {reason}"
                raise TransferError("EPLB-T001", label=LABEL, state="cancelled", detail=detail)
            elapsed_s = time.monotonic() - start
            if elapsed_s >= timeout_s:
                raise StalledError("EPLB-T002", seconds=elapsed_s, where=where, waiting_for=peers)
            if not warned and elapsed_s >= timeout_s / 2:
                warned = True
                rank = self._context.rank
                logger.warning("rank %d has waited %.1f s for %s, in %s", rank, elapsed_s, peers, where)
            if elapsed_s >= self._options.spin_s:
                time.sleep(min(sleep_s, timeout_s - elapsed_s))
                sleep_s = min(2 * sleep_s, self._options.poll_limit_s)

    def progress(self) -> None:
        """Let READs and notifications move on, here and, over transports without one-sided READs, at the readers.

        Does nothing once a peer is gone; `eplb_nixl.guard` says why.
        """
        with self._agent.lock:
            if self._sources is None or self._exposure is None or self._is_quarantined:
                return
            if not self._watch.may_progress():
                return
            try:
                self._sources.take_announcements()
            except NixlError as error:
                raise self._trouble("making progress", error) from error
            self._exposure.warm_up.advance()
            for transfer in self._in_flight:
                self._push(transfer)

    def abort(self, handle: Transfer, reason: str) -> bool:
        """Stop a transfer: nothing more is posted, and what was posted gets half a second to end.

        Returns
        -------
        bool
            True when every READ is known to be over or was never posted. Otherwise landing memory may still be written
            (giving a request back does not stop it), and this backend, its agent and that memory are kept for the life
            of the process.
        """
        self._settle(handle, ABORT_LIMIT_S)
        if not handle.drained:
            self._quarantine(f"READs of layer {handle.plan.layer} could not be drained: {reason}")
        return bool(handle.drained)

    def close(self, force: bool = False) -> bool:
        """Give everything back; without waiting for peers, forced or not, for reading is one-sided.

        A READ that nobody waited for gets half a second first, unless forced.

        Returns
        -------
        bool
            True when landing memory is certainly not written any more; False when it is quarantined.
        """
        for transfer in list(self._in_flight):
            self._settle(transfer, 0.0 if force else ABORT_LIMIT_S)
            if not transfer.drained:
                self._quarantine(f"it was closed with READs of layer {transfer.plan.layer} in flight")
        with self._agent.lock:
            warm_up = self._exposure.warm_up if self._exposure is not None else None
            if warm_up is not None and warm_up.waiting_for and not self._watch.may_progress():
                self._quarantine("a peer died while connections were made")
            if self._is_quarantined:
                return False
            self._agent.close()
            if self._exposure is not None and self._exposure.outbox is not None:
                self._exposure.outbox.release()
            # Memory is let go last: while there is an agent, a peer's late request may still be served from it.
            self._landing = self._exposure = self._sources = None
            return True

    def _make_reads(self, transfer: Transfer, landing: Landing) -> None:
        plan = transfer.plan
        local, local_rows = landing.rows(plan)
        # Every rank starts with the next one up, so that not all of them read from rank 0 first.
        rank, world_size = self._context.rank, self._context.world_size
        for peer, share in sorted(by_peer(plan.receives), key=lambda each: (each[0] - rank) % world_size):
            sources = self._connected_sources()
            remote, remote_rows = sources.rows(peer, plan, share)
            handle = self._agent.make_read(local, local_rows[share], remote, remote_rows)
            transfer.reads.append(Read(peer, handle, share, sources.readiness(peer, plan.sequence)))

    def _connected_sources(self) -> Sources:
        if self._sources is None:
            raise NixlError("the backend is closed")
        return self._sources

    def _push(self, transfer: Transfer) -> None:
        """Start what can be started: announcements once the send buffer is filled, READs once theirs are in."""
        while transfer.announce_to and not transfer.unannounced and is_complete(transfer.filled):
            try:
                message = announcement(self._context.epoch, transfer.plan.sequence)
                self._connected_sources().notify(transfer.announce_to[-1], message)
            except NixlError as error:
                transfer.unannounced = str(error)
                return
            transfer.announce_to.pop()
        post_ready(self._agent, transfer, self._context.cancelled)

    def _advance(self, transfer: Transfer) -> None:
        if any(read.state == UNPOSTED for read in transfer.reads):
            try:
                self._connected_sources().take_announcements()
            except NixlError as error:
                raise self._trouble(f"waiting for announcements of layer {transfer.plan.layer}", error) from error
        self._push(transfer)
        poll(self._agent, transfer)

    def _settle(self, transfer: Transfer, limit_s: float) -> None:
        """Finish a transfer as soon as nothing of it is in flight, nothing may be polled any more, or time is up."""
        limit = time.monotonic() + limit_s
        while transfer.drained is None:
            with self._agent.lock:
                may_progress = self._watch.may_progress()
                if may_progress:
                    poll(self._agent, transfer)
                if not (may_progress and transfer.in_flight) or time.monotonic() >= limit:
                    self._finish(transfer)
                    return
            time.sleep(self._options.poll_limit_s)

    def _finish(self, transfer: Transfer) -> None:
        give_back(self._agent, transfer)
        if transfer in self._in_flight:
            self._in_flight.remove(transfer)
        if self._sources is not None:
            self._sources.forget(transfer.plan.sequence)

    def _quarantine(self, why: str) -> None:
        with self._agent.lock:
            if not self._is_quarantined:
                self._is_quarantined = True
                make_immortal(self)
                logger.warning(
                    "nixl rank %d keeps its landing memory until the process ends: %s", self._context.rank, why
                )

    def _raise_failure(self, transfer: Transfer) -> None:
        read = transfer.failed
        layer = transfer.plan.layer
        if read is not None:
            detail = (
                f"reading layer {layer} from rank {read.peer}, keys {transfer.keys(read)}, "
                f"on rank {self._context.rank}: {read.words or 'NIXL gives no text'}"
            )
            raise TransferError("EPLB-T001", label=LABEL, state=read.state, detail=detail)
        if transfer.unannounced:
            peer = transfer.announce_to[-1]
            detail = f"telling rank {peer} that layer {layer} can be read: {transfer.unannounced}"
            raise TransferError("EPLB-T001", label=LABEL, state=FAILED, detail=detail)

    def _trouble(self, where: str, reason: object) -> TransferError:
        return TransferError("EPLB-T007", rank=self._context.rank, where=where, reason=str(reason))
