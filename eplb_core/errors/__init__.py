"""The typed errors: one class per family, one stable code per cause, texts from `eplb_core.errors.codes`."""

from __future__ import annotations

from eplb_core.errors.classes import (
    BenchError,
    CommitError,
    ConfigError,
    DiscoveryError,
    EplbError,
    MetadataError,
    PeerLostError,
    PlanError,
    PoisonedError,
    StalledError,
    StoreLostError,
    TransferError,
    error_class,
    error_for,
)

__all__ = [
    "BenchError",
    "CommitError",
    "ConfigError",
    "DiscoveryError",
    "EplbError",
    "MetadataError",
    "PeerLostError",
    "PlanError",
    "PoisonedError",
    "StalledError",
    "StoreLostError",
    "TransferError",
    "error_class",
    "error_for",
]
