"""The configuration of load balancing: fields, defaults and limits, checked without a look at any plugin."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eplb_core.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


class EPLBConfig(BaseModel):
    """What a host sets. A vLLM ``--eplb-config`` JSON loads as it is: ``EPLBConfig.model_validate_json(text)``.

    Frozen, unknown keys refused. Whether the backend, staging allocator or policy that is named exists and fits is no
    question of the configuration; `eplb_core.select` and `eplb_core.Communicator` answer it from what plugins declare.

    Raises
    ------
    ConfigError
        EPLB-C001, -C002 or -C003, also from ``model_validate``, ``model_validate_json``, ``model_validate_strings``,
        ``model_copy`` (whose update is validated here) and assignment. It is a ValueError, and its ``__cause__`` is
        pydantic's own error. Inside another pydantic model the error is that model's, as for any ValueError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    window_size: int = Field(
        default=1000, gt=0, description="Forward steps before a rearrangement whose expert load counts."
    )
    step_interval: int = Field(default=3000, gt=0, description="Forward steps from one rearrangement to the next.")
    num_redundant_experts: int = Field(
        default=0, ge=0, description="Physical experts per MoE layer beyond the logical ones."
    )
    log_balancedness: bool = Field(
        default=False,
        description="Log balancedness, the mean over the maximum of tokens per rank, on the lowest rank: of the"
        " placement that holds, under the load of all ranks that was gathered last.",
    )
    log_balancedness_interval: int = Field(
        default=1,
        description="Forward steps between two balancedness lines; above 0 with log_balancedness.",
    )
    use_async: bool = Field(
        default=True,
        description="Rearrange from a worker thread while the model serves: only backends that declare themselves safe"
        " beside running kernels are taken.",
    )
    policy: str = Field(
        default="default",
        min_length=1,
        description="Placement policy, which must be installed; any but 'default' needs use_async=False.",
    )
    communicator: str | None = Field(
        default=None, min_length=1, description="Backend that moves the weights; None chooses the best usable one."
    )
    enable_migration_batching: bool = Field(
        default=False, description="At most one peer per rank and batch, for backends that move in batches."
    )
    timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False, description="Limit of each wait, seconds.")
    staging_layers: int = Field(
        default=2, ge=1, le=2, description="Landing slots; with 2, layer k+1 moves while layer k is decided."
    )
    staging: str | None = Field(
        default=None, min_length=1, description="Staging allocator for landing and send memory; None is torch's own."
    )
    max_ops_per_batch: int = Field(
        default=32, ge=1, description="Sends and receives per rank and batch, for backends that move in batches."
    )
    on_failure: Literal["raise", "keep"] = Field(
        default="raise",
        description="Of a LoadBalancer whose rearrangement failed: 'raise' at its next step, or log it, 'keep' the old"
        " placement, rebuild, and try again at the next interval.",
    )
    fallback: str | None = Field(
        default=None,
        min_length=1,
        description="Backend to take, with a warning, where the one named is not available on this machine, or nothing"
        " can be chosen automatically; also where a LoadBalancer's rearrangement failed twice in a row. None takes no"
        " other.",
    )
    elastic: bool = Field(
        default=False,
        description="Take only backends whose ranks may join later (elastic_safe), as a communicator that is to get a"
        " successor needs.",
    )
    max_bandwidth_gbps: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Gbit/s that a rank receives at most, on average, while a LoadBalancer moves weights in the"
        " background; None is as fast as it goes.",
    )

    @field_validator(
        "window_size",
        "step_interval",
        "num_redundant_experts",
        "log_balancedness_interval",
        "timeout_s",
        "staging_layers",
        "max_ops_per_batch",
        "max_bandwidth_gbps",
        mode="before",
    )
    @classmethod
    def _refuse_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):  # pydantic would read True as 1
            raise ValueError("should be a number")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.use_async and self.policy != "default":
            raise ConfigError("EPLB-C002", detail=f"policy={self.policy!r}: set use_async=False to use it.")
        if self.log_balancedness and self.log_balancedness_interval <= 0:
            raise ConfigError("EPLB-C003", detail=f"It is {self.log_balancedness_interval}.")
        if self.fallback is not None and self.fallback == self.communicator:
            raise ConfigError("EPLB-C001", problem=f"fallback and communicator are both {self.fallback!r}")
        return self

    # Hidden from type checkers, which otherwise would take the fields' names and types for arbitrary ones.
    if not TYPE_CHECKING:

        def __init__(self, /, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise _as_config_error(error) from error

        def __setattr__(self, name: str, value: Any) -> None:
            try:
                super().__setattr__(name, value)
            except ValidationError as error:
                raise _as_config_error(error) from error

        def __delattr__(self, name: str) -> None:
            try:
                super().__delattr__(name)
            except ValidationError as error:
                raise _as_config_error(error) from error

        @classmethod
        def model_validate(cls, obj: Any, **options: Any) -> Self:
            try:
                return super().model_validate(obj, **options)
            except ValidationError as error:
                raise _as_config_error(error) from error

        @classmethod
        def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
            try:
                return super().model_validate_json(json_data, **options)
            except ValidationError as error:
                raise _as_config_error(error) from error

        @classmethod
        def model_validate_strings(cls, obj: Any, **options: Any) -> Self:
            try:
                return super().model_validate_strings(obj, **options)
            except ValidationError as error:
                raise _as_config_error(error) from error

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed, validated like a new one."""
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | dict(update or {}))


def _as_config_error(error: ValidationError) -> ConfigError:
    problems = error.errors(include_url=False)
    for problem in problems:
        inner = problem.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            return inner
    return ConfigError("EPLB-C001", problem="; ".join(_said(problem) for problem in problems))


def _said(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, EPLBConfig.model_fields, n=1)
        return f"unknown key {key!r}" + (f" (did you mean {close[0]!r}?)" if close else "")
    if problem["type"] == "frozen_instance":
        return f"{key} cannot be changed, the configuration is frozen; use model_copy(update=...)"
    text = problem["msg"].removeprefix("Value error, ").replace("Input should", "should" if key else "input should", 1)
    value = f", got {problem['input']!r}" if key else ""
    return f"{key} {text}{value}".strip()
