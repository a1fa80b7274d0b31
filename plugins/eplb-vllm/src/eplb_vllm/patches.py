"""The functions that vLLM runs instead of its own, and how they get there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from eplb_vllm import known

_MARK = "_eplb_vllm_original"


def patch() -> None:
    """Replace vLLM's functions, all or none; where they are not those that are known, warn once and leave them."""
    from vllm.logger import init_logger

    logger = init_logger("vllm.plugins.eplb_vllm")
    state = import_module(known.STATE)
    if hasattr(state._move_to_workspace, _MARK):
        return
    difference = known.first_difference()
    if difference is not None:
        logger.warning(
            "eplb-vllm: this vLLM is not one that it knows (%s): %s. vLLM stays as it is, and"
            ' additional_config["eplb_core"] has no effect.',
            known.VERSIONS,
            difference,
        )
        return
    try:
        from eplb_vllm import seam
    except Exception as error:  # vLLM's own import is under way, and is not to fail with ours
        logger.warning(
            "eplb-vllm: it cannot be loaded: %s: %s. vLLM stays as it is, and"
            ' additional_config["eplb_core"] has no effect.',
            type(error).__name__,
            error,
        )
        return
    for name, (_, modules) in known.PATCHED.items():
        original = getattr(import_module(modules[0]), name)
        function = _standing_for(original, getattr(seam, name))
        for module in modules:
            setattr(import_module(module), name, function)
    for name in known.METHODS:
        original = getattr(state.EplbState, name)
        setattr(state.EplbState, name, _standing_for(original, getattr(seam, name)))


def unpatch() -> None:
    """Give vLLM its own functions back, for tests."""
    state = import_module(known.STATE)
    for name, (_, modules) in known.PATCHED.items():
        for module in map(import_module, modules):
            with suppress(AttributeError):
                setattr(module, name, getattr(getattr(module, name), _MARK))
    for name in known.METHODS:
        with suppress(AttributeError):
            setattr(state.EplbState, name, getattr(getattr(state.EplbState, name), _MARK))


def _standing_for(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    from functools import wraps

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(function, _MARK, original)
    return function
