"""Rows travel as values of the store; a faulty variant spoils what rank 1 does in the second layer."""

import os
import signal
import time

from eplb_core import hookimpl
from eplb_core.backend import ConnectReceipt, LocalMetadata, TransferReceipt
from eplb_core.errors import TransferError


class ThroughStore:
    landing_layout = "rows"
    landing_device = "weights"
    coalesce_nbytes = 0
    needs_progress = False
    shared_options = {}

    def __init__(self, options, context):
        self.context = context

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
        return plan

    @hookimpl
    def wait(self, handle, timeout_s):
        plan, receives = handle, handle.receives
        landing = self.buffers.landing[plan.slot].numpy()
        for i in range(len(receives)):
            key = self._key(plan, receives, i, receives.peer[i], self.context.rank)
            start, nbytes = int(receives.landing_offset[i]), int(receives.nbytes[i])
            deadline = time.monotonic() + timeout_s
            while not self.context.store.check([key]):
                if self.context.cancelled() or time.monotonic() > deadline:
                    raise TransferError("EPLB-T001", label="through_store", state="CANCELLED")
                time.sleep(0.001)
            landing[start : start + nbytes] = memoryview(self.context.store.get(key))
            self.context.store.delete_key(key)
        if plan.layer > 0 and self.context.rank == 1:
            self.spoil(landing, receives)
        return TransferReceipt(int(receives.nbytes.sum()), int(plan.sends.nbytes.sum()))

    def _key(self, plan, moves, i, src, dst):
        dst_row = moves.row[i] if dst == self.context.rank else moves.peer_row[i]
        return f"{plan.sequence}/{src}/{dst}/{moves.tensor[i]}/{dst_row}"

    def spoil(self, landing, receives):
        pass

    def progress(self):
        pass

    def abort(self, handle, reason):
        return True

    def close(self, force=False):
        pass


class FlipsAByte(ThroughStore):
    def spoil(self, landing, receives):
        landing[int(receives.landing_offset[0]) + 5] ^= 1


class KillsARank(ThroughStore):
    def spoil(self, landing, receives):
        os.kill(os.getpid(), signal.SIGKILL)


class Raises(ThroughStore):
    def spoil(self, landing, receives):
        raise TransferError("EPLB-T001", label="raises", state="BROKEN")


class Hangs(ThroughStore):
    def spoil(self, landing, receives):
        time.sleep(3600)
