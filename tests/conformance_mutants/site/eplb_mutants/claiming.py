"""Capabilities that are claimed and not there."""

from __future__ import annotations

import ctypes
import threading
from typing import ClassVar

import torch
from eplb_good.backend import GoodBackend as Good

from eplb_core import hookimpl
from eplb_core.errors import TransferError
from eplb_mutants.altered import reading_elsewhere, receiving


class BoundToAThread(Good):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.thread = threading.get_ident()

    @hookimpl
    def transfer(self, plan):
        if threading.get_ident() != self.thread:
            raise TransferError("EPLB-T001", label="bound", state="called from another thread")
        return super().transfer(plan)


class ChangesTorch(Good):
    @hookimpl
    def transfer(self, plan):
        torch.set_default_dtype(torch.float64)
        return super().transfer(plan)


class HoldsTheInterpreter(Good):
    def await_rows(self, plan, peer, wait):
        ctypes.PyDLL(None).usleep(600_000)  # unlike CDLL, PyDLL keeps the GIL
        super().await_rows(plan, peer, wait)


class ClaimsZeroCopy(Good):
    pass


class ReadsTooEarly(Good):
    @hookimpl
    def register_buffers(self, buffers):
        self.early = [[rows.clone() for rows in layer] for layer in buffers.rows]
        return super().register_buffers(buffers)

    @hookimpl
    def transfer(self, plan):
        return reading_elsewhere(self, plan, self.early)


class KnowsTheFirstRanks(Good):
    first: ClassVar[set] = set()

    @hookimpl
    def exchange_metadata(self, local, peers):
        if not self.first:
            self.first.update(peer.rank for peer in peers)
        strangers = [peer.rank for peer in peers if peer.rank not in self.first]
        if strangers:
            raise TransferError("EPLB-T001", label="first", state=f"ranks {strangers} came later")
        return super().exchange_metadata(local, peers)


class FirstBatchOnly(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        return super().wait(receiving(handle, handle.receives.batch == 0), timeout_s)
