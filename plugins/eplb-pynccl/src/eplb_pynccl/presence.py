"""What this machine lacks for NCCL: bindings, library, driver. Looked for without importing or initialising any."""

from __future__ import annotations

import ctypes
import sys
from importlib.util import find_spec
from pathlib import Path

INSTALL_HINT = "pip install eplb-pynccl[cu12] or eplb-pynccl[cu13]"

_BINDINGS = ("nccl", "cupy")
_LIBRARY = "libnccl.so.2"
_DRIVER = "libcuda.so.1"


def why_not() -> str | None:
    """Return None when bindings, NCCL and an NVIDIA driver are here, else what is missing and what to do."""
    if not any(_is_installed(name) for name in _BINDINGS):
        return f"neither nccl4py nor CuPy is installed: {INSTALL_HINT}"
    if not _finds_library():
        return f"{_LIBRARY} is not installed: pip install nvidia-nccl-cu12 or nvidia-nccl-cu13"
    return why_no_driver()


def why_no_driver() -> str | None:
    """Return None when the NVIDIA driver's library loads; it is loaded, not initialised."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError as error:
        return f"there is no NVIDIA driver here ({error}): check nvidia-smi, or that the container was given the GPU"
    return None


def _finds_library() -> bool:
    for folder in sys.path:  # where NVIDIA's wheels put it; loading 300 MB only to see it would not be light
        if (Path(folder or ".") / "nvidia" / "nccl" / "lib" / _LIBRARY).exists():
            return True
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # loaded by hand, without a spec
        return name in sys.modules
