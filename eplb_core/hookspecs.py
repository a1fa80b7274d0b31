"""The contract: what a plugin registers, what a backend implements, what an observer may wrap."""

from __future__ import annotations

from eplb_core.backend.hookspecs import (
    ENTRY_POINT_GROUP,
    PROJECT,
    BackendSpec,
    DiscoverySpec,
    hookimpl,
    hookspec,
)

__all__ = ["ENTRY_POINT_GROUP", "PROJECT", "BackendSpec", "DiscoverySpec", "hookimpl", "hookspec"]
