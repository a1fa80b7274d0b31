"""What a backend is: the descriptors a plugin declares and the objects that pass through the hooks."""

from __future__ import annotations

from eplb_core.backend.events import Event
from eplb_core.backend.info import API_VERSION, BackendInfo, PolicyInfo, StagingInfo
from eplb_core.backend.memory import Buffers, RowList, StagingAllocator, StagingBlock
from eplb_core.backend.protocol import Backend, BackendContext, Cancelled
from eplb_core.backend.transfer import (
    ConnectReceipt,
    LocalMetadata,
    MoveColumns,
    PeerMetadata,
    TransferPlan,
    TransferReceipt,
)
from eplb_core.report import StagingStats

__all__ = [
    "API_VERSION",
    "Backend",
    "BackendContext",
    "BackendInfo",
    "Buffers",
    "Cancelled",
    "ConnectReceipt",
    "Event",
    "LocalMetadata",
    "MoveColumns",
    "PeerMetadata",
    "PolicyInfo",
    "RowList",
    "StagingAllocator",
    "StagingBlock",
    "StagingInfo",
    "StagingStats",
    "TransferPlan",
    "TransferReceipt",
]
