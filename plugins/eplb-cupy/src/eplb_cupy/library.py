"""Which CuPy is installed and whether it fits: judged without an import. The only module that imports CuPy."""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INSTALL_HINT = "pip install eplb-cupy[cu12] or eplb-cupy[cu13], whichever CUDA torch was built for"

_NVIDIA_DRIVER, _AMD_DRIVER = "libcuda.so.1", "libamdhip64.so"
_METADATA_FOLDER = re.compile(
    r"(?P<name>(?:amd[-_])?cupy(?:[-_](?:cuda|rocm)[\w.]*(?:[-_]\d+)*)?)-(?P<version>\d[^-]*)(?:-py.*)?\.(?:dist|egg)-info",
    re.IGNORECASE,
)


class CupyError(Exception):
    """CuPy cannot be used here; the text says why, and what to do about it."""


def why_no_device() -> str | None:
    """Say why there is no device memory to be had from CuPy here, or None. Imports nothing."""
    return why_misinstalled() or why_no_driver()


def why_no_pinned_memory() -> str | None:
    """Say why there is no pinned memory to be had from CuPy here, or None. Imports nothing.

    Where CuPy is imported already, its own answer counts: whoever installed a pinned allocator of their own
    (`cupy.cuda.set_pinned_memory_allocator`) may need no driver.
    """
    problem = why_misinstalled()
    if problem is not None:
        return problem
    cupy = sys.modules.get("cupy")
    if cupy is not None and hasattr(cupy, "cuda"):
        try:
            cupy.cuda.alloc_pinned_memory(1)
        except Exception as error:
            return f"CuPy gets no memory: {_brief(error)}"
        return None
    return why_no_driver()


def distributions(path: Sequence[str] | None = None) -> dict[str, str]:
    """Return the version of every installed distribution that holds CuPy, by name.

    By the names of their metadata folders: reading each distribution's metadata takes as long as all of discovery.

    Parameters
    ----------
    path : sequence of str or None
        Folders to look in; ``sys.path`` by default.
    """
    found: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path if path is None else path):
        try:
            names = [each.name for each in Path(folder or ".").glob("*[cC][uU][pP][yY]*-info")]
        except OSError:
            continue
        for match in filter(None, map(_METADATA_FOLDER.fullmatch, sorted(names))):
            found.setdefault(re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])
    return found


def why_misinstalled(path: Sequence[str] | None = None) -> str | None:
    """Say what is wrong with what is installed, or None: two CuPy distributions, or one for another CUDA than torch's.

    Only a torch that is imported already is asked.
    """
    installed = distributions(path)
    wanted = _distribution_for_torch()
    if len(installed) > 1:
        names = sorted(installed)
        return (
            f"{' and '.join(names)} are installed together and overwrite each other's files: pip uninstall "
            f"{' '.join(names)}, then pip install {wanted or 'the one for the CUDA that torch was built for'}"
        )
    for name in installed:
        built = re.fullmatch(r"cupy-cuda(\d+)x", name)
        if built and wanted and name != wanted:
            return _mismatch(f"{name} {installed[name]}", name, wanted)
    return None


def why_no_driver() -> str | None:
    """Say that there is no GPU driver to load, or None."""
    names = [_AMD_DRIVER] if _torch_version("hip") else [_NVIDIA_DRIVER]
    if any("rocm" in name or name.startswith("amd") for name in distributions()):
        names = [_AMD_DRIVER]
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            vendor = "NVIDIA" if name == _NVIDIA_DRIVER else "AMD"
            return f"there is no {vendor} driver ({name}) here: install it, or leave staging unset for torch's own"
    return None


def load_cupy() -> Any:
    """Import CuPy.

    Returns
    -------
    module

    Raises
    ------
    CupyError
        It is misinstalled, does not import (whatever that raises), or was built for another CUDA than torch.
    """
    import torch  # noqa: F401 - so that what is installed is compared with it

    problem = why_misinstalled()
    if problem is not None:
        raise CupyError(problem)
    try:
        cupy = importlib.import_module("cupy")
        version = int(cupy.cuda.runtime.runtimeGetVersion())
        is_hip = bool(cupy.cuda.runtime.is_hip)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken install may raise anything, SystemExit included
        name = next(iter(distributions()), "cupy")
        remedy = f"pip install --force-reinstall {name}" if distributions() else INSTALL_HINT
        raise CupyError(f"CuPy does not import ({type(error).__name__}: {_brief(error)}): {remedy}") from error
    wanted = _distribution_for_torch()
    own = "cupy-rocm" if is_hip else f"cupy-cuda{version // 1000}x"
    if wanted is not None and own != wanted:
        raise CupyError(_mismatch(f"CuPy {cupy.__version__}", next(iter(distributions()), "cupy"), wanted))
    return cupy


def facts(cupy: Any) -> Mapping[str, str]:
    """Return what there is to know of a CuPy that loaded: versions of it, of its runtime and of torch's."""
    version = int(cupy.cuda.runtime.runtimeGetVersion())
    runtime = "ROCm" if cupy.cuda.runtime.is_hip else f"CUDA {version // 1000}.{version % 1000 // 10}"
    torchs = _torch_version("hip") or _torch_version("cuda") or "none"
    name = next(iter(distributions()), "cupy")
    return {"cupy": f"{cupy.__version__} ({name})", "runtime": f"{runtime}; torch's: {torchs}"}


def _mismatch(what: str, name: str, wanted: str) -> str:
    own = _torch_version("hip") or _torch_version("cuda")
    return f"{what} was built for another CUDA than torch ({own}): pip uninstall {name}, then pip install {wanted}"


def _distribution_for_torch() -> str | None:
    if _torch_version("hip"):
        return "cupy-rocm"
    cuda = _torch_version("cuda")
    return f"cupy-cuda{cuda.partition('.')[0]}x" if cuda else None


def _torch_version(of: str) -> str | None:
    versions = getattr(sys.modules.get("torch"), "version", None)
    return getattr(versions, of, None) or None


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
