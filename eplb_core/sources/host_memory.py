"""A source in host memory: copies of experts that a host keeps beside its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from eplb_core.errors import ConfigError
from eplb_core.sources.provider import ByteArray, byte_rows

if TYPE_CHECKING:
    import torch


class HostMemorySource:
    """Copies of experts in host memory.

    Parameters
    ----------
    experts : mapping of (int, int) to sequence of torch.Tensor
        (layer, logical expert) to its rows, ``[num_tensors]``, each shaped like one expert of the registered tensor, on
        the CPU and contiguous. Kept as it is: what is added later is found, and no copy is made.

    Raises
    ------
    ConfigError
        A tensor is on a device, or not contiguous (EPLB-C016).
    """

    def __init__(self, experts: Mapping[tuple[int, int], Sequence[torch.Tensor]]) -> None:
        self._experts = experts
        for (layer, expert), rows in experts.items():
            for number, row in enumerate(rows):
                if row.device.type != "cpu" or not row.is_contiguous():
                    found = f"on {row.device}" if row.device.type != "cpu" else "not contiguous"
                    problem = f"tensor {number} of layer {layer}, expert {expert} is {found}"
                    raise ConfigError("EPLB-C016", source="host memory", problem=problem)

    def __repr__(self) -> str:
        return f"HostMemorySource({len(self._experts)} experts)"

    def holds(self, layer: int, expert: int) -> bool:
        """See `SourceProvider`."""
        return (layer, expert) in self._experts

    def read(self, layer: int, tensor: int, expert: int, out: ByteArray) -> None:
        """See `SourceProvider`; ValueError where its row has another size."""
        row = byte_rows(self._experts[layer, expert][tensor][None])[0]
        if row.size != out.size:
            raise ValueError(f"its row has {row.size} bytes where {out.size} are registered")
        out[:] = row
