"""Rows travel as values of the store; what is in flight at `abort` or `close` may still be written, it says."""

import time

from eplb_core import hookimpl
from eplb_core.backend import ConnectReceipt, LocalMetadata, TransferReceipt
from eplb_core.errors import TransferError


class Lingering:
    landing_layout = "rows"
    landing_device = "weights"
    coalesce_nbytes = 0
    needs_progress = True
    shared_options = {}

    fails_while_draining = False
    """Set by a test in the process of a rank: `abort` says that all is well, and `progress` raises after it."""

    breaks_down = False
    """Set likewise: `progress` raises from now on."""

    def __init__(self, options, context):
        self.context = context
        self.in_flight = {}
        self.lingers = False

    @classmethod
    def probe(cls, options):
        return {"moves rows": "through the store"}

    @hookimpl
    def register_buffers(self, buffers):
        self.buffers = buffers
        return LocalMetadata(b"")

    @hookimpl
    def exchange_metadata(self, local, peers):
        return ConnectReceipt(tuple(peer.rank for peer in peers))

    @hookimpl
    def transfer(self, plan):
        sends, rows = plan.sends, self.buffers.rows[plan.layer]
        for i in range(len(sends)):
            row = rows[sends.tensor[i]][sends.row[i]].numpy().tobytes()
            self.context.store.set(self._key(plan, sends, i, self.context.rank, sends.peer[i]), row)
        self.in_flight[plan.slot] = plan
        return plan

    @hookimpl
    def wait(self, handle, timeout_s):
        plan, receives = handle, handle.receives
        until = time.monotonic() + timeout_s
        for i in range(len(receives)):
            key = self._key(plan, receives, i, receives.peer[i], self.context.rank)
            while not self.context.store.check([key]):
                if self.context.cancelled() or time.monotonic() > until:
                    raise TransferError("EPLB-T001", label="lingering", state="CANCELLED")
                time.sleep(0.001)
            self._landing(plan, i)[:] = memoryview(self.context.store.get(key))
            self.context.store.delete_key(key)
        self.in_flight.pop(plan.slot, None)
        return TransferReceipt(int(receives.nbytes.sum()), int(plan.sends.nbytes.sum()))

    def progress(self):
        if self.breaks_down or (self.lingers and self.fails_while_draining):
            raise RuntimeError("the driver is gone")

    def abort(self, handle, reason):
        if self.in_flight.pop(handle.slot, None) is not None:
            self.lingers = True
        return self.fails_while_draining or not self.lingers

    def close(self, force=False):
        return not (self.lingers or self.in_flight)

    def _landing(self, plan, i):
        receives = plan.receives
        if self.buffers.landing_rows is not None:
            return self.buffers.landing_rows[plan.slot][receives.tensor[i]][receives.row[i]].numpy()
        start = int(receives.landing_offset[i])
        return self.buffers.landing[plan.slot][start : start + int(receives.nbytes[i])].numpy()

    def _key(self, plan, moves, i, src, dst):
        to = moves.row[i] if dst == self.context.rank else moves.peer_row[i]
        return f"{plan.generation}/{plan.layer}/{src}/{dst}/{moves.tensor[i]}/{to}"
