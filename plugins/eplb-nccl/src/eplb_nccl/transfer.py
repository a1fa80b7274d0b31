"""One layer's operations in flight, and the tag that keeps them apart from the host's own messages."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from eplb_core.backend import BackendContext, toolkit
from eplb_nccl.group import Posted


@dataclass(eq=False)
class LayerTransfer(toolkit.LayerTransfer):
    """What `transfer` returns."""

    posted: list[Posted] = field(default_factory=list)
    failure: str | None = None
    """Why posting stopped early, or its wait."""

    def give_up(self, reason: str) -> list[Posted]:
        """Hand over the operations, not all of which are complete."""
        self.failure = self.failure or reason
        posted, self.posted = self.posted, []
        return posted


def tag_of(context: BackendContext, topic: str) -> int:
    """Return the tag under which both ends post what belongs to a topic of this epoch."""
    return zlib.crc32(f"{context.name}/{context.epoch}/{topic}".encode()) & 0x3FFF_FFFF
