"""What the plugin declares; imports nothing heavier than eplb_core."""

from __future__ import annotations

from eplb_core import API_VERSION, BackendInfo, hookimpl
from eplb_nixl.library import INSTALL_HINT, why_not

NAME = "nixl"
LABEL = "NIXL"
"""Leading word of the backend's errors."""


@hookimpl
def eplb_register_backends() -> BackendInfo:
    """Declare the ``nixl`` backend."""
    return BackendInfo(
        name=NAME,
        summary="one-sided NIXL reads from live weights (or from send buffers) over UCX",
        api_version=API_VERSION,
        target="eplb_nixl.backend:NixlBackend",
        landing_layout="rows",
        options="eplb_nixl.options:NixlOptions",
        async_safe=True,
        label=LABEL,
        device_types=("*",),
        elastic_safe=True,
        zero_copy=True,
        auto_priority=100,
        # Any one of several packages will do, so `requires`, which asks for all it names, stays empty.
        install_hint=INSTALL_HINT,
        available=why_not,
    )
