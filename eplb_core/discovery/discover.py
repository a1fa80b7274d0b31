"""Which plugins are installed: entry points to a catalogue of descriptors, with every broken plugin kept as data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any

from eplb_core._version import __version__
from eplb_core.backend import API_VERSION, PolicyInfo, StagingInfo
from eplb_core.discovery.catalog import Catalog, Failure, Origin, same_release
from eplb_core.discovery.conflicts import Claims, claim, conflict_error, conflicts_of
from eplb_core.discovery.load import Offer, PluginRejectedError, declared_offers, one_line
from eplb_core.errors import DiscoveryError
from eplb_core.hookspecs import ENTRY_POINT_GROUP


def discover() -> Catalog:
    """Read the entry points of the group ``eplb_core.plugins`` and ask each plugin what it offers.

    ``EPLB_PLUGINS`` restricts the entry points to those it names (comma-separated; empty allows none), and
    ``EPLB_STRICT=1`` turns the first failure or conflict into an error. Nothing is cached and no environment variable
    is set.

    Returns
    -------
    Catalog
        Healthy plugins by what they offer, broken ones as `Catalog.failures`.

    Raises
    ------
    DiscoveryError
        Only with ``EPLB_STRICT=1``: EPLB-D001, EPLB-D002 or EPLB-D005.
    """
    strict = os.environ.get("EPLB_STRICT", "").strip().lower() not in ("", "0", "false", "no", "off")
    names = os.environ.get("EPLB_PLUGINS")
    allowed = None if names is None else {name.strip() for name in names.split(",") if name.strip()}
    failures: list[Failure] = []

    def fail(failure: Failure) -> None:
        if strict:
            raise failure.error
        failures.append(failure)

    installed = _scan(fail)
    points = [point for point in installed if allowed is None or point.origin.entry_point in allowed]
    for name in sorted((allowed or set()) - {point.origin.entry_point for point in installed}):
        error = DiscoveryError("EPLB-D005", entry_point=name)
        fail(Failure(name, "", "", "named in EPLB_PLUGINS, but no installed distribution offers it", error))
    claims: Claims = {(kind, info.name): [(_CORE, info)] for kind, info in _core_offers()}
    for point in points:
        try:
            offers = _own_offers(point, installed)
        except PluginRejectedError as rejected:
            fail(_failure(point.origin, str(rejected), rejected.__cause__))
            continue
        for kind, info in offers:
            claim(claims, kind, info, point.origin)
    return _catalog(claims, failures, tuple(point.origin for point in installed if point not in points), strict)


@dataclass(frozen=True)
class _EntryPoint:
    origin: Origin
    value: str


_CORE = Origin("eplb_core", "eplb-core", __version__)


def _core_offers() -> list[Offer]:
    placement = "eplb_core.balancing.placement:rebalance_experts"
    torch_staging = "eplb_core.memory.staging:TorchStaging"
    return [
        ("staging", StagingInfo("torch", "torch's own allocator", API_VERSION, torch_staging, memory="any")),
        (
            "policy",
            PolicyInfo("default", "hierarchical EPLB: nodes, then ranks", API_VERSION, placement, worthwhile_gain=0.01),
        ),
    ]


def _scan(fail: Callable[[Failure], None]) -> list[_EntryPoint]:
    """Return each entry point of the group once; a distribution whose entry points cannot be read is a failure."""
    points: dict[tuple[str, str, str, str], _EntryPoint] = {}
    unreadable: set[tuple[str, str]] = set()
    for dist in metadata.distributions():
        try:
            # Parsing every distribution's file would cost more than all the rest of discovery.
            if ENTRY_POINT_GROUP not in (dist.read_text("entry_points.txt") or ""):
                continue
            found = [(point.name, point.value) for point in dist.entry_points if point.group == ENTRY_POINT_GROUP]
        except Exception as error:  # a stranger's file must not hide all other plugins
            origin = _origin(dist, "entry_points.txt")
            if (origin.distribution, origin.version) not in unreadable:
                unreadable.add((origin.distribution, origin.version))
                problem = f"{type(error).__name__}: {one_line(str(error))}"
                fail(_failure(origin, f"its entry points cannot be read: {problem}", error))
            continue
        for name, value in found:
            origin = _origin(dist, name)
            # A later folder of sys.path that holds the very same release again (an editable install listed twice, a
            # symlinked path) adds nothing: the import system takes one module for both.
            canonical = re.sub(r"[-_.]+", "-", origin.distribution).lower()
            points.setdefault((canonical, origin.version, name, value), _EntryPoint(origin, value))
    return list(points.values())


def _origin(dist: metadata.Distribution, entry_point: str) -> Origin:
    location = str(dist.locate_file(""))
    try:
        name, version = dist.metadata["Name"] or "", dist.metadata["Version"] or ""
    except Exception:  # a folder without METADATA; what it raises differs between Python releases
        name = version = ""
    return Origin(entry_point, name or "a distribution without METADATA", version or "(no version)", location)


def _failure(origin: Origin, reason: str, cause: BaseException | None) -> Failure:
    named = {"entry_point": origin.entry_point, "distribution": origin.distribution, "version": origin.version}
    error = DiscoveryError("EPLB-D001", reason=reason, **named)
    error.__cause__ = cause
    return Failure(reason=reason, error=error, **named)


def _own_offers(point: _EntryPoint, installed: list[_EntryPoint]) -> list[Offer]:
    """Return what an entry point offers, less the backends that siblings (same release and module) are named after."""
    offers = declared_offers(point.value)
    name = point.origin.entry_point
    siblings = {
        other.origin.entry_point
        for other in installed
        if other.value == point.value and same_release(other.origin, point.origin)
    }
    backends = [info.name for kind, info in offers if kind == "backend"]
    strangers = [backend for backend in backends if backend not in siblings]
    if strangers or (backends and name not in backends):
        wrong = (strangers or backends)[0]
        raise PluginRejectedError(f"it declares the backend {wrong!r}, but an entry point is named after its backend")
    reserved = [(kind, info.name) for kind, info in _core_offers()]
    for kind, info in offers:
        if (kind, info.name) in reserved:
            raise PluginRejectedError(f"the {kind} name {info.name!r} belongs to eplb-core")
    return [(kind, info) for kind, info in offers if kind != "backend" or info.name == name]


def _catalog(
    claims: Claims,
    failures: list[Failure],
    excluded: tuple[Origin, ...],
    strict: bool,
) -> Catalog:
    conflicts = conflicts_of(claims)
    if strict:
        for (kind, name), claimants in conflicts.items():
            raise conflict_error(kind, name, claimants)
    settled = {key: offers[0] for key, offers in sorted(claims.items()) if key not in conflicts}

    def of_kind(wanted: str) -> Mapping[str, Any]:
        return MappingProxyType({name: info for (kind, name), (_, info) in settled.items() if kind == wanted})

    return Catalog(
        backends=of_kind("backend"),
        staging=of_kind("staging"),
        policies=of_kind("policy"),
        failures=tuple(sorted(failures, key=str)),
        conflicts=MappingProxyType(conflicts),
        origins=MappingProxyType({key: origin for key, (origin, _) in settled.items()}),
        excluded=excluded,
    )
