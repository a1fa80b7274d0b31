"""Transfers on their way: started from a plan, moved on as sources announce, settled when nothing is in flight."""

from __future__ import annotations

import time

import numpy as np

from eplb_core.backend import BackendContext, TransferPlan
from eplb_core.backend.toolkit import Deadline, Lifecycle
from eplb_nixl.agent import Agent
from eplb_nixl.announcements import Announcement
from eplb_nixl.descriptors import by_peer
from eplb_nixl.exposure import Exposure
from eplb_nixl.guard import Guard
from eplb_nixl.landing import Landing
from eplb_nixl.library import NixlError
from eplb_nixl.outbox import is_complete
from eplb_nixl.sources import Sources
from eplb_nixl.transfer import UNPOSTED, LayerTransfer, Read, give_back, poll, post_ready


class Flight:
    """The transfers of one backend, once its memory is registered. All but `settle` are called under the agent's lock.

    Parameters
    ----------
    agent : Agent
        Agent that reads.
    context : BackendContext
        This rank's context, with its epoch.
    guard : Guard
        Says whether NIXL may be touched.
    life : Lifecycle
        Where transfers in flight are noted.
    landing, exposure, sources : Landing, Exposure, Sources
        Where rows land, what peers read from here, and what is read from them.
    """

    def __init__(
        self,
        agent: Agent,
        context: BackendContext,
        guard: Guard,
        life: Lifecycle[LayerTransfer],
        *,
        landing: Landing,
        exposure: Exposure,
        sources: Sources,
    ) -> None:
        self._agent = agent
        self._context = context
        self._guard = guard
        self._life = life
        self._landing = landing
        self.exposure = exposure
        self.sources = sources

    def start(self, plan: TransferPlan) -> LayerTransfer:
        """Begin a plan's transfer; NixlError, with nothing in flight, where that cannot be."""
        transfer = LayerTransfer(plan)
        self._life.begin(transfer)
        try:
            if len(plan.receives):
                self._make_reads(transfer)
            outbox = self.exposure.outbox
            if outbox is not None and len(plan.sends):
                transfer.filled = outbox.fill(plan.layer, plan.slot, plan.sends)
                transfer.announce_to = np.unique(plan.sends.peer).tolist()
        except NixlError:
            self.finish(transfer)
            raise
        self.push(transfer)
        return transfer

    def push(self, transfer: LayerTransfer) -> None:
        """Start what can be started: announcements once the send buffer is filled, READs once theirs are in."""
        message = Announcement.of(transfer.plan, self._context.epoch).to_bytes()
        while transfer.announce_to and not transfer.unannounced and is_complete(transfer.filled):
            try:
                self.sources.notify(transfer.announce_to[-1], message)
            except NixlError as error:
                transfer.unannounced = str(error)
                return
            transfer.announce_to.pop()
        post_ready(self._agent, transfer, self._context.cancelled)

    def advance(self, transfer: LayerTransfer) -> None:
        """Take announcements, start what can be started, look at what is in flight."""
        if any(read.state == UNPOSTED for read in transfer.reads):
            self.sources.take_announcements()
        self.push(transfer)
        poll(self._agent, transfer)

    def settle(self, transfer: LayerTransfer, limit_s: float, pause_s: float) -> bool:
        """Finish a transfer as soon as nothing of it is in flight, nothing may be polled any more, or time is up.

        Returns
        -------
        bool
            Is nothing of it in flight, certainly?
        """
        deadline = Deadline(limit_s)
        while transfer.drained is None:
            with self._agent.lock:
                may_progress = self._guard.may_progress()
                if may_progress:
                    poll(self._agent, transfer)
                if not (may_progress and transfer.in_flight) or deadline.over:
                    self.finish(transfer)
                    break
            time.sleep(pause_s)
        return bool(transfer.drained)

    def finish(self, transfer: LayerTransfer) -> None:
        """Give back what is over, and count the transfer as ended."""
        give_back(self._agent, transfer)
        self._life.end(transfer)
        self.sources.forget(transfer.plan)

    def _make_reads(self, transfer: LayerTransfer) -> None:
        plan = transfer.plan
        local, local_rows = self._landing.rows(plan)
        # Every rank starts with the next one up, so that not all of them read from rank 0 first.
        rank, world_size = self._context.rank, self._context.world_size
        for peer, share in sorted(by_peer(plan.receives), key=lambda each: (each[0] - rank) % world_size):
            remote, remote_rows = self.sources.rows(peer, plan, share)
            handle = self._agent.make_read(local, local_rows[share], remote, remote_rows)
            transfer.reads.append(Read(peer, handle, share, self.sources.readiness(peer, plan)))
