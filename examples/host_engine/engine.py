"""One rank of the engine: the dense part of the model whole, its experts over the ranks, a forward step at a time."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from checkpoint import read_checkpoint
from expert_parallel import ExpertParallelExperts
from reference import make_reference
from traffic import Batch, Traffic, Work

IntArray = npt.NDArray[np.int64]

TENSOR_NAMES = ("gate_up_proj", "down_proj")


class Engine:
    """Serves this rank's batches; a forward step is collective.

    Parameters
    ----------
    folder : Path
        The checkpoint.
    traffic : Traffic
        What comes to this rank.
    steps : int
        Most that are served in a row: topics to have a reference for.
    num_redundant_experts : int
        Physical experts of a layer beyond the logical ones.
    group : dist.ProcessGroup or None
        Expert-parallel group; None is the default one.
    """

    def __init__(
        self, folder: Path, traffic: Traffic, steps: int, num_redundant_experts: int, group: dist.ProcessGroup | None
    ) -> None:
        self.model = read_checkpoint(folder)
        self.traffic = traffic
        work = filter(None, map(traffic.at, range(steps)))
        self.reference = make_reference(self.model, traffic, (piece.topic for piece in work))
        config = self.model.config
        # Experts in their order, and the redundant ones from the first on: any placement will do to begin with.
        slots = np.arange(config.num_experts + num_redundant_experts) % config.num_experts
        self.map: IntArray = np.tile(slots, (config.num_hidden_layers, 1))
        self.experts: list[ExpertParallelExperts] = []
        self._checksums = []  # of each layer's logical experts
        for block, row in zip(self.model.model.layers, self.map, strict=True):
            loaded = block.mlp.experts
            self._checksums.append(_checksums(loaded.gate_up_proj.detach(), loaded.down_proj.detach()))
            block.mlp.experts = ExpertParallelExperts(loaded, row, group)
            self.experts.append(block.mlp.experts)
        self.nbytes_of_an_expert = sum(tensor[0].nbytes for tensor in self.weights[0])
        self.nbytes_moved = 0
        """To slots of any rank that changed their experts."""
        self._batch = Batch(traffic.prompts[0])

    @property
    def weights(self) -> list[list[torch.Tensor]]:
        """What moves: [num_moe_layers][num_tensors]."""
        return [[layer.gate_up_proj, layer.down_proj] for layer in self.experts]

    def place(self, layer: int, old_row: IntArray, new_row: IntArray) -> None:
        """Take note that a layer's experts have changed places: an ``on_commit``."""
        self.map[layer] = new_row
        self.experts[layer].place(new_row)
        self.nbytes_moved += int((old_row != new_row).sum()) * self.nbytes_of_an_expert

    def forward(self, work: Work | None) -> torch.Tensor | None:
        """Run a forward step on what there is to do; return the logits, or None where there is nothing."""
        if work is None:
            for layer in self.experts:
                layer.idle()
            return None
        if work.position == 0:
            self._batch = Batch(self.traffic.prompts[work.topic])
        return self._batch.step(self.model)

    def check_weights(self) -> None:
        """Raise unless every slot of this rank holds, to the byte, what the map says."""
        for layer, (experts, row) in enumerate(zip(self.experts, self.map, strict=True)):
            first = experts.rank * experts.num_local
            for slot, checksum in enumerate(_checksums(experts.gate_up_proj, experts.down_proj), first):
                if checksum != self._checksums[layer][row[slot]]:
                    raise RuntimeError(f"layer {layer}: slot {slot} does not hold expert {row[slot]}")


def _checksums(gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> list[int]:
    """Of every expert, both tensors together."""
    pairs = zip(gate_up_proj.view(torch.uint8).numpy(), down_proj.view(torch.uint8).numpy(), strict=True)
    return [zlib.crc32(down, zlib.crc32(gate_up)) for gate_up, down in pairs]
