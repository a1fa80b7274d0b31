"""nccl4py's raw layer as a `Binding`. The only module that imports nccl4py."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from eplb_pynccl.binding import IN_PROGRESS, UNIQUE_ID_NBYTES, NcclError
from eplb_pynccl.presence import INSTALL_HINT

_SERIES = "0.6."
_UINT8 = 1


class Nccl4py:
    """See `eplb_pynccl.binding.Binding`.

    Parameters
    ----------
    raw : module
        ``nccl.bindings.nccl``.
    distribution_version : str
        Version of nccl4py.
    """

    nonblocking = True

    def __init__(self, raw: Any, distribution_version: str) -> None:
        self.name = f"nccl4py {distribution_version}"
        self._raw = raw
        # RuntimeError and OSError: the library, or one of its functions, is not found when it is first needed.
        self._errors = (raw.NCCLError, RuntimeError, OSError)

    def version(self) -> int:
        return int(self._call("get_version"))

    def library_path(self) -> str:
        return str(self._call("get_library_path"))

    def unique_id(self) -> bytes:
        return bytes(self._call("get_unique_id"))

    def init(self, size: int, unique_id: bytes, rank: int) -> Any:
        config = self._raw.Config()
        config.blocking = 0
        if len(unique_id) != UNIQUE_ID_NBYTES:
            raise NcclError(f"a unique id has {UNIQUE_ID_NBYTES} bytes, not {len(unique_id)}")
        identity = self._raw.UniqueId.from_buffer(bytearray(unique_id))
        return self._call("comm_init_rank_config", size, identity, rank, config)

    def in_progress(self, communicator: Any) -> bool:
        state = int(self._call("comm_get_async_error", communicator))
        if state not in (0, IN_PROGRESS):
            raise NcclError(f"{self._raw.Result(state).name} ({state}): {self._call('get_error_string', state)}")
        return state == IN_PROGRESS

    def group_start(self) -> None:
        self._call("group_start")

    def group_end(self) -> None:
        self._call("group_end")

    def send(self, communicator: Any, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._call("send", address, nbytes, _UINT8, peer, communicator, stream)

    def receive(self, communicator: Any, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._call("recv", address, nbytes, _UINT8, peer, communicator, stream)

    def finalize(self, communicator: Any) -> None:
        self._call("comm_finalize", communicator)

    def destroy(self, communicator: Any) -> None:
        self._call("comm_destroy", communicator)

    def abort(self, communicator: Any) -> None:
        self._call("comm_abort", communicator)

    def _call(self, function: str, *arguments: Any) -> Any:
        # The raw layer takes ncclInProgress for success, which is what a communicator that does not block needs.
        try:
            return getattr(self._raw, function)(*arguments)
        except self._errors as error:
            raise NcclError(str(error)) from error


def load() -> Nccl4py:
    """Import nccl4py and let it find NCCL.

    Raises
    ------
    NcclError
        It is not installed, has another version, or finds no NCCL.
    """
    try:
        from nccl.bindings import nccl as raw
    except (ImportError, OSError, RuntimeError) as error:
        raise NcclError(f"nccl4py does not load: {error}: {INSTALL_HINT}") from error
    try:
        installed = version("nccl4py")
    except PackageNotFoundError:
        installed = "unknown"
    if not installed.startswith(_SERIES):
        raise NcclError(f"nccl4py {installed} is not supported: pip install 'nccl4py~={_SERIES}0'")
    binding = Nccl4py(raw, installed)
    try:
        binding.version()
    except NcclError as error:
        raise NcclError(f"NCCL does not load: {error}: {INSTALL_HINT}") from error
    return binding
