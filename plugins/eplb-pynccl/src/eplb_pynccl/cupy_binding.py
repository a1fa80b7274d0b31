"""``cupy.cuda.nccl`` as a `Binding`, for machines that have CuPy and no nccl4py. The only module that imports CuPy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from eplb_pynccl.binding import NcclError
from eplb_pynccl.presence import INSTALL_HINT

_UINT8 = 1


class CupyNccl:
    """See `eplb_pynccl.binding.Binding`. CuPy's communicators block, in `init` and in `group_end`.

    Parameters
    ----------
    nccl : module
        ``cupy.cuda.nccl``.
    cupy_version : str
        Version of CuPy.
    """

    nonblocking = False

    def __init__(self, nccl: Any, cupy_version: str) -> None:
        self.name = f"cupy {cupy_version}"
        self._nccl = nccl

    def version(self) -> int:
        return int(self._nccl.get_version())

    def library_path(self) -> str:
        try:
            maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "unknown"
        paths = re.findall(r"\s(/\S*/libnccl\.so\S*)$", maps, re.MULTILINE)
        return paths[0] if paths else "unknown"

    def unique_id(self) -> bytes:
        return bytes(self._call(self._nccl.get_unique_id))

    def init(self, size: int, unique_id: bytes, rank: int) -> Any:
        return self._call(self._nccl.NcclCommunicator, size, unique_id, rank)

    def in_progress(self, communicator: Any) -> bool:
        self._call(communicator.check_async_error)  # raises what NCCL reports
        return False

    def group_start(self) -> None:
        self._call(self._nccl.groupStart)

    def group_end(self) -> None:
        self._call(self._nccl.groupEnd)

    def send(self, communicator: Any, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._call(communicator.send, address, nbytes, _UINT8, peer, stream)

    def receive(self, communicator: Any, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._call(communicator.recv, address, nbytes, _UINT8, peer, stream)

    def finalize(self, communicator: Any) -> None:
        pass  # CuPy has no such call; `destroy` flushes as well

    def destroy(self, communicator: Any) -> None:
        self._call(communicator.destroy)

    def abort(self, communicator: Any) -> None:
        self._call(communicator.abort)

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nccl.NcclError as error:
            raise NcclError(str(error)) from error


def load() -> CupyNccl:
    """Import CuPy's NCCL module.

    Raises
    ------
    NcclError
        CuPy is not installed, or found no NCCL.
    """
    try:
        import cupy
        from cupy.cuda import nccl
    except (ImportError, OSError, RuntimeError) as error:
        raise NcclError(f"neither nccl4py nor CuPy loads: {error}: {INSTALL_HINT}") from error
    if not nccl.available:
        raise NcclError(f"CuPy {cupy.__version__} found no NCCL: {INSTALL_HINT}")
    return CupyNccl(nccl, str(cupy.__version__))
