"""The options of ``torch_nccl``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TorchNcclOptions(BaseModel):
    """``torch_nccl`` takes none: everything is settled by the group that the host passes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
