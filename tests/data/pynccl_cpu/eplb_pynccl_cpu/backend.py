"""What depends on the device, for host memory and the fake device: a stream of the stub's, and no driver."""

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


class DeviceStubStream:
    """A stream of the fake device, with the stub's beside it that does what is queued for NCCL.

    On a real device both are one. Here whoever queues on the stub's waits first for what is queued on the device's, and
    what the stub does it does to device memory that a test has opened.
    """

    def __init__(self, stream) -> None:
        self._stub = StubStream()
        self._stream = stream

    @property
    def pointer(self):
        self._stream.synchronize()
        return self._stub.pointer

    def mark(self):
        return self._stub.mark()

    def reached(self, mark) -> bool:
        return self._stub.reached(mark)

    def copy_order(self):
        return self._stream


class CpuPyNcclBackend(PyNcclBackend):
    """pynccl over the stub."""

    @classmethod
    def device_facts(cls):
        return {"driver": "none: the stub moves host memory"}

    @classmethod
    def operation_stream(cls, context):
        return StubStream() if context.stream is None else DeviceStubStream(context.stream)
