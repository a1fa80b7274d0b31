"""What this distribution offers to eplb_core."""

from __future__ import annotations

import sys

from eplb_core import API_VERSION, BackendInfo, hookimpl


def why_not() -> str | None:
    """Return why this machine cannot use the backend, or None."""
    return None if sys.platform == "linux" else "process_vm_readv exists on Linux alone"


@hookimpl
def eplb_register_backends() -> BackendInfo:
    """Declare the backend."""
    return BackendInfo(
        name="vmread",
        summary="single-copy reads of a peer's memory on one host (process_vm_readv)",
        api_version=API_VERSION,
        target="eplb_vmread.backend:VmReadBackend",
        async_safe=True,
        device_types=("cpu",),
        elastic_safe=True,
        zero_copy=True,
        available=why_not,
    )
