"""Faults that show only when something else has failed."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from eplb_good.backend import GoodBackend as Good

from eplb_core import hookimpl
from eplb_core.backend import TransferReceipt
from eplb_core.backend.toolkit import Wait
from eplb_core.errors import EplbError, TransferError


class IgnoresItsLimit(Good):
    def await_rows(self, plan, peer, wait):
        super().await_rows(plan, peer, Wait(self.context, math.inf, label="unlimited", where="phase wait"))


class SwallowsErrors(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        try:
            return super().wait(handle, timeout_s)
        except EplbError:
            return TransferReceipt(0, 0)


class SwallowsInWait(Good):
    def await_rows(self, plan, peer, wait):
        with suppress(Exception):
            super().await_rows(plan, peer, wait)


class SwallowsCancelled(Good):
    def await_rows(self, plan, peer, wait):
        try:
            super().await_rows(plan, peer, wait)
        except TransferError:
            if not self.context.cancelled():
                raise


class BareErrors(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        try:
            return super().wait(handle, timeout_s)
        except EplbError as error:
            raise TimeoutError(str(error)) from error


class IgnoresCancelled(Good):
    def __init__(self, options, context):
        super().__init__(options, replace(context, cancelled=lambda: None))


class StaysBroken(Good):
    broken = False

    @hookimpl
    def transfer(self, plan):
        if self.broken:
            raise TransferError("EPLB-T001", label="broken", state="aborted")
        return super().transfer(plan)

    def abort(self, handle, reason):
        self.broken = True
        return True


class DrainsInName(Good):
    @hookimpl
    def transfer(self, plan):
        handle, receive = super().transfer(plan), super().wait
        threading.Thread(target=receive, args=(plan, 5.0), daemon=True).start()
        return handle


class SlowAbort(Good):
    def abort(self, handle, reason):
        time.sleep(3.0)
        return True


class CountsOnAbsentRanks(Good):
    @hookimpl
    def exchange_metadata(self, local, peers):
        self.context.store.set(f"here/{self.context.rank}", "1")
        everyone = [f"here/{rank}" for rank in range(self.context.world_size)]
        self.context.store.wait(everyone, timedelta(seconds=3))
        return super().exchange_metadata(local, peers)


class HangsOnClose(Good):
    def close(self, force=False):
        time.sleep(4.0)
        return super().close(force)


class ForgetsEarlierPeers(Good):
    @hookimpl
    def exchange_metadata(self, local, peers):
        for rank in set(self.files) - {self.context.rank}:
            os.close(self.files.pop(rank))
        return super().exchange_metadata(local, peers)
