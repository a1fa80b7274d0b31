"""Landing rows as NIXL's local side of a READ: one prepared list per slot and geometry, made when first needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from eplb_core.backend import Buffers, TransferPlan
from eplb_nixl.agent import Agent
from eplb_nixl.descriptors import IndexArray, blocks_of
from eplb_nixl.registration import device_index_of, memory_type_of


class Landing:
    """Where rows land.

    A plan says where each row lands, so its grids (tensor base plus destination row times row bytes) are read off the
    plan. Plans of one geometry share the list; there are as many lists as slots times distinct layer geometries.

    Parameters
    ----------
    agent : Agent
        Agent that prepares the lists.
    buffers : Buffers
        Landing memory, or the host's own, registered with that agent.
    """

    def __init__(self, agent: Agent, buffers: Buffers) -> None:
        self._agent = agent
        self._buffers = buffers
        self._num_experts = [layer[0].shape[0] for layer in buffers.rows]
        self._lists: dict[tuple[int, tuple[tuple[int, int], ...]], Any] = {}

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return landing memory with a name each, to register."""
        own = self._buffers.landing_rows
        if own is None:
            return [(f"landing slot {slot}", tensor) for slot, tensor in enumerate(self._buffers.landing)]
        return [
            (f"landing slot {slot} tensor {number}", tensor)
            for slot, tensors in enumerate(own)
            for number, tensor in enumerate(tensors)
        ]

    def rows(self, plan: TransferPlan) -> tuple[Any, IndexArray]:
        """Return the prepared list for a plan's receives, at least one, and each receive's number in it."""
        receives = plan.receives
        tensors, first, grid = np.unique(receives.tensor, return_index=True, return_inverse=True)
        nbytes = receives.nbytes[first]
        own = self._buffers.landing_rows
        if own is None:
            memory = self._buffers.landing[plan.slot]
            offsets = receives.landing_offset[first] - receives.row[first] * nbytes
            bases = [memory.data_ptr() + offset for offset in offsets.tolist()]
        else:
            memory = own[plan.slot][0]
            bases = [own[plan.slot][tensor].data_ptr() for tensor in tensors.tolist()]
        num_rows = self._num_experts[plan.layer]
        key = (num_rows, tuple(zip(bases, nbytes.tolist(), strict=True)))
        if key not in self._lists:
            device = memory.device
            blocks = blocks_of(np.array(bases, np.uint64), nbytes, num_rows, device_index_of(device))
            self._lists[key] = self._agent.prepare(None, blocks, memory_type_of(device))
        return self._lists[key], (grid.reshape(-1) * num_rows + receives.row).astype(np.int32)
