"""What discovery reads: ``cupy_pinned`` and ``cupy_device`` declared. Imports nothing heavier than `eplb_core`."""

from __future__ import annotations

from eplb_core import API_VERSION, hookimpl
from eplb_core.backend import StagingInfo
from eplb_cupy.library import INSTALL_HINT, why_no_device, why_no_pinned_memory


@hookimpl
def eplb_register_staging() -> list[StagingInfo]:
    """Declare both allocators."""
    return [
        StagingInfo(
            name="cupy_pinned",
            summary="page-locked host memory from CuPy's pinned pool",
            api_version=API_VERSION,
            target="eplb_cupy.pinned:CupyPinned",
            device_types=("*",),
            memory="host",
            requires=("cupy",),
            install_hint=INSTALL_HINT,
            available=why_no_pinned_memory,
        ),
        StagingInfo(
            name="cupy_device",
            summary="plain cudaMalloc memory, which peers can read whatever torch's allocator is set to",
            api_version=API_VERSION,
            target="eplb_cupy.device:CupyDevice",
            device_types=("cuda",),
            memory="device",
            requires=("cupy",),
            install_hint=INSTALL_HINT,
            available=why_no_device,
        ),
    ]
