"""Options of the backend, checked before it is built."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class VmReadOptions(BaseModel):
    """Options of vmread."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    readers: Literal["auto", "siblings", "any", "unchanged"] = Field(
        default="auto",
        description="whom Yama is told may read this process, where it is at ptrace_scope=1: the descendants of this "
        "process's parent (siblings), every process of the same user (any), or nobody (unchanged); auto is siblings",
    )
