"""Which backend to use, and why: the configuration, the catalogue and the rules brought together."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, overload

from eplb_core.backend import BackendInfo, PolicyInfo, StagingInfo
from eplb_core.config import EPLBConfig
from eplb_core.discovery.catalog import Catalog, Failure
from eplb_core.discovery.conflicts import conflict_error
from eplb_core.discovery.discover import discover
from eplb_core.discovery.load import Info
from eplb_core.discovery.usable import (
    Need,
    Rejection,
    async_problem,
    first_rejection,
    need_of,
    why_not,
    why_unavailable,
)
from eplb_core.errors import ConfigError, EplbError

__all__ = ["Choice", "resolve", "select", "why_not", "why_unavailable"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The backend chosen.

    Parameters
    ----------
    name : str
        Name of the backend.
    info : BackendInfo
        What its plugin declares.
    reasons : dict of str to str
        For every candidate, plugins that failed to load and names in conflict included: why, or why not.
    """

    name: str
    info: BackendInfo
    reasons: dict[str, str]


def select(cfg: EPLBConfig, device_type: str = "cuda", elastic: bool = False, catalog: Catalog | None = None) -> Choice:
    """Choose the backend for a configuration, and say in one log line which, why, and why not the others.

    The rules, in this order: conflict or load failure, async, device, elastic, available. A backend that is named is
    taken or refused; unnamed, the highest ``auto_priority`` among the usable is taken, and of equals the first by name.
    Another backend than the one named is taken only where ``cfg.fallback`` allows one, and only when the one named is
    not available on this machine. The fallback is also taken when no backend can be chosen automatically. It passes
    the same rules, and its use is a warning.

    Parameters
    ----------
    cfg : EPLBConfig
        ``communicator``, ``use_async``, ``elastic`` and ``fallback`` are read.
    device_type : str
        ``torch.device.type`` of the weights.
    elastic : bool
        Will ranks join after connect? ``cfg.elastic`` says so as well.
    catalog : Catalog or None
        What is installed; None discovers it.

    Returns
    -------
    Choice
        No library of a backend has been imported for it.

    Raises
    ------
    ConfigError
        EPLB-C004 (async), -C005 (device, elastic, available), -C006 (unknown; ``__cause__`` says why its plugin failed
        to load, if it did), -C007 (nothing usable).
    DiscoveryError
        EPLB-D002: the name is claimed by more than one distribution.
    """
    if not isinstance(cfg, EPLBConfig):
        raise ConfigError("EPLB-C001", problem=f"select() takes an EPLBConfig, got {type(cfg).__name__}")
    catalog = discover() if catalog is None else catalog
    need = need_of(cfg.use_async, device_type, elastic or cfg.elastic)
    if cfg.communicator is None:
        return _automatic(cfg, need, catalog)
    name = cfg.communicator
    info = resolve(catalog, "backend", name)
    rejection = first_rejection(info, need)
    reasons = _unasked(catalog, need, f"{name} was named")
    if rejection is None:
        return _chosen(info, "named in the configuration", reasons)
    refusal = _refusal(info, rejection, catalog)
    if rejection.rule != "available" or cfg.fallback is None:
        raise refusal
    reasons[name] = rejection.reason
    return _fallback(cfg.fallback, f"fallback for {name}", refusal, reasons, need, catalog)


@overload
def resolve(catalog: Catalog, kind: Literal["backend"], name: str) -> BackendInfo: ...
@overload
def resolve(catalog: Catalog, kind: Literal["staging"], name: str) -> StagingInfo: ...
@overload
def resolve(catalog: Catalog, kind: Literal["policy"], name: str) -> PolicyInfo: ...
def resolve(catalog: Catalog, kind: Literal["backend", "staging", "policy"], name: str) -> Info:
    """Look a name up among backends, staging allocators or policies, or raise why it is not there.

    Notes
    -----
    EPLB-D002: several distributions claim it. EPLB-C006, -C011 or -C012: unknown, with the failure of the plugin of
    that name as ``__cause__``. Whether what is found is usable here is another question.
    """
    if (kind, name) in catalog.conflicts:
        raise conflict_error(kind, name, catalog.conflicts[kind, name])
    entries: dict[str, tuple[Mapping[str, Any], str, str]] = {
        "backend": (catalog.backends, "EPLB-C006", "communicator"),
        "staging": (catalog.staging, "EPLB-C011", "staging"),
        "policy": (catalog.policies, "EPLB-C012", "policy"),
    }
    known, code, field = entries[kind]
    if name in known:
        info: Info = known[name]
        return info
    failures = [failure for failure in catalog.failures if failure.entry_point == name]
    detail = _what_else(name, known, failures, catalog)
    raise ConfigError(code, detail=detail, **{field: name}) from (failures[0].error if failures else None)


