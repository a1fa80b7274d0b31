"""Expert tensors whose contents can be checked: allocated, filled from a source, and compared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from eplb_core.sources.provider import ByteArray, byte_rows
from eplb_core.sources.specs import TensorSpec
from eplb_core.testing.known_bytes import known_bytes

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int64]


class ExpertSource(Protocol):
    """Source of the right bytes of every logical expert, at any time, on any rank."""

    @property
    def num_experts(self) -> int:
        """Logical experts of every layer."""
        ...

    @property
    def specs(self) -> Sequence[tuple[TensorSpec, ...]]:
        """The tensors of each layer."""
        ...

    def write(self, layer: int, tensor: int, expert: int, out: ByteArray) -> None:
        """Write one expert's row, uint8 ``[nbytes]``, into `out`."""
        ...


class GeneratedExperts:
    """Pseudo-random experts: any bit pattern may occur, NaNs included, and no two rows are alike.

    Parameters
    ----------
    specs : sequence of tuple of TensorSpec
        The tensors of each layer.
    num_experts : int
        Logical experts of every layer.
    seed : int
        The same on every rank; a row follows from (seed, layer, tensor, expert).
    """

    def __init__(self, specs: Sequence[tuple[TensorSpec, ...]], num_experts: int, seed: int) -> None:
        self.specs = specs
        self.num_experts = num_experts
        self._seed = seed

    def write(self, layer: int, tensor: int, expert: int, out: ByteArray) -> None:
        """Write one expert's row; see `ExpertSource`."""
        out[:] = known_bytes(layer, tensor, expert, out.size, self._seed)


@dataclass(frozen=True)
class WrongRow:
    """A row that does not hold the logical expert that the map puts there."""

    layer: int
    tensor: str
    row: int
    expert: int
    offset: int

    def __str__(self) -> str:
        return f"layer {self.layer} {self.tensor} row {self.row}: not expert {self.expert} from byte {self.offset} on"


@dataclass(frozen=True)
class Verification:
    """Result of a check of every row.

    Parameters
    ----------
    num_rows, nbytes : int
        Rows and bytes compared.
    wrong : tuple of WrongRow
        Rows that differ, in order.
    """

    num_rows: int
    nbytes: int
    wrong: tuple[WrongRow, ...]


def allocate(specs: Sequence[tuple[TensorSpec, ...]], num_local_physical_experts: int) -> list[list[torch.Tensor]]:
    """Allocate one rank's expert tensors on the CPU.

    Parameters
    ----------
    specs : sequence of tuple of TensorSpec
        The tensors of each layer.
    num_local_physical_experts : int
        Rows of every tensor.

    Returns
    -------
    list of list of torch.Tensor
        ``[num_layers][num_tensors]``, each ``[num_local_physical_experts, *spec.shape]``, uninitialised.
    """
    import torch

    return [
        [torch.empty((num_local_physical_experts, *spec.shape), dtype=getattr(torch, spec.dtype)) for spec in layer]
        for layer in specs
    ]


def fill(
    source: ExpertSource,
    weights: Sequence[Sequence[torch.Tensor]],
    local_map: IntArray,
    on_layer: Callable[[int], None] | None = None,
) -> None:
    """Load a rank's rows.

    Parameters
    ----------
    source : ExpertSource
        Where the bytes come from.
    weights : sequence of sequence of torch.Tensor
        As `allocate` returns them.
    local_map : IntArray
        ``[num_layers, num_local_physical_experts]``, logical expert of each row, -1 for none.
    on_layer : callable, optional
        Called with the number of layers done.
    """
    for layer, tensors in enumerate(weights):
        for index, tensor in enumerate(tensors):
            rows = byte_rows(tensor)
            for row, expert in enumerate(local_map[layer].tolist()):
                if expert >= 0:
                    source.write(layer, index, expert, rows[row])
        if on_layer is not None:
            on_layer(layer + 1)


def verify(
    source: ExpertSource,
    weights: Sequence[Sequence[torch.Tensor]],
    local_map: IntArray,
    on_layer: Callable[[int], None] | None = None,
) -> Verification:
    """Compare every byte of a rank's rows with the experts that the map puts there.

    Parameters
    ----------
    source, weights, local_map, on_layer
        See `fill`.

    Returns
    -------
    Verification
        Result; empty slots (-1) are not counted.
    """
    num_rows = nbytes = 0
    wrong: list[WrongRow] = []
    for layer, tensors in enumerate(weights):
        for index, tensor in enumerate(tensors):
            rows = byte_rows(tensor)
            expected = np.empty(rows.shape[1], np.uint8)
            for row, expert in enumerate(local_map[layer].tolist()):
                if expert < 0:
                    continue
                source.write(layer, index, expert, expected)
                num_rows += 1
                nbytes += expected.size
                if not np.array_equal(rows[row], expected):
                    offset = int(np.argmax(rows[row] != expected))
                    wrong.append(WrongRow(layer, source.specs[layer][index].name, row, expert, offset))
        if on_layer is not None:
            on_layer(layer + 1)
    return Verification(num_rows, nbytes, tuple(wrong))
