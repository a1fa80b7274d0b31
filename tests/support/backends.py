"""The backends that the shared tests run over: every one that is installed and usable here, on each of its transports."""

from __future__ import annotations

from dataclasses import dataclass, field

import eplb_core as eplb
import pytest
from eplb_core.rules import why_not

# Over UCX's default transports on one host a READ can finish against a silent process, which hides faults; tcp does not.
_TRANSPORTS = {"nixl": {"": {}, "tcp": {"UCX_TLS": "tcp"}}}


@dataclass(frozen=True)
class BackendCase:
    """A backend under test, and the environment its ranks get."""

    name: str
    env: dict[str, str] = field(default_factory=dict)


def backend_cases() -> list:
    """Return pytest parameters, one for each backend and transport."""
    parameters = []
    for name, info in sorted(eplb.discover().backends.items()):
        if why_not(info, use_async=False, device_type="cpu", elastic=False) is not None:
            continue
        for transport, env in _TRANSPORTS.get(name, {"": {}}).items():
            label = f"{name}-{transport}" if transport else name
            parameters.append(pytest.param(BackendCase(name, dict(env)), id=label))
    return parameters


every_backend = pytest.mark.parametrize("backend", backend_cases())