def _what_else(name: str, known: Mapping[str, Info], failures: list[Failure], catalog: Catalog) -> str:
    if failures:
        return "Its plugin was skipped: " + "; ".join(map(str, failures)) + "."
    left_out = [str(origin) for origin in catalog.excluded if origin.entry_point == name]
    if left_out:
        return f"{left_out[0]} offers an entry point of that name, but EPLB_PLUGINS leaves it out."
    close = difflib.get_close_matches(name, known, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    skipped = f" Skipped plugins: {'; '.join(map(str, catalog.failures))}." if catalog.failures else ""
    return f"Installed: {', '.join(known) or 'none'}.{guess}{skipped}"


# --- the choice -------------------------------------------------------------------------------------------------------


def _automatic(cfg: EPLBConfig, need: Need, catalog: Catalog) -> Choice:
    reasons = _absent(catalog)
    usable: list[BackendInfo] = []
    for name, info in catalog.backends.items():
        rejection = first_rejection(info, need)
        if rejection is not None:
            reasons[name] = rejection.reason
        elif info.auto_priority is None:
            reasons[name] = "taken only when named"
        else:
            usable.append(info)
    if not usable:
        listed = "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items()))
        nothing = ConfigError("EPLB-C007", detail=f"{listed}." if listed else "No backend plugin is installed.")
        if cfg.fallback is None:
            raise nothing
        return _fallback(cfg.fallback, "fallback, as no backend can be chosen", nothing, reasons, need, catalog)
    best, *others = sorted(usable, key=lambda info: (-_priority(info), info.name))
    for info in others:
        reasons[info.name] = f"usable, but auto_priority is {info.auto_priority} and {best.name} comes first"
    return _chosen(best, f"highest auto_priority ({best.auto_priority}) among the usable", reasons)


def _priority(info: BackendInfo) -> int:
    return -1 if info.auto_priority is None else info.auto_priority


def _fallback(
    name: str, why: str, refusal: ConfigError, reasons: dict[str, str], need: Need, catalog: Catalog
) -> Choice:
    try:
        info = resolve(catalog, "backend", name)
        rejection = first_rejection(info, need)
        if rejection is not None:
            raise _refusal(info, rejection, catalog)
    except EplbError as second:
        detail = f"{refusal.detail} The fallback cannot be used either: {second}".strip()
        raise ConfigError(refusal.code, detail=detail, **refusal.fields) from second
    return _chosen(info, why, reasons, level=logging.WARNING)


def _chosen(info: BackendInfo, why: str, reasons: dict[str, str], level: int = logging.INFO) -> Choice:
    reasons = dict(sorted((reasons | {info.name: why}).items()))
    others = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if name != info.name)
    logger.log(level, "EPLB communicator %s: %s. Not taken: %s.", info.name, why, others or "there is no other")
    return Choice(info.name, info, reasons)


def _absent(catalog: Catalog) -> dict[str, str]:
    reasons = {origin.entry_point: f"left out by EPLB_PLUGINS ({origin})" for origin in catalog.excluded}
    for failure in catalog.failures:
        known = f"{reasons[failure.entry_point]}; " if failure.entry_point in reasons else ""
        owner = f" ({failure.distribution} {failure.version})" if failure.distribution else ""
        reasons[failure.entry_point] = f"{known}{failure.reason}{owner}"
    for (kind, name), claimants in catalog.conflicts.items():
        if kind == "backend":
            reasons[name] = "claimed by more than one distribution: " + " and ".join(map(str, claimants))
    return reasons


def _unasked(catalog: Catalog, need: Need, why: str) -> dict[str, str]:
    """Give the reasons of backends that nobody asked for, by declaration alone: no code of theirs is called."""
    reasons = _absent(catalog)
    for name, info in catalog.backends.items():
        rejection = first_rejection(info, need, declared_only=True)
        reasons[name] = why if rejection is None else rejection.reason
    return reasons


def _refusal(info: BackendInfo, rejection: Rejection, catalog: Catalog) -> ConfigError:
    if rejection.rule == "async":
        safe = [other for other in catalog.backends.values() if other.async_safe]
        ascending = sorted(safe, key=lambda other: (_priority(other), other.name))
        alternatives = " or ".join(f"'{other.name}'" for other in ascending)
        return ConfigError(
            "EPLB-C004",
            communicator=info.name,
            reason=async_problem(info),
            alternatives=alternatives or "an async-safe backend (none is installed)",
            detail=f"With use_async=False {info.name} may be used.",
        )
    hint = f"To install: {info.install_hint}" if rejection.rule == "available" and info.install_hint else ""
    return ConfigError("EPLB-C005", communicator=info.name, reason=rejection.reason, detail=hint)
