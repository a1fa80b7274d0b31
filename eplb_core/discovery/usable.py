"""Whether a backend is usable here: rules over what its plugin declares; a rule that excludes it gives a reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import NamedTuple

from eplb_core.backend import BackendInfo
from eplb_core.discovery.load import Info, PluginRaisedError, contained, one_line


class Need(NamedTuple):
    """What a host needs of a backend; see `why_not`."""

    use_async: bool
    device_type: str
    elastic: bool


class Rejection(NamedTuple):
    """The rule that excludes a backend ("async", "device", "elastic" or "available") and the reason it gives."""

    rule: str
    reason: str


def why_not(info: BackendInfo, *, use_async: bool, device_type: str, elastic: bool) -> str | None:
    """Return why a backend is not usable, by the first rule of async, device, elastic, available; None if it is."""
    rejection = first_rejection(info, need_of(use_async, device_type, elastic))
    return None if rejection is None else rejection.reason


def need_of(use_async: bool, device_type: str, elastic: bool) -> Need:
    """Build a `Need`; the index of "cuda:1" is dropped."""
    return Need(use_async, str(device_type).partition(":")[0], elastic)


def first_rejection(info: BackendInfo, need: Need, *, declared_only: bool = False) -> Rejection | None:
    """Return the first rule that excludes a backend, or None.

    Notes
    -----
    ``declared_only`` leaves out the rule "available", the only one that calls a plugin's code.
    """
    for name, rule in _DECLARED if declared_only else _RULES:
        reason = rule(info, need)
        if reason is not None:
            return Rejection(name, reason)
    return None


def why_unavailable(info: Info) -> str | None:
    """Return why a backend, staging allocator or policy is not available on this machine, or None.

    Notes
    -----
    It looks for the required modules and calls ``available``; an exception becomes the reason.
    """
    try:
        missing = contained("looking for its modules", lambda: [m for m in info.requires if not _is_importable(m)])
        if missing:
            return f"{missing[0]} is not installed"
        if info.available is None:
            return None
        answer: object = contained("its available()", info.available)
    except PluginRaisedError as raised:
        return str(raised)
    if answer is None:
        return None
    if isinstance(answer, str) and answer.strip():
        return one_line(answer)
    return f"its available() returned {type(answer).__name__}, neither None nor a reason"


def async_problem(info: BackendInfo) -> str:
    """Say what makes a backend unsafe beside the model's own kernels."""
    if info.async_safe is None:
        return "undeclared async safety"
    return info.async_reason or "its plugin's declaration async_safe=False"


def _rule_async(info: BackendInfo, need: Need) -> str | None:
    return f"incompatible with async EPLB: {async_problem(info)}" if need.use_async and not info.async_safe else None


def _rule_device(info: BackendInfo, need: Need) -> str | None:
    if "*" in info.device_types or need.device_type in info.device_types:
        return None
    return f"it moves weights on {', '.join(info.device_types)}, not on {need.device_type}"


def why_not_elastic(info: BackendInfo) -> str | None:
    """Return why a communicator of this backend cannot get a successor, or None."""
    return None if info.elastic_safe else "ranks cannot join after connect (not elastic_safe)"


def _rule_elastic(info: BackendInfo, need: Need) -> str | None:
    return why_not_elastic(info) if need.elastic else None


def _rule_available(info: BackendInfo, need: Need) -> str | None:  # noqa: ARG001 - one signature for all rules
    return why_unavailable(info)


Rule = Callable[[BackendInfo, Need], "str | None"]
_DECLARED: tuple[tuple[str, Rule], ...] = (("async", _rule_async), ("device", _rule_device), ("elastic", _rule_elastic))
_RULES = (*_DECLARED, ("available", _rule_available))


def _is_importable(name: str) -> bool:
    # importlib.util.find_spec of a submodule imports the package around it: the very library that must not be loaded.
    package, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # imported already, without a spec
        return True
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec is not None
