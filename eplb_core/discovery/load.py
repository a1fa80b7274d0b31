"""Loading of one plugin in isolation: its hook module, its descriptors checked field by field, what they name."""

from __future__ import annotations

import dataclasses
import difflib
import re
import reprlib
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import pluggy

from eplb_core.backend import API_VERSION, BackendInfo, PolicyInfo, StagingInfo
from eplb_core.errors import DiscoveryError
from eplb_core.hookspecs import PROJECT, DiscoverySpec

T = TypeVar("T")
Info = BackendInfo | StagingInfo | PolicyInfo
Offer = tuple[str, Info]
"""A kind ("backend", "staging" or "policy") and a descriptor of it."""

_KINDS: tuple[tuple[str, str, type[Any]], ...] = (
    ("backend", "eplb_register_backends", BackendInfo),
    ("staging", "eplb_register_staging", StagingInfo),
    ("policy", "eplb_register_policies", PolicyInfo),
)


class PluginRejectedError(Exception):
    """The reason why a plugin, or one of its offers, is not used."""


class PluginRaisedError(PluginRejectedError):
    """Code of a plugin raised; ``__cause__`` is the original exception."""


def contained(doing: str, call: Callable[[], T]) -> T:
    """Run a plugin's code so that nothing it raises, ``SystemExit`` included, ends the host.

    Notes
    -----
    What is raised becomes `PluginRaisedError`, with ``doing`` in its message. ``KeyboardInterrupt`` is the user's and
    passes, and so does `PluginRejectedError`, which says more.
    """
    try:
        return call()
    except (KeyboardInterrupt, PluginRejectedError):
        raise
    except BaseException as error:
        try:
            text = one_line(str(error))
        except Exception:  # a stranger's __str__
            text = "(its message cannot be printed)"
        raise PluginRaisedError(f"{doing} raised {type(error).__name__}{': ' if text else ''}{text}") from error


def one_line(text: str) -> str:
    """Fold a text into one line without a closing full stop, fit to stand inside a sentence."""
    return " ".join(text.split()).rstrip(".")


