"""Expert parallelism: a layer's experts stand on several ranks; tokens are sent to them, and their results back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from eplb_core.balancing import routing_tables
from experts import LoadedExperts, apply_experts, weighted_sum

IntArray = npt.NDArray[np.int64]


class ExpertParallelExperts(torch.nn.Module):
    """Takes the place of a layer's `Qwen3MoeExperts`: same call, same results, and only this rank's experts in memory.

    Parameters
    ----------
    loaded : LoadedExperts
        The layer's `Qwen3MoeExperts`, which may be dropped afterwards.
    row : IntArray
        Logical expert of every physical one, [num_physical_experts].
    group : dist.ProcessGroup or None
        Expert-parallel group, for the tokens; None is the default one.
    """

    def __init__(self, loaded: LoadedExperts, row: IntArray, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.num_experts = len(loaded.down_proj)
        self.num_local = len(row) // self.world_size
        mine = torch.from_numpy(row[self.rank * self.num_local : (self.rank + 1) * self.num_local])
        # What moves. Tensors as any engine has them: first axis the local physical expert.
        self.gate_up_proj = loaded.gate_up_proj.detach()[mine]
        self.down_proj = loaded.down_proj.detach()[mine]
        self.activation = loaded.act_fn
        self.counts = torch.zeros(len(row), dtype=torch.int64)
        """Tokens of this rank for each physical expert, in the last forward step."""
        self.place(row)

    def place(self, row: IntArray) -> None:
        """Route by this row of the map from now on."""
        tables = routing_tables(row[None], self.num_experts)
        self.slots = torch.from_numpy(tables.logical_to_physical_map[0])
        self.replicas = torch.from_numpy(tables.logical_replica_count[0])

    def forward(self, tokens: torch.Tensor, top_k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Collective: every rank calls it for every layer of every forward step, with no tokens if it has none."""
        # Replicas of an expert take turns, and ranks begin at different ones.
        turn = torch.arange(self.rank, self.rank + len(top_k))[:, None] % self.replicas[top_k]
        slots = self.slots[top_k, turn].reshape(-1)
        self.counts = torch.bincount(slots, minlength=len(self.counts))
        arriving = torch.empty_like(self.counts)
        dist.all_to_all_single(arriving, self.counts, group=self.group)
        sent = self.load_of_ranks().tolist()
        received = arriving.view(self.world_size, -1).sum(dim=1).tolist()
        # Sorted by slot, tokens lie together by rank, and the counts say for which slot a token is.
        order = slots.argsort(stable=True)
        here = self._exchange(tokens[order // top_k.shape[1]], received, sent)
        local = torch.arange(self.num_local).repeat(self.world_size).repeat_interleave(arriving)
        done = apply_experts(here, local, self.gate_up_proj, self.down_proj, self.activation)
        results = tokens.new_empty(len(slots), tokens.shape[1])
        results[order] = self._exchange(done, sent, received)
        return weighted_sum(results, weights)

    def load_of_ranks(self) -> torch.Tensor:
        """Return this rank's tokens for the experts of each rank, in the last forward step: int64 [world_size]."""
        return self.counts.view(self.world_size, -1).sum(dim=1)

    def idle(self) -> None:
        """Take part in a forward step for the others' tokens."""
        nothing = torch.empty(0, 1, dtype=torch.int64)
        self(self.down_proj.new_empty(0, self.down_proj.shape[1]), nothing, self.down_proj.new_empty(0, 1))

    def _exchange(self, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows, received, sent, group=self.group)
        return arrived
