"""A model whose every byte is known: expert e of tensor t in layer l has bytes that follow from (l, t, e) alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from eplb_core.testing.known_bytes import known_bytes

Map = npt.NDArray[np.int64]


class Model:
    """The experts of one rank.

    Parameters
    ----------
    rank : int
        Rank that holds these weights.
    num_rows : int
        Physical experts per rank.
    row_nbytes : sequence of sequence of int
        ``[num_layers][num_tensors]``.
    device : str
        Device of the weights.
    version : int
        Other bytes for every expert, for weights that the host changes.
    """

    def __init__(
        self, rank: int, num_rows: int, row_nbytes: Sequence[Sequence[int]], device: str = "cpu", version: int = 0
    ) -> None:
        self.rank = rank
        self.num_rows = num_rows
        self.version = version
        self.device = device
        self.weights = [
            [torch.empty(num_rows, n, dtype=torch.uint8, device=device) for n in layer] for layer in row_nbytes
        ]

    def fill(self, mapping: Map) -> None:
        """Give every row the bytes of the expert that the map puts there."""
        for layer, tensor, row, expert in self._rows(mapping):
            self.weights[layer][tensor][row] = torch.from_numpy(self.content(layer, tensor, expert))

    def wrong_rows(self, mapping: Map) -> list[tuple[int, int, int]]:
        """Return (layer, tensor, row) of every row that is not the map's; empty slots may hold anything."""
        wrong = []
        for layer, tensor, row, expert in self._rows(mapping):
            if not np.array_equal(self.weights[layer][tensor][row].cpu().numpy(), self.content(layer, tensor, expert)):
                wrong.append((layer, tensor, row))
        return wrong

    def content(self, layer: int, tensor: int, expert: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of an expert."""
        nbytes = self.weights[layer][tensor].shape[1]
        return known_bytes(layer, tensor, expert, nbytes, self.version)

    def _rows(self, mapping: Map) -> Iterator[tuple[int, int, int, int]]:
        for layer, tensors in enumerate(self.weights):
            experts = mapping[layer, self.rank * self.num_rows : (self.rank + 1) * self.num_rows]
            for tensor in range(len(tensors)):
                for row, expert in enumerate(experts.tolist()):
                    if expert >= 0:
                        yield layer, tensor, row, expert


def shuffles(
    count: int, num_layers: int, world_size: int, num_rows: int, *, redundant: int = 0, seed: int = 0
) -> list[Map]:
    """Return placements, each int64 ``[num_layers, world_size * num_rows]``, shuffled independently per layer."""
    rng = np.random.default_rng(seed)
    physical = world_size * num_rows
    logical = physical - redundant
    base = np.concatenate([np.arange(logical), np.arange(redundant) % logical])
    return [np.stack([rng.permutation(base) for _ in range(num_layers)]) for _ in range(count)]
