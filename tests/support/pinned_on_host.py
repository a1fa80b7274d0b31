"""CuPy's real pinned pool over ordinary host memory, where there is no driver that could lock pages.

CuPy's documented hook for it is `cupy.cuda.set_pinned_memory_allocator`: what is installed here is CuPy's own
`PinnedMemoryPool`, whose memory is a `PinnedMemory` that maps pages instead of asking CUDA for them. Where there is a
driver, nothing is installed and everything is page-locked.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from eplb_cupy.library import load_cupy, why_no_driver

sizes: list[int] = []
"""Bytes of every piece that the system gave, in order."""
held: dict[int, int] = {}
"""Bytes of those that it has not got back, by address."""
_installed: Any = None


def install() -> Any:
    """Give CuPy host memory, once per process, and return the pool; None where a driver makes that unnecessary."""
    global _installed
    if _installed is None and why_no_driver() is not None:
        cupy = load_cupy()
        kind = _kind(cupy)
        pool = cupy.cuda.PinnedMemoryPool(lambda nbytes: cupy.cuda.PinnedMemoryPointer(kind(nbytes), 0))
        cupy.cuda.set_pinned_memory_allocator(pool.malloc)
        _installed = pool
    return _installed


def _kind(cupy: Any) -> type:
    class HostMemory(cupy.cuda.PinnedMemory):  # type: ignore[misc]
        def __init__(self, size: int, flags: int = 0) -> None:
            self.size, self.ptr = size, 0
            self._pages = mmap.mmap(-1, size)
            self._window = ctypes.c_char.from_buffer(self._pages)
            self.ptr = ctypes.addressof(self._window)
            sizes.append(size)
            held[self.ptr] = size

        def __del__(self) -> None:
            if self.ptr:
                held.pop(self.ptr, None)
                del self._window
                self._pages.close()

    return HostMemory
