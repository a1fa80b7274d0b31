"""What depends on the device, for host memory: a stream of the stub's, and no driver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref

from eplb_pynccl.backend import PyNcclBackend

# Before any binding loads NCCL: they take a library that is there already.
stub = ctypes.CDLL(os.environ["EPLB_TEST_LIBNCCL"], mode=ctypes.RTLD_GLOBAL)
stub.stub_stream_create.restype = ctypes.c_void_p
stub.stub_stream_mark.argtypes = [ctypes.c_void_p]
stub.stub_stream_mark.restype = ctypes.c_uint64
stub.stub_stream_done.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
stub.stub_stream_destroy.argtypes = [ctypes.c_void_p]


class StubStream:
    """See `eplb_pynccl.streams.OperationStream`."""

    def __init__(self) -> None:
        self.pointer = stub.stub_stream_create()
        weakref.finalize(self, stub.stub_stream_destroy, self.pointer)

    def mark(self):
        return stub.stub_stream_mark(self.pointer)

    def reached(self, mark) -> bool:
        return bool(stub.stub_stream_done(self.pointer, mark))

    def copy_order(self):
        return contextlib.nullcontext()


class CpuPyNcclBackend(PyNcclBackend):
    """pynccl over the stub."""

    @classmethod
    def device_facts(cls):
        return {"driver": "none: the stub moves host memory"}

    @classmethod
    def operation_stream(cls, context):
        return StubStream()
