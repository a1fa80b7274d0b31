"""What discovery reads: the declaration of ``pynccl``. Imports nothing heavier than `eplb_core`."""

from __future__ import annotations

from eplb_core import API_VERSION, BackendInfo, hookimpl
from eplb_pynccl.presence import INSTALL_HINT, why_not

NAME = "pynccl"


@hookimpl
def eplb_register_backends() -> BackendInfo:
    """Declare the backend."""
    return BackendInfo(
        name=NAME,
        summary="grouped ncclSend/ncclRecv through nccl4py (or CuPy), on a communicator of its own",
        api_version=API_VERSION,
        target="eplb_pynccl.backend:PyNcclBackend",
        landing_layout="rows",
        options="eplb_pynccl.options:PyNcclOptions",
        async_safe=False,
        async_reason="NCCL multi-stream conflicts",
        device_types=("cuda",),
        zero_copy=True,
        batched=True,
        # Either of two bindings will do, so `requires`, which asks for all it names, stays empty.
        install_hint=INSTALL_HINT,
        available=why_not,
    )
