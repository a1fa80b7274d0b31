"""Where experts come from that no live rank holds: checkpoints on disk, copies in host memory, or a host's own.

Names are resolved on first use (PEP 562): the command line reads `eplb_core.sources.specs`, and imports no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eplb_core.sources.checkpoint import CheckpointSource as CheckpointSource
    from eplb_core.sources.host_memory import HostMemorySource as HostMemorySource
    from eplb_core.sources.provider import SourceProvider as SourceProvider

_HOMES = {"CheckpointSource": "checkpoint", "HostMemorySource": "host_memory", "SourceProvider": "provider"}

__all__ = ["CheckpointSource", "HostMemorySource", "SourceProvider"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
