"""Faults in which bytes arrive, and where."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from eplb_good.backend import GoodBackend as Good
from eplb_good.transfer import READY

from eplb_core import hookimpl
from eplb_core.backend import PeerMetadata, RowList, TransferReceipt
from eplb_mutants.altered import reading_elsewhere, receiving


class ShortCopy(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        return super().wait(receiving(handle, nbytes=handle.receives.nbytes - 1), timeout_s)


class WrongRow(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        return super().wait(receiving(handle, peer_row=handle.receives.peer_row[::-1]), timeout_s)


class WrongLayer(Good):
    @hookimpl
    def transfer(self, plan):
        rows = self.buffers.rows
        return reading_elsewhere(self, plan, rows[1:] + rows[:1])


class SwappedTensors(Good):
    @hookimpl
    def transfer(self, plan):
        return reading_elsewhere(self, plan, [layer[::-1] for layer in self.buffers.rows])


class ConvertsDtype(Good):
    @hookimpl
    def transfer(self, plan):
        def converted(rows):
            if rows.shape[1] % 4 or not rows.numel():
                return rows
            return torch.nan_to_num(rows.view(torch.float32)).view(torch.uint8)

        return reading_elsewhere(self, plan, [[converted(rows) for rows in layer] for layer in self.buffers.rows])


class CountsFromABase(Good):
    row_lists = True

    @hookimpl
    def transfer(self, plan):
        def from_the_first(rows):
            return torch.stack([rows[0]] * len(rows)) if isinstance(rows, RowList) else rows

        return reading_elsewhere(self, plan, [[from_the_first(rows) for rows in layer] for layer in self.buffers.rows])


class SkipsScalars(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        return super().wait(receiving(handle, handle.receives.nbytes >= 8), timeout_s)


class ForgetsEmptyTensors(Good):
    @hookimpl
    def register_buffers(self, buffers):
        rows = [[tensor for tensor in layer if tensor.numel()] for layer in buffers.rows]
        return super().register_buffers(replace(buffers, rows=rows))


class ServesOnePeer(Good):
    @hookimpl
    def transfer(self, plan):
        sends = plan.sends
        receivers = dict(
            zip(zip(sends.tensor.tolist(), sends.row.tolist(), strict=True), sends.peer.tolist(), strict=True)
        )
        for (tensor, row), self.receiver in receivers.items():
            os.pwrite(self.own, self.buffers.rows[plan.layer][tensor][row].numpy(), self.place(plan, tensor, row))
        self.receiver = self.context.rank
        os.pwrite(self.own, READY.pack(plan.generation, plan.layer), plan.slot * self.slot_nbytes)
        return plan

    def place(self, plan, tensor, row):
        return super().place(plan, tensor, row) + (1 + self.receiver << 32)


class ExpectsEverySlot(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        moves = handle.receives
        sizes = [rows.numel() for rows in self.buffers.rows[handle.layer]]
        starts = np.cumsum([0, *sizes])[moves.tensor]
        return super().wait(receiving(handle, landing_offset=starts + moves.row * moves.nbytes), timeout_s)


class MergesSources(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        moves = handle.receives
        first = np.unique(moves.tensor * 4096 + moves.peer_row, return_index=True)[1]
        return super().wait(receiving(handle, np.sort(first)), timeout_s)


class CutsLargeRows(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        return super().wait(receiving(handle, nbytes=np.minimum(handle.receives.nbytes, 1 << 20)), timeout_s)


class CutsLongLists(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        return super().wait(receiving(handle, slice(1024)), timeout_s)


class CountsItsOwnMoves(Good):
    count = 0

    @hookimpl
    def transfer(self, plan):
        self.count += bool(len(plan.sends) + len(plan.receives))
        return super().transfer(replace(plan, generation=self.count, layer=plan.layer))


class EmptyReceipts(Good):
    @hookimpl
    def wait(self, handle, timeout_s):
        super().wait(handle, timeout_s)
        return TransferReceipt(0, 0)


class IgnoresOwnLanding(Good):
    landing_layout = "rows"


class KeepsOldRows(Good):
    @hookimpl
    def transfer(self, plan):
        if not hasattr(self, "first"):
            self.first = [[rows.clone() for rows in layer] for layer in self.buffers.rows]
        return reading_elsewhere(self, plan, self.first)


class SharesFiles(Good):
    shared: ClassVar[dict] = {}

    def __init__(self, options, context):
        super().__init__(options, context)
        self.files = self.shared


class RemembersAddresses(Good):
    known: ClassVar[dict] = {}

    @hookimpl
    def exchange_metadata(self, local, peers):
        peers = [PeerMetadata(peer.rank, self.known.setdefault(peer.rank, peer.payload)) for peer in peers]
        return super().exchange_metadata(local, peers)
