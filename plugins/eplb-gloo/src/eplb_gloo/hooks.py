"""What discovery reads: the declaration of ``torch_gloo``. Imports nothing heavier than `eplb_core`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from eplb_core import API_VERSION, BackendInfo, hookimpl

NAME = "torch_gloo"


def why_not_available() -> str | None:
    """Return why the backend cannot be used here, or None.

    Whether torch was built with gloo shows only once torch is imported; until then its presence has to do, and the
    backend's ``probe`` looks before it is built.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None if find_spec("torch") is not None else "torch is not installed"
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        return "this build of torch has no gloo"
    return None


@hookimpl
def eplb_register_backends() -> BackendInfo:
    """Declare the backend."""
    return BackendInfo(
        name=NAME,
        summary="point to point over gloo (TCP); device tensors are staged through host memory",
        api_version=API_VERSION,
        target="eplb_gloo.backend:GlooBackend",
        landing_layout="packed_by_peer",
        options="eplb_gloo.options:GlooOptions",
        async_safe=True,
        device_types=("*",),
        elastic_safe=True,
        auto_priority=50,
        requires=("torch",),
        install_hint="pip install torch (a build with gloo)",
        available=why_not_available,
    )
