"""The function in the shape of SGLang's updater, called as SGLang calls its own: a stand-in of the signature only."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import eplb_core as eplb
from eplb_core.testing.ranks import Rank, run_ranks

FOLDER = str(Path(__file__).parents[1] / "examples" / "sglang_seam")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)

from sglang_seam import communicator_over, held_rows, update_expert_weights  # noqa: E402

DENSE, MODEL_LAYERS, LOCAL = 1, 4, 4
"""Layer 0 of the model is dense."""


@dataclass
class Metadata:
    """A stand-in for SGLang's ExpertLocationMetadata."""

    physical_to_logical_map_cpu: torch.Tensor

    def update(self, other: Metadata, update_layer_ids: list[int]) -> None:
        for layer in update_layer_ids:
            self.physical_to_logical_map_cpu[layer] = other.physical_to_logical_map_cpu[layer]


class Updater:
    """A stand-in for SGLang's ExpertLocationUpdater: the arguments of ``update``, and what it does around the move."""

    def __init__(self, comm: eplb.Communicator, old: Metadata) -> None:
        self.comm, self.old = comm, old

    def update(
        self,
        routed_experts_weights_of_layer: dict[int, list[torch.Tensor]],
        new_expert_location_metadata: Metadata,
        update_layer_ids: list[int],
        nnodes: int,
        rank: int,
    ) -> dict[int, tuple[int, ...]]:
        missing = update_expert_weights(
            self.comm,
            routed_experts_weights_of_layer=routed_experts_weights_of_layer,
            old_expert_location_metadata=self.old,
            new_expert_location_metadata=new_expert_location_metadata,
            update_layer_ids=update_layer_ids,
            nnodes=nnodes,
            rank=rank,
        )
        self.old.update(new_expert_location_metadata, update_layer_ids=update_layer_ids)
        return missing


def row(layer: int, expert: int) -> torch.Tensor:
    return torch.full((300,), layer * 100 + expert, dtype=torch.int32)


def moved_in_chunks(rank: Rank) -> None:
    generator = np.random.default_rng(3)
    slots = rank.world_size * LOCAL
    first = torch.from_numpy(np.stack([generator.permutation(slots) for _ in range(MODEL_LAYERS)]))
    last = torch.from_numpy(np.stack([generator.permutation(slots) for _ in range(MODEL_LAYERS)]))
    mine = range(rank.rank * LOCAL, (rank.rank + 1) * LOCAL)
    weights = {
        layer: [torch.stack([row(layer, int(first[layer, slot])) for slot in mine])]
        for layer in range(DENSE, MODEL_LAYERS)
    }
    config = eplb.EPLBConfig(communicator="torch_gloo", use_async=False, timeout_s=20)
    with communicator_over(weights, config, rank.control()) as comm:
        updater = Updater(comm, Metadata(first.clone()))
        wanted = Metadata(last.clone())
        assert updater.update(weights, wanted, [1, 2], nnodes=1, rank=rank.rank) == {}
        assert updater.update(weights, wanted, [3], nnodes=1, rank=rank.rank) == {}
        for layer, (tensor,) in weights.items():
            for local, slot in enumerate(mine):
                assert torch.equal(tensor[local], row(layer, int(last[layer, slot])))

        # An expert that no row holds any more is reported and left to the host, which reads it from disk.
        new = last.clone()
        new[2, 0] = 77
        new[2, 1:] = last[2, 1:].roll(1)
        assert updater.update(weights, Metadata(new), [2], nnodes=1, rank=rank.rank) == {2: (77,)}
        if rank.rank == 0:
            weights[2][0][0] = row(2, 77)
        comm.reloaded(held_rows(updater.old, sorted(weights)))
        turned = updater.old.physical_to_logical_map_cpu.clone()
        turned[2] = turned[2].roll(LOCAL)
        assert updater.update(weights, Metadata(turned), [2], nnodes=1, rank=rank.rank) == {}
        for local, slot in enumerate(mine):
            assert torch.equal(weights[2][0][local], row(2, int(turned[2, slot])))


def test_chunks_of_layers_move_and_experts_that_nobody_holds_are_reported():
    run_ranks(2, moved_in_chunks)


def test_the_function_takes_what_the_updater_is_given():
    given = set(inspect.signature(Updater.update).parameters) - {"self"}
    taken = set(inspect.signature(update_expert_weights).parameters)
    assert given <= taken