def attribute(owner: object, path: str) -> Any:
    """Follow a dotted path of attributes."""
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def discovery_manager() -> pluggy.PluginManager:
    """Build a manager that knows the discovery hooks and no plugin.

    Notes
    -----
    Each plugin gets one of its own: dropping the manager takes back what a failed registration left behind, and no
    plugin's wrapper reaches into what another declares.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(DiscoverySpec)
    return manager


def declared_offers(value: str) -> list[Offer]:
    """Import a plugin's hook module and return what it offers, as (kind, descriptor); else PluginRejectedError.

    Notes
    -----
    There is at least one offer, each of this API version and well-formed, no name twice. ``value`` is the entry
    point's.
    """
    plugin = contained("import", lambda: _load(value))
    manager = discovery_manager()
    contained("registration", lambda: _register(manager, plugin))
    offers = [
        (kind, info)
        for kind, hook, info_class in _KINDS
        if getattr(manager.hook, hook).get_hookimpls()
        for info in contained(hook, lambda: _ask(manager, hook, info_class))  # noqa: B023 - called at once
    ]
    if not offers:
        raise PluginRejectedError("it implements none of the hooks " + ", ".join(hook for _, hook, _ in _KINDS))
    keys = [(kind, info.name) for kind, info in offers]
    for kind, name in keys:
        if keys.count((kind, name)) > 1:
            raise PluginRejectedError(f"it declares the {kind} {name!r} twice")
    return offers


def _load(value: str) -> object:
    match = re.fullmatch(r"\s*([\w.]+)\s*(?::\s*([\w.]+)\s*)?(?:\[[^\]]*\]\s*)?", value)
    if match is None:
        raise PluginRejectedError(f"the entry point's value {value!r} names no module")
    module = import_module(match[1])
    return attribute(module, match[2]) if match[2] else module


def _register(manager: pluggy.PluginManager, plugin: object) -> None:
    for name in dir(plugin):
        # pluggy passes over a function without the marker in silence.
        if not name.startswith("eplb_register") or not callable(getattr(plugin, name)):
            continue
        if manager.parse_hookimpl_opts(plugin, name) is None:
            raise PluginRejectedError(f"{name} lacks the @hookimpl decorator of eplb_core")
    try:
        manager.register(plugin)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginRejectedError(one_line(str(error)) + _did_you_mean(manager)) from error
    for _, hook, _ in _KINDS:
        if any(impl.wrapper or impl.hookwrapper for impl in getattr(manager.hook, hook).get_hookimpls()):
            raise PluginRejectedError(f"{hook} is a wrapper; discovery hooks only declare")


def _did_you_mean(manager: pluggy.PluginManager) -> str:
    known = [hook for _, hook, _ in _KINDS]
    unknown = [name for name in vars(manager.hook) if not name.startswith("_") and name not in known]
    close = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
    return f"; did you mean {close[0]!r}?" if close else ""


def _ask(manager: pluggy.PluginManager, hook: str, info_class: type[Any]) -> list[Info]:
    expected = f"{info_class.__name__} or a list of them"
    results = getattr(manager.hook, hook)()
    if not results:  # pluggy leaves None out
        raise PluginRejectedError(f"{hook} returned None, expected {expected}")
    is_list = isinstance(results[0], list)
    infos: list[Info] = results[0] if is_list else results
    if not infos:
        raise PluginRejectedError(f"{hook} returned an empty list, expected {expected}")
    for info in infos:
        if not isinstance(info, info_class):
            holding = "a list that holds " if is_list else ""
            raise PluginRejectedError(f"{hook} returned {holding}{type(info).__name__}, expected {expected}")
        # Before all other fields: another version of the contract may give them another meaning.
        if type(info.api_version) is not int or info.api_version != API_VERSION:
            raise PluginRejectedError(f"expected API {API_VERSION}, got {reprlib.repr(info.api_version)}")
        problem = malformed(info)
        if problem is not None:
            raise PluginRejectedError(problem)
    return infos


def malformed(info: Info) -> str | None:
    """Say which field of a descriptor does not hold what its class says it holds, or None."""
    for declared in dataclasses.fields(info):
        if declared.name in _FIELDS:
            expected, fits = _FIELDS[declared.name]
            value = getattr(info, declared.name)
            if not fits(value):
                return f"{type(info).__name__}.{declared.name} must be {expected}, got {reprlib.repr(value)}"
    return None


def is_target(value: object) -> bool:
    """Tell whether `value` has the form ``"module:Class"``."""
    module, colon, path = value.partition(":") if isinstance(value, str) else ("", "", "")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *path.split(".")])


def _is_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is not None


def _is_line(value: object) -> bool:
    return isinstance(value, str) and len(value.splitlines()) <= 1


def _is_filled_line(value: object) -> bool:
    return isinstance(value, str) and _is_line(value) and bool(value.strip())


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_memory(value: object) -> bool:
    return isinstance(value, str) and value in ("host", "device", "any")


def _is_options(value: object) -> bool:
    # A model class exists only where pydantic is imported already; importing it here would cost every discovery 0.1 s.
    pydantic = sys.modules.get("pydantic")
    is_model = pydantic is not None and isinstance(value, type) and issubclass(value, pydantic.BaseModel)
    return value is None or is_model or is_target(value)


def _is_priority(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _are_device_types(value: object) -> bool:
    is_filled = isinstance(value, tuple) and len(value) > 0
    return is_filled and all(isinstance(word, str) and (word == "*" or word.isidentifier()) for word in value)  # type: ignore[attr-defined]


def _are_modules(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(name, str) and all(part.isidentifier() for part in name.split(".")) for name in value
    )


_FIELDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "name": ("letters, digits, '.', '_' and '-'", _is_name),
    "summary": ("one line of text", _is_filled_line),
    "target": ("of the form 'module:Class'", is_target),
    "options": ("a pydantic model, 'module:Class' or None", _is_options),
    "async_safe": ("True, False or None", lambda value: value is None or _is_bool(value)),
    "async_reason": ("one line of text", _is_line),
    "label": ("one line of text", _is_line),
    "device_types": ("a tuple of torch device types or ('*',)", _are_device_types),
    "elastic_safe": ("True or False", _is_bool),
    "zero_copy": ("True or False", _is_bool),
    "batched": ("True or False", _is_bool),
    "auto_priority": ("an integer from 0 on or None", _is_priority),
    "memory": ("'host', 'device' or 'any'", _is_memory),
    "requires": ("a tuple of module names", _are_modules),
    "install_hint": ("one line of text", _is_line),
    "available": ("callable or None", lambda value: value is None or callable(value)),
}


def load_target(target: str) -> Any:
    """Import what a descriptor names as ``"module:Class"``; EPLB-D006 from whatever that raises."""
    if not is_target(target):
        raise DiscoveryError("EPLB-D006", target=target, reason="it is not of the form 'module:Class'")
    module, _, path = target.partition(":")
    try:
        return contained("import", lambda: attribute(import_module(module), path))
    except PluginRaisedError as raised:
        raise DiscoveryError("EPLB-D006", target=target, reason=str(raised)) from raised.__cause__
