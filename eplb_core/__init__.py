"""Move expert weights between the ranks of a Mixture-of-Experts engine while it serves.

Importing this package imports neither torch nor numpy: public names are resolved on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eplb_core._version import __version__ as __version__
from eplb_core.hookspecs import hookimpl as hookimpl

if TYPE_CHECKING:
    from eplb_core.backend import API_VERSION as API_VERSION
    from eplb_core.backend import BackendInfo as BackendInfo
    from eplb_core.balancing.load_balancer import LoadBalancer as LoadBalancer
    from eplb_core.communicator import Communicator as Communicator
    from eplb_core.config import EPLBConfig as EPLBConfig
    from eplb_core.control.plane import ControlPlane as ControlPlane
    from eplb_core.discovery.catalog import Catalog as Catalog
    from eplb_core.discovery.discover import discover as discover
    from eplb_core.discovery.select import Choice as Choice
    from eplb_core.discovery.select import select as select
    from eplb_core.errors import EplbError as EplbError
    from eplb_core.plan.translation import translate_map as translate_map
    from eplb_core.rearrange.rearrangement import Rearrangement as Rearrangement
    from eplb_core.report import RearrangeReport as RearrangeReport

_HOMES = {
    "API_VERSION": "backend",
    "BackendInfo": "backend",
    "Catalog": "discovery.catalog",
    "Choice": "discovery.select",
    "Communicator": "communicator",
    "ControlPlane": "control.plane",
    "EPLBConfig": "config",
    "EplbError": "errors",
    "LoadBalancer": "balancing.load_balancer",
    "RearrangeReport": "report",
    "Rearrangement": "rearrange.rearrangement",
    "discover": "discovery.discover",
    "select": "discovery.select",
    "translate_map": "plan.translation",
}

__all__ = ["__version__", "hookimpl", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
