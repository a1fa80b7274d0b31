"""Tools for tests of backends and hosts: ranks as real processes, known bytes, faults on demand, the conformance kit.

The kit needs the extra ``testing``; names are resolved on first use, so that ranks start without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eplb_core.testing.conformance import BackendConformance as BackendConformance
    from eplb_core.testing.faults import FaultInjector as FaultInjector
    from eplb_core.testing.faults import InjectedFault as InjectedFault
    from eplb_core.testing.model import Model as Model
    from eplb_core.testing.model import shuffles as shuffles
    from eplb_core.testing.ranks import Rank as Rank
    from eplb_core.testing.ranks import Ranks as Ranks
    from eplb_core.testing.ranks import run_ranks as run_ranks

_HOMES = {
    "BackendConformance": "conformance",
    "FaultInjector": "faults",
    "InjectedFault": "faults",
    "Model": "model",
    "Rank": "ranks",
    "Ranks": "ranks",
    "run_ranks": "ranks",
    "shuffles": "model",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
