"""The options of ``torch_gloo``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

COALESCE_NBYTES = 256 * 1024
"""Measured on loopback: a message costs about 100 us, so below this size packing rows is the cheaper of the two."""


class GlooOptions(BaseModel):
    """Options of ``torch_gloo``; both must be equal on all ranks, which is checked at connect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: int = Field(
        1,
        ge=1,
        le=16,
        description="Threads that move bytes, each with a connection of its own to every peer. One keeps up with about "
        "1.5 GB/s in each direction; raise it for a faster link and spare cores.",
    )
    coalesce_nbytes: int = Field(
        COALESCE_NBYTES,
        ge=0,
        description="Rows of fewer bytes are copied together and travel as one message per peer; larger ones, and all "
        "rows with 0, leave from the weights themselves, one message each.",
    )
