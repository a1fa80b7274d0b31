"""Where experts come from that no live rank holds: checkpoints on disk, copies in host memory, or a host's own."""

from __future__ import annotations

from eplb_core.sources.checkpoint import CheckpointSource
from eplb_core.sources.host_memory import HostMemorySource
from eplb_core.sources.provider import SourceProvider

__all__ = ["CheckpointSource", "HostMemorySource", "SourceProvider"]
