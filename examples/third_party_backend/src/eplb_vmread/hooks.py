"""What this distribution offers to eplb_core; imports nothing heavier."""

from __future__ import annotations

from eplb_core import API_VERSION, BackendInfo, hookimpl
from eplb_vmread.permission import why_not

NAME = "vmread"


@hookimpl
def eplb_register_backends() -> BackendInfo:
    """Declare the backend."""
    return BackendInfo(
        name=NAME,
        summary="single-copy reads of a peer's memory on one host (process_vm_readv)",
        api_version=API_VERSION,
        target="eplb_vmread.backend:VmReadBackend",
        landing_layout="rows",
        options="eplb_vmread.options:VmReadOptions",
        async_safe=True,
        device_types=("cpu",),
        elastic_safe=True,
        zero_copy=True,
        install_hint="it needs Linux, and permission to read other processes of the same user",
        available=why_not,
    )
