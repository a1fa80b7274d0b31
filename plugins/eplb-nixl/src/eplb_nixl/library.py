"""Which NIXL is installed: found without importing it, imported when asked. The only module that imports NIXL."""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eplb_nixl.signals import unchanged_signals

INSTALL_HINT = "pip install eplb-nixl[cu12] or eplb-nixl[cu13] for NVIDIA or no GPU at all; RIXL on ROCm"

_META = "nixl"
_WHEELS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_ROCM_TWIN = "rixl"


class NixlError(Exception):
    """NIXL refused a call, or cannot be loaded; the text says which call and holds NIXL's own words."""


@dataclass(frozen=True)
class Library:
    """NIXL as loaded.

    Parameters
    ----------
    module : str
        The package that really does the work, such as ``"nixl_cu13"``.
    version : str
        Version of its distribution; ``"unknown"`` for a build that was not installed as one.
    api : module
        Its ``_api``: `nixl_agent`, `nixl_agent_config`.
    errors : tuple of type
        What its calls raise.
    strided : bool
        Does it take descriptors of (address, length, device, stride, count)?
    """

    module: str
    version: str
    api: Any
    errors: tuple[type[Exception], ...]
    strided: bool


def why_not() -> str | None:
    """Return None when a NIXL is installed, else why not. Imports nothing."""
    if _candidate():
        return None
    if _is_installed(_META):
        return "the nixl package is here without one of the wheels it loads (nixl-cu12, nixl-cu13)"
    return "none of the packages nixl, nixl-cu12, nixl-cu13, rixl is installed"


def load_library() -> Library:
    """Import the NIXL that is installed.

    Returns
    -------
    Library
        ``nixl`` where it is installed, else the wheel for this torch's CUDA, else any wheel, else ``rixl``.

    Raises
    ------
    NixlError
        None is installed, or the one that is does not load. Another one is never taken instead.
    """
    name = _candidate()
    if name is None:
        raise NixlError(f"{why_not()}: {INSTALL_HINT}")
    try:
        with unchanged_signals():
            api = importlib.import_module(f"{name}._api")
            bindings = importlib.import_module(f"{name}._bindings")
    except (ImportError, OSError, RuntimeError) as error:
        raise NixlError(f"{name} does not load: {error}: {INSTALL_HINT}") from error
    module = api.__name__.rpartition(".")[0]
    own = [each for each in vars(bindings).values() if isinstance(each, type) and issubclass(each, Exception)]
    prepare = getattr(bindings.nixlAgent.prepXferDlist, "__doc__", None) or ""
    return Library(
        module=module,
        version=_version(module),
        api=api,
        # pybind11 adds these for arguments it cannot convert and for std:: exceptions.
        errors=(*own, RuntimeError, ValueError, TypeError, KeyError, IndexError),
        strided="mem_type" in prepare,  # the overload that takes strided arrays, since NIXL 1.5
    )


def loaded_ucp() -> list[str]:
    """Return the paths of every libucp in this process, sorted; two of them is trouble."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return sorted(set(re.findall(r"\s(/\S*/libucp[-.]\S*)$", maps, re.MULTILINE)))


def ucx_version(path: str) -> str:
    """Ask a libucp that is loaded for its version.

    Parameters
    ----------
    path : str
        One of `loaded_ucp`.

    Returns
    -------
    str
        Such as ``"1.23.0"``; ``"unknown"`` when it does not say.
    """
    try:
        tell = ctypes.CDLL(path).ucp_get_version_string
    except (OSError, AttributeError):
        return "unknown"
    tell.restype = ctypes.c_char_p
    text: bytes | None = tell()
    return text.decode() if text else "unknown"


def _candidate() -> str | None:
    wheels = [name for name in _by_cuda(_WHEELS) if _is_installed(name)]
    if wheels:
        return _META if _is_installed(_META) else wheels[0]
    if _is_installed(_META) and _has_own_bindings():
        return _META
    return _ROCM_TWIN if _is_installed(_ROCM_TWIN) else None


def _by_cuda(wheels: Sequence[str]) -> list[str]:
    """Put the wheel of this torch's CUDA first; only a torch that is imported already is asked."""
    torch_version = getattr(sys.modules.get("torch"), "version", None)
    cuda = getattr(torch_version, "cuda", None)
    own = f"nixl_cu{cuda.partition('.')[0]}" if cuda else ""
    return sorted(wheels, key=lambda name: name != own)


def _has_own_bindings() -> bool:
    # A build from source installs one package `nixl` with the bindings in it.
    spec = find_spec(_META)
    folders = spec.submodule_search_locations if spec else None
    return any(list(Path(folder).glob("_bindings*.so")) for folder in folders or ())


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # loaded by hand, without a spec
        return name in sys.modules


def _version(module: str) -> str:
    try:
        return version(module.replace("_", "-"))
    except PackageNotFoundError:
        return "unknown"
