"""What the user asked for: ``additional_config["eplb_core"]`` beside vLLM's own ``--eplb-config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from eplb_core import EPLBConfig
from eplb_core.errors import ConfigError

KEY = "eplb_core"

_OURS = ("landing", "host", "options")
_CORES = ("communicator", "timeout_s", "staging", "staging_layers", "on_failure")


@dataclass(frozen=True)
class Settings:
    """Checked settings of one engine process.

    Parameters
    ----------
    config : EPLBConfig
        vLLM's ``--eplb-config``, with the fields that the key sets itself. Its ``on_failure`` says what becomes of a
        rearrangement that failed: "keep" drops it, "raise" stops the engine.
    landing : "vllm" or "own"
        Where rows land: in vLLM's expert buffer, where the backend can, or in memory of the core's own.
    host : str or None
        Address at which the other ranks reach this one; None asks vLLM.
    options : Mapping or None
        Options of the backend.
    slots_chosen : bool
        Was ``staging_layers`` given?
    """

    config: EPLBConfig
    landing: Literal["vllm", "own"] = "vllm"
    host: str | None = None
    options: Mapping[str, Any] | None = None
    slots_chosen: bool = False


def read_settings(additional_config: object, eplb_config: Any, backend: str) -> Settings | None:
    """Read the settings from vLLM's configuration; None where the key is absent, and vLLM's own code is to run.

    Parameters
    ----------
    additional_config : object
        ``VllmConfig.additional_config``.
    eplb_config : dataclass
        ``ParallelConfig.eplb_config``.
    backend : str
        The communicator that vLLM would build; names are the same.

    Returns
    -------
    Settings or None

    Raises
    ------
    ConfigError
        A key is unknown or has a value that does not fit (EPLB-C001), or vLLM's own fields do not fit the core.
    """
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _refused(f"should be an object such as {{}}, got {given!r}")
    vllms = dataclasses.asdict(eplb_config)
    for key in given:
        if key in vllms and key not in _CORES:
            raise _refused(f"holds {key!r}, which belongs into --eplb-config")
    cores = {key: value for key, value in given.items() if key not in _OURS}
    for key in sorted((set(cores) - set(_CORES)) & set(EPLBConfig.model_fields)):
        raise _refused(f"holds {key!r}, which has no effect with vLLM")
    # What is unknown is refused by EPLBConfig, with the name that was probably meant.
    config = EPLBConfig(**{**vllms, "communicator": backend, "on_failure": "keep", **cores})
    landing, host, options = given.get("landing", "vllm"), given.get("host"), given.get("options")
    if landing not in ("vllm", "own"):
        raise _refused(f"landing should be 'vllm' or 'own', got {landing!r}")
    if not (host is None or (isinstance(host, str) and host)):
        raise _refused(f"host should be an address, got {host!r}")
    if not (options is None or isinstance(options, Mapping)):
        raise _refused(f"options should be an object, got {options!r}")
    return Settings(
        config, cast(Literal["vllm", "own"], landing), host, options, slots_chosen="staging_layers" in given
    )


def _refused(problem: str) -> ConfigError:
    return ConfigError("EPLB-C001", problem=f'additional_config["{KEY}"] {problem}')
