"""Faults in what is complete when a hook returns, and in what a hook leaves alone."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import replace

from eplb_good.backend import GoodBackend as Good

from eplb_core import hookimpl


class TransferWaits(Good):
    @hookimpl
    def transfer(self, plan):
        super().transfer(plan)
        super().wait(plan, 5.0)
        return plan


class NoHandle(Good):
    @hookimpl
    def transfer(self, plan):
        super().transfer(plan)


class ReturnsEarly(Good):
    @hookimpl
    def register_buffers(self, buffers):
        local = super().register_buffers(buffers)
        os.ftruncate(self.own, len(buffers.landing) * self.slot_nbytes)  # what is not there yet reads as zeros
        return local

    def await_rows(self, plan, peer, wait):
        pass


class OneLandingSlot(Good):
    @hookimpl
    def register_buffers(self, buffers):
        return super().register_buffers(replace(buffers, landing=[buffers.landing[0]] * len(buffers.landing)))


class LandsInLiveRows(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        receipt, moves = super().wait(handle, timeout_s), handle.receives
        columns = (moves.tensor, moves.row, moves.landing_offset, moves.nbytes)
        for tensor, row, offset, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            landed = self.buffers.landing[handle.slot][offset : offset + nbytes]
            self.buffers.rows[handle.layer][tensor][row].copy_(landed)
        return receipt


class WritesThePlan(Good):
    @hookimpl
    def transfer(self, plan):
        plan.sends.row.setflags(write=True)
        plan.sends.row.sort()
        return super().transfer(plan)


def for_a_while(action):
    """Repeat an action for a second and a half in a thread."""

    def work():
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            time.sleep(0.02)
            with suppress(OSError, KeyError, IndexError):  # closed meanwhile
                action()

    threading.Thread(target=work, daemon=True).start()


class LandsAgain(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        receipt, again = super().wait(handle, timeout_s), super().wait
        for_a_while(lambda: again(handle, 1.0))
        return receipt


class ReadsAfterWait(Good):
    @hookimpl
    def transfer(self, plan):
        again = super().transfer
        for_a_while(lambda: again(plan))
        return again(plan)

    @hookimpl
    def wait(self, handle, timeout_s):
        receipt, again = super().wait(handle, timeout_s), super().wait
        for_a_while(lambda: again(handle, 1.0))
        return receipt


class SlowProgress(Good):
    def progress(self):
        time.sleep(0.3)
