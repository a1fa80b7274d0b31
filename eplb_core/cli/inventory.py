"""Installed plugins and whether each is usable here, as plain data for ``eplb backends`` and its ``--json``.

The document, stable within a ``schema``; unknown keys may be added, none is dropped or changes its meaning::

    schema            1
    eplb_core         version of the core
    api_version       version of the plugin contract
    device, async     what usability was judged for
    choice            {name, why} of the automatic choice, or {name: null, why: the reason there is none}
    backends          [{name, summary, distribution, version, entry_point, api_version, async_safe (true, false, null =
                      undeclared), async_reason, device_types, elastic_safe, zero_copy, batched, auto_priority (null =
                      only when named), requires, usable, why_not (null when usable),
                      install_hint (empty unless a package is missing and that is why it is not usable),
                      probe (only with --probe) {ok, facts, problem, seconds}}]
    staging, policies [{name, summary, distribution, version, entry_point, api_version, usable, why_not, install_hint,
                      probe (of staging, only with --probe) as above}]
    failures          [{entry_point, distribution, version, reason}], plugins that were skipped
    conflicts         [{kind, name, claimants: [{entry_point, distribution, version, location}]}]
    excluded          [{entry_point, distribution, version, location}], left out by EPLB_PLUGINS
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from eplb_core._version import __version__
from eplb_core.backend import API_VERSION, BackendInfo, PolicyInfo, StagingInfo
from eplb_core.config import EPLBConfig
from eplb_core.discovery.catalog import Catalog
from eplb_core.discovery.select import select
from eplb_core.discovery.select_staging import why_unfit
from eplb_core.discovery.usable import why_not, why_unavailable
from eplb_core.errors import ConfigError
from eplb_core.errors.codes import CATALOGUE

SCHEMA = 1


def take_inventory(
    catalog: Catalog, *, use_async: bool, device_type: str, no_device: str | None = None
) -> dict[str, Any]:
    """Describe a catalog; no library of a backend is imported for it.

    Parameters
    ----------
    catalog : Catalog
        What is installed.
    use_async : bool
        Judge usability for asynchronous rearrangement.
    device_type : str
        ``torch.device.type`` of the weights.
    no_device : str or None
        Reason why there is no such device here; backends that need one are then not usable.

    Returns
    -------
    dict
        As described above; goes into JSON.
    """
    return {
        "schema": SCHEMA,
        "eplb_core": __version__,
        "api_version": API_VERSION,
        "device": device_type,
        "async": use_async,
        "choice": {"name": None, "why": no_device} if no_device else _automatic_choice(catalog, use_async, device_type),
        "backends": [_backend(catalog, info, use_async, device_type, no_device) for info in catalog.backends.values()],
        "staging": [
            _common(catalog, "staging", info, why_unfit(info, device_type) or no_device)
            for info in catalog.staging.values()
        ],
        "policies": [_common(catalog, "policy", info, why_unavailable(info)) for info in catalog.policies.values()],
        "failures": [
            {
                "entry_point": failure.entry_point,
                "distribution": failure.distribution,
                "version": failure.version,
                "reason": failure.reason,
            }
            for failure in catalog.failures
        ],
        "conflicts": [
            {"kind": kind, "name": name, "claimants": [asdict(origin) for origin in claimants]}
            for (kind, name), claimants in catalog.conflicts.items()
        ],
        "excluded": [asdict(origin) for origin in sorted(catalog.excluded, key=lambda origin: origin.entry_point)],
    }


def _automatic_choice(catalog: Catalog, use_async: bool, device_type: str) -> dict[str, str | None]:
    try:
        choice = select(EPLBConfig(use_async=use_async), device_type=device_type, catalog=catalog)
    except ConfigError as error:
        return {"name": None, "why": CATALOGUE[error.code].text}  # its detail repeats the lists
    return {"name": choice.name, "why": choice.reasons[choice.name]}


def _backend(
    catalog: Catalog, info: BackendInfo, use_async: bool, device_type: str, no_device: str | None
) -> dict[str, Any]:
    # The plugin's own reason comes first: it names what is missing (a driver) where torch only sees no device.
    reason = why_not(info, use_async=use_async, device_type=device_type, elastic=False) or no_device
    return {
        **_common(catalog, "backend", info, reason),
        "async_safe": info.async_safe,
        "async_reason": info.async_reason,
        "device_types": list(info.device_types),
        "elastic_safe": info.elastic_safe,
        "zero_copy": info.zero_copy,
        "batched": info.batched,
        "auto_priority": info.auto_priority,
        "requires": list(info.requires),
    }


def _common(
    catalog: Catalog, kind: str, info: BackendInfo | StagingInfo | PolicyInfo, reason: str | None
) -> dict[str, Any]:
    origin = catalog.origins[kind, info.name]
    return {
        "name": info.name,
        "summary": info.summary,
        "distribution": origin.distribution,
        "version": origin.version,
        "entry_point": origin.entry_point,
        "api_version": info.api_version,
        "usable": reason is None,
        "why_not": reason,
        "install_hint": info.install_hint if _lacks_a_package(info, reason) else "",
    }


def _lacks_a_package(info: BackendInfo | StagingInfo | PolicyInfo, reason: str | None) -> bool:
    """Is a Python package missing? If none is, a hint to install one would be misleading."""
    if reason is None or reason != why_unavailable(info) or info.install_hint in reason:
        return False
    # A plugin that needs any one of several packages declares none and words its own reason.
    return reason in [f"{module} is not installed" for module in info.requires] or (
        not info.requires and "installed" in reason
    )
