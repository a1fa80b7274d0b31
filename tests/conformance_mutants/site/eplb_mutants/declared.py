"""Faults in what a backend says of itself."""

from __future__ import annotations

import os
import pickle
import struct
from typing import ClassVar

from eplb_good.backend import GoodBackend as Good
from eplb_good.metadata import ADDRESS
from pydantic import BaseModel

from eplb_core import hookimpl
from eplb_core.backend import ConnectReceipt, LocalMetadata, PeerMetadata
from eplb_core.errors import EplbError


class HeavyHooks(Good):
    pass


class UnknownDevice(Good):
    pass


class Undecorated(Good):
    def wait(self, handle, timeout_s):
        return super().wait(handle, timeout_s)


class NoAbort(Good):
    abort = None


class FailsWhenBuilt(Good):
    @hookimpl
    def register_buffers(self, buffers):
        return super().register_buffers(buffers.no_such_field)


class Loose(BaseModel, extra="allow"):
    pause_s: float = 1e-4


class LooseOptions(Good):
    pass


class OptionsOfItsOwn(Good):
    shared_options: ClassVar[dict] = {"seed": os.getpid()}


class AddressesOfRows(Good):
    @hookimpl
    def register_buffers(self, buffers):
        rows = [row.data_ptr() for layer in buffers.rows for tensor in layer for row in tensor]
        return LocalMetadata(super().register_buffers(buffers).payload + struct.pack(f"<{len(rows)}Q", *rows))

    @hookimpl
    def exchange_metadata(self, local, peers):
        return super().exchange_metadata(local, [PeerMetadata(p.rank, p.payload[: ADDRESS.size]) for p in peers])


class AcceptsAnything(Good):
    @hookimpl
    def exchange_metadata(self, local, peers):
        try:
            return super().exchange_metadata(local, peers)
        except EplbError:
            return ConnectReceipt(tuple(peer.rank for peer in peers))


class Pickles(Good):
    @hookimpl
    def register_buffers(self, buffers):
        return LocalMetadata(pickle.dumps(super().register_buffers(buffers).payload))

    @hookimpl
    def exchange_metadata(self, local, peers):
        return super().exchange_metadata(local, [PeerMetadata(p.rank, pickle.loads(p.payload)) for p in peers])
