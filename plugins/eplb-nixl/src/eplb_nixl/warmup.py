"""Connections, made while everyone makes progress: a first tiny READ from every peer that proves whom it reached."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eplb_nixl.agent import Agent
from eplb_nixl.descriptors import IndexArray, blocks_of
from eplb_nixl.library import NixlError
from eplb_nixl.metadata import SourceRecord
from eplb_nixl.registration import device_index_of, memory_type_of

NBYTES = 64


@dataclass(eq=False)
class _First:
    """A first READ under way."""

    read: Any
    state: str
    token: torch.Tensor


def token_of(agent_name: str) -> torch.Tensor:
    """Return the `NBYTES` bytes that only the agent of that name has to show, uint8 on the CPU."""
    return torch.frombuffer(bytearray(hashlib.blake2b(agent_name.encode()).digest()), dtype=torch.uint8)


class WarmUp:
    """First READs of one agent.

    UCX completes a connection only while both ends make progress, so a first READ toward a rank that sits in a barrier
    hangs. These are posted when peers become known and never waited for: whoever pumps `advance` on every rank gets
    them all through. What they bring must be the token of the agent that was meant, which proves that name, address and
    connection belong together.

    Parameters
    ----------
    agent : Agent
        The reader.
    world_size : int
        Most peers.
    device : torch.device
        Where the memory lies that will be read later; the same kind is tried here.
    """

    def __init__(self, agent: Agent, world_size: int, device: torch.device) -> None:
        self._agent = agent
        self.shown = token_of(agent.name).to(device)
        self.landing = torch.zeros(world_size, NBYTES, dtype=torch.uint8, device=device)
        self._local: Any = None
        self._reads: dict[int, _First] = {}
        self.failures: dict[int, str] = {}

    @property
    def waiting_for(self) -> list[int]:
        """Peers whose first READ has not come back."""
        return sorted(self._reads)

    def begin(self, peer: int, record: SourceRecord) -> None:
        """Post the first READ from a peer that the agent knows.

        Raises
        ------
        NixlError
            It cannot be made.
        """
        device = self.landing.device
        size = np.array([NBYTES])
        if self._local is None:
            base = np.array([self.landing.data_ptr()], np.uint64)
            blocks = blocks_of(base, size, len(self.landing), device_index_of(device))
            self._local = self._agent.prepare(None, blocks, memory_type_of(device))
        there = blocks_of(np.array([record.warm_address], np.uint64), size, 1, record.device_index)
        remote = self._agent.prepare(record.agent_name, there, record.memory_type)
        row: IndexArray = np.array([peer], np.int32)
        read = self._agent.make_read(self._local, row, remote, np.zeros(1, np.int32))
        self._reads[peer] = _First(read, self._agent.post(read), token_of(record.agent_name))

    def advance(self) -> None:
        """Look at the READs that are under way; a failure is kept in `failures`."""
        for peer, first in list(self._reads.items()):
            try:
                if first.state == "PROC":
                    first.state = self._agent.state(first.read)
                if first.state == "PROC":
                    continue
                self._agent.release(first.read)
            except NixlError as error:
                self.failures[peer] = str(error)
                del self._reads[peer]
                continue
            if first.state != "DONE":
                self.failures[peer] = f"its first READ ended with state={first.state}"
            elif not torch.equal(self.landing[peer].cpu(), first.token):
                self.failures[peer] = "its first READ brought another agent's bytes"
            del self._reads[peer]
