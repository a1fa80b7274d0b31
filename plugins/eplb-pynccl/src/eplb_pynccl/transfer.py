"""One layer's batches in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from eplb_core.backend import toolkit
from eplb_pynccl.connection import Batch


@dataclass(eq=False)
class LayerTransfer(toolkit.LayerTransfer):
    """What `transfer` returns."""

    batches: list[Batch] = field(default_factory=list)
    """In the order in which NCCL takes them; none any more once everything is over."""
