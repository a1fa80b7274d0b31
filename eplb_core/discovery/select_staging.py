"""Which staging allocator a communicator gets: the one that is named, found usable here and fit for the backend."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eplb_core.discovery.load import PluginRaisedError, contained, load_target
from eplb_core.discovery.select import resolve
from eplb_core.discovery.usable import why_unavailable
from eplb_core.errors import ConfigError, EplbError

if TYPE_CHECKING:
    import torch

    from eplb_core.backend import StagingAllocator, StagingInfo
    from eplb_core.config import EPLBConfig
    from eplb_core.discovery.catalog import Catalog

logger = logging.getLogger("eplb_core")

DEFAULT = "torch"


def build_allocator(
    config: EPLBConfig, catalog: Catalog, *, weights: torch.device, landing_device: str, backend: str
) -> StagingAllocator:
    """Find, check, probe and build the staging allocator that a configuration names, and log which it is.

    Notes
    -----
    Another one is never taken instead: a host that named page-locked memory would otherwise lose it without a word.
    Raises EPLB-C011 (no such allocator), EPLB-C014 (it does not fit this machine, these weights or this backend),
    EPLB-D002, EPLB-D006, or what the allocator's own ``probe`` raises as an `EplbError`.
    """
    name = config.staging or DEFAULT
    info = resolve(catalog, "staging", name)
    on_host = landing_device == "host" or weights.type == "cpu"
    reason = why_unfit(info, weights.type, "host" if on_host else "device", backend)
    if reason is not None:
        hint = f"To install: {info.install_hint}" if info.install_hint else ""
        raise ConfigError("EPLB-C014", staging=name, reason=reason, detail=hint)
    target: Any = load_target(info.target)
    found = _probe(name, target, weights)
    facts = "; ".join(f"{fact}: {value}" for fact, value in found.items())
    why = "named in the configuration" if config.staging else "torch's own, as staging= names no other"
    level = logging.INFO if config.staging else logging.DEBUG
    logger.log(level, "EPLB staging %s for %s: %s%s.", name, backend, why, f" ({facts})" if facts else "")
    return target(weights)  # type: ignore[no-any-return]


def _probe(name: str, target: Any, weights: torch.device) -> Mapping[str, str]:
    if not hasattr(target, "probe"):
        return {}
    try:
        found: Mapping[str, str] = contained("its probe()", lambda: target.probe(weights))
    except PluginRaisedError as raised:
        if isinstance(raised.__cause__, EplbError):
            raise raised.__cause__ from None
        raise ConfigError("EPLB-C014", staging=name, reason=str(raised)) from raised.__cause__
    return found


def why_unfit(info: StagingInfo, device_type: str, staged_on: str | None = None, backend: str = "") -> str | None:
    """Say why an allocator cannot serve, the first reason in the order device, memory, available; else None.

    Notes
    -----
    ``staged_on`` None asks about weights and machine alone.
    """
    if not {"*", device_type} & set(info.device_types):
        return f"it stages for {', '.join(info.device_types)}, not for {device_type}"
    if staged_on is not None and info.memory not in (staged_on, "any"):
        places = {"host": "host memory", "device": "device memory"}
        return f"{backend} stages in {places[staged_on]}, and it has {places[info.memory]} only"
    return why_unavailable(info)
