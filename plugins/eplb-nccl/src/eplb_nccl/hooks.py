"""What discovery reads: the declaration of ``torch_nccl``. Imports nothing heavier than `eplb_core`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from eplb_core import API_VERSION, BackendInfo, hookimpl

NAME = "torch_nccl"


def why_not_available() -> str | None:
    """Return why the backend cannot be used here, or None.

    Whether the group that the host passes can move the weights shows only when the backend is built.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None if find_spec("torch") is not None else "torch is not installed"
    return None if torch.distributed.is_available() else "this build of torch has no torch.distributed"


@hookimpl
def eplb_register_backends() -> BackendInfo:
    """Declare the backend."""
    return BackendInfo(
        name=NAME,
        summary="torch.distributed point to point over the host's device_group (NCCL; any group for CPU tensors)",
        api_version=API_VERSION,
        target="eplb_nccl.backend:TorchNcclBackend",
        landing_layout="rows",
        options="eplb_nccl.options:TorchNcclOptions",
        async_safe=False,
        async_reason="NCCL multi-stream conflicts",
        device_types=("*",),
        zero_copy=True,
        batched=True,
        requires=("torch",),
        install_hint="pip install torch (a build with NCCL)",
        available=why_not_available,
    )
