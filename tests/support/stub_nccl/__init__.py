"""A stub ``libnccl.so.2`` compiled on first use: it moves bytes between processes, and fails or hangs when told to.

`build` returns the library's path; a process that loads it (`load`) before its NCCL bindings load theirs gets the stub,
for bindings take a library that is loaded already. What the stub does is described in ``stub_nccl.c``.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ENVIRONMENT = "EPLB_TEST_LIBNCCL"
"""Where ranks find the path of the stub."""

_SOURCE = Path(__file__).with_name("stub_nccl.c")
_FLAGS = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libnccl.so.2"]


def compiler() -> str | None:
    """Return a C compiler, if there is one."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


@functools.cache
def build() -> str:
    """Compile the stub once per source and compiler; return its path."""
    command = compiler()
    if command is None:
        raise RuntimeError("no C compiler")
    digest = hashlib.sha256(_SOURCE.read_bytes() + repr((command, _FLAGS)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"eplb-stub-nccl-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / "libnccl.so.2"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = folder / "partial"
            subprocess.run([command, *_FLAGS, "-o", str(partial), str(_SOURCE)], check=True, timeout=120)
            partial.rename(library)
    return str(library)


@functools.cache
def load() -> Any:
    """Load the stub that the environment names, or the built one, ahead of every NCCL binding of this process."""
    stub = ctypes.CDLL(os.environ.get(ENVIRONMENT) or build(), mode=ctypes.RTLD_GLOBAL)
    stub.stub_fault.argtypes = [ctypes.c_char_p]
    stub.stub_stream_create.restype = ctypes.c_void_p
    stub.stub_stream_mark.argtypes = [ctypes.c_void_p]
    stub.stub_stream_mark.restype = ctypes.c_uint64
    stub.stub_stream_done.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    stub.stub_stream_destroy.argtypes = [ctypes.c_void_p]
    return stub
