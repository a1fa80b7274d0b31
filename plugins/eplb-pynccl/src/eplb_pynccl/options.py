"""The options of ``pynccl``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PyNcclOptions(BaseModel):
    """Options of ``pynccl``; each rank may have its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    binding: Literal["auto", "nccl4py", "cupy"] = Field(
        "auto",
        description="What calls NCCL: nccl4py, or cupy.cuda.nccl; auto takes nccl4py where it is installed. "
        "CuPy blocks: a member that never comes to connect leaves a thread blocked in NCCL.",
    )
    library: str | None = Field(
        None,
        description="Path of the libnccl.so.2 to use; unset leaves the search to the binding. A process has one: where "
        "torch has loaded its own already, that one is used.",
    )
