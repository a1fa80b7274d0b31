"""The backend's options."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class NixlOptions(BaseModel):
    """Options of the ``nixl`` backend: ``Communicator(..., options={"mode": "staged"})``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backends: tuple[str, ...] = Field(
        default=("UCX",),
        min_length=1,
        description="NIXL backends (plugins of NIXL's own) to create; the same on every rank.",
    )
    num_threads: int = Field(
        default=0,
        ge=0,
        description="Transfer threads that NIXL starts for its UCX backend; 0 moves bytes in the calling thread.",
    )
    progress_thread: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="NIXL's own progress thread. auto is off: the core pumps progress while it waits, and a second "
        "thread polling beside the copies costs bandwidth where cores are scarce.",
    )
    mode: Literal["auto", "zero_copy", "staged"] = Field(
        default="auto",
        description="zero_copy: peers read live weights. staged: rows are copied into registered send buffers first, "
        "for weights in memory that cannot be registered. auto: zero_copy where the weights can be registered.",
    )
    spin_s: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Seconds that a wait polls without sleeping before it backs off.",
    )
    poll_limit_s: float = Field(
        default=0.0005,
        gt=0,
        le=0.1,
        description="Longest sleep between two polls of a wait, seconds.",
    )
    require_transport: tuple[str, ...] = Field(
        default=(),
        description="UCX transports, by the names that UCX_TLS takes, that alone may carry the bytes; the same on "
        "every rank. One is handed to UCX, which then has no other; several must stand in UCX_TLS, for UCX takes a "
        "list from the environment only. A READ must succeed over them at start-up. Empty leaves the choice to UCX.",
    )

    @field_validator("backends", "require_transport", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(filter(None, (each.strip() for each in value.split(",")))) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _only_ucx_names_transports(self) -> NixlOptions:
        if self.require_transport and self.backends != ("UCX",):
            raise ValueError("require_transport names UCX transports, so backends must be UCX alone")
        return self
