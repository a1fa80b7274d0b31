"""Faults that show only when a life, or a layer that was aborted, is followed by another one."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from dataclasses import replace

from eplb_good.backend import GoodBackend as Good

from eplb_core import hookimpl
from eplb_core.errors import EplbError, TransferError


class NamedTooEarly(Good):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.name = f"{context.name}/{context.epoch}"


class GreetsTooEarly(Good):
    @hookimpl
    def register_buffers(self, buffers):
        self.context.store.set(f"here/{self.context.rank}", "1")
        return super().register_buffers(buffers)


class CopiesItsContext(Good):
    def __init__(self, options, context):
        super().__init__(options, replace(context, timeout_s=context.timeout_s / 2))


class CountsItsTransfers(Good):
    count = 0

    @hookimpl
    def transfer(self, plan):
        self.count += 1
        return super().transfer(replace(plan, generation=self.count))


class FollowsTheLastSequence(Good):
    last = -1

    @hookimpl
    def transfer(self, plan):
        before, self.last = self.last, plan.sequence
        return super().transfer(replace(plan, generation=before))


class GoesOnBehind(Good):
    """Receives in a thread that neither `abort` nor `close` stops; says so at `abort`."""

    @hookimpl
    def transfer(self, plan):
        handle = super().transfer(plan)
        self.ended, self.error = threading.Event(), None
        self.thread = threading.Thread(target=self.receive, args=(plan,), daemon=True)
        self.thread.start()
        return handle

    def receive(self, plan):
        with suppress(EplbError):
            self.receipt = super().wait(plan, 5.0)
            self.ended.set()

    @hookimpl
    def wait(self, handle, timeout_s):
        if not self.ended.wait(timeout_s):
            raise TransferError("EPLB-T001", label="behind", state="its thread has not come back")
        return self.receipt

    def abort(self, handle, reason):
        return self.ended.is_set()

    def close(self, force=False):
        if self.thread.is_alive():
            return False
        return super().close(force)


class ClosesInName(GoesOnBehind):
    def close(self, force=False):
        super().close(force)
        return True


class ForgetsWhatItAborted(GoesOnBehind):
    in_flight = None

    @hookimpl
    def transfer(self, plan):
        self.in_flight = super().transfer(plan)
        return self.in_flight

    @hookimpl
    def wait(self, handle, timeout_s):
        receipt = super().wait(handle, timeout_s)
        self.in_flight = None
        return receipt

    def abort(self, handle, reason):
        self.in_flight = None
        return super().abort(handle, reason)

    def close(self, force=False):
        super().close(force)
        return self.in_flight is None


class ObeysSome(Good):
    """Leaves out what `cancelled()` returns unless `obeyed` says otherwise."""

    def await_rows(self, plan, peer, wait):
        context = self.context
        wait._context = replace(context, cancelled=lambda: self.obeyed(context.cancelled()))
        super().await_rows(plan, peer, wait)

    def obeyed(self, cancelled):
        return cancelled


class SearchesCancelled(ObeysSome):
    def obeyed(self, cancelled):
        return cancelled if cancelled and ("gone" in cancelled or "aborted" in cancelled) else None


class WantsARankInTheText(ObeysSome):
    def obeyed(self, cancelled):
        return cancelled if re.search(r"rank \d+", str(cancelled)) else None


class GoesOnWithTheLost(ObeysSome):
    def obeyed(self, cancelled):
        return None if cancelled and cancelled.peer_lost else cancelled
