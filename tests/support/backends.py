"""The backends that the shared tests run over: every one that is usable here, on each of its transports."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

import eplb_core as eplb
from eplb_core.discovery.usable import why_not
from eplb_core.testing.ranks import Rank
from tests.support import stub_nccl

# Over UCX's default transports on one host a READ can finish against a silent process, which hides faults; not tcp.
_TRANSPORTS = {"nixl": {"": {}, "tcp": {"UCX_TLS": "tcp"}}}
# Other ways to stage: environment, fields of the configuration, options, and modules without which a case is skipped.
_STAGING = {
    "torch_gloo": {"cupy_pinned": ({}, {"staging": "cupy_pinned"}, {}, ("cupy", "eplb_cupy"))},
    "nixl": {"staged": ({"UCX_TLS": "tcp"}, {}, {"mode": "staged"}, ())},
}
_CASE = "EPLB_TESTS_CASE"
_NEED_A_DEVICE_GROUP = {"torch_nccl"}
_PYNCCL_ON_CPU = Path(__file__).parents[1] / "data" / "pynccl_cpu"


@dataclass(frozen=True)
class BackendCase:
    """A backend under test, and the environment its ranks get, by which they also learn `config` and `options`."""

    name: str
    env: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.config or self.options:
            self.env[_CASE] = json.dumps({"config": self.config, "options": self.options})


def backend_cases() -> list:
    """Return pytest parameters, one for each backend and transport."""
    parameters = []
    for name, info in sorted(eplb.discover().backends.items()):
        if why_not(info, use_async=False, device_type="cpu", elastic=False) is not None:
            continue
        for transport, env in _TRANSPORTS.get(name, {"": {}}).items():
            label = f"{name}-{transport}" if transport else name
            parameters.append(pytest.param(BackendCase(name, dict(env)), id=label))
        for label, (env, config, options, modules) in _STAGING.get(name, {}).items():
            missing = [module for module in modules if find_spec(module) is None]
            marks = [pytest.mark.skip(reason=f"needs {' and '.join(missing)}")] if missing else []
            case = BackendCase(name, dict(env), config, options)
            parameters.append(pytest.param(case, id=f"{name}-{label}", marks=marks))
    return [*parameters, _pynccl_on_cpu()]


def _pynccl_on_cpu():
    """Return pynccl as a test plugin declares it for CPU tensors: real bindings, stub library."""
    if str(_PYNCCL_ON_CPU) not in sys.path:
        sys.path.append(str(_PYNCCL_ON_CPU))  # ranks inherit it
    missing = [
        what for what, there in (("nccl4py", find_spec("nccl")), ("a C compiler", stub_nccl.compiler())) if not there
    ]
    marks = [pytest.mark.skip(reason=f"needs {' and '.join(missing)}")] if missing else []
    env = {} if missing else {stub_nccl.ENVIRONMENT: stub_nccl.build()}
    return pytest.param(BackendCase("pynccl_cpu", env), id="pynccl", marks=marks)


def device_group(rank: Rank, backend: str, members: Sequence[int] | None = None, topic: str = "device group"):
    """Return a group of these ranks, all of which ask for it, where the backend needs the host's, else None."""
    return rank.device_group(members, topic) if backend in _NEED_A_DEVICE_GROUP else None


def case_config(backend: str, **fields) -> eplb.EPLBConfig:
    """Return, in a rank, the configuration that its test's case asks for."""
    config = json.loads(os.environ.get(_CASE, "{}")).get("config", {})
    if config.get("staging") == "cupy_pinned":
        from tests.support import pinned_on_host

        pinned_on_host.install()
    return eplb.EPLBConfig(**{"communicator": backend, "use_async": False, **config, **fields})


def case_options() -> dict | None:
    """Return, in a rank, the backend's options that its test's case asks for; None asks for none."""
    return json.loads(os.environ.get(_CASE, "{}")).get("options") or None


# Each differs from another case in nothing that a fault, or python -O, meets: nixl-tcp (where a READ from a stopped
# process does stop), the same, and torch_gloo.
_TWINS = {"nixl", "nixl-staged", "torch_gloo-cupy_pinned"}


def cases(marked: set[str], mark: pytest.MarkDecorator) -> list:
    """Return the same parameters, some of them with a mark; the example's backend has a suite of its own."""
    marks = {**dict.fromkeys(marked, mark), "vmread": pytest.mark.soak}
    return [
        pytest.param(*case.values, id=case.id, marks=[*case.marks, *([marks[case.id]] if case.id in marks else [])])
        for case in backend_cases()
    ]


# What -O could take away stands in the core, which one two-sided and one one-sided backend meet as well as all do,
# and in the plugins, whose own tests run under it too.
_NOT_OPTIMIZED = _TWINS | {"torch_nccl", "pynccl"}

every_backend = pytest.mark.parametrize("backend", cases(_NOT_OPTIMIZED, pytest.mark.slow))
every_backend_under_faults = pytest.mark.parametrize("backend", cases(_TWINS, pytest.mark.soak))
