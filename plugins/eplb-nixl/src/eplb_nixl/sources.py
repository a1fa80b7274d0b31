"""The peers this rank reads from: metadata checked, agents known, rows prepared, announcements taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eplb_core.backend import BackendContext, PeerMetadata, TransferPlan
from eplb_core.backend.toolkit import check_member
from eplb_core.errors import MetadataError
from eplb_nixl.agent import Agent
from eplb_nixl.announcements import Announced
from eplb_nixl.descriptors import IndexArray, RowIndex
from eplb_nixl.hooks import LABEL
from eplb_nixl.library import NixlError
from eplb_nixl.metadata import SourceRecord
from eplb_nixl.warmup import WarmUp


@dataclass(frozen=True, eq=False)
class _Source:
    """A connected peer: what it said of itself, the prepared list of its rows, what it has announced."""

    record: SourceRecord
    rows: Any
    announced: Announced


def agent_name_prefix(communicator: str, rank: int) -> str:
    """Return how the names of a rank's agents start; a random part follows, for each life of a backend its own."""
    return f"eplb-{communicator}-{rank}-"


class Sources:
    """Connected peers.

    Parameters
    ----------
    agent : Agent
        The reader.
    context : BackendContext
        This rank's context, with its epoch.
    index : RowIndex
        Numbers of rows; the same on every rank.
    warm_up : WarmUp
        Makes the connections.
    """

    def __init__(self, agent: Agent, context: BackendContext, index: RowIndex, warm_up: WarmUp) -> None:
        self._agent = agent
        self._context = context
        self._index = index
        self._warm_up = warm_up
        self._sources: dict[int, _Source] = {}
        self._rank_of: dict[str, int] = {}

    def accept(self, peer: PeerMetadata) -> SourceRecord:
        """Check that a payload is what the peer of that rank wrote in this epoch, for these layouts.

        Raises
        ------
        MetadataError
            EPLB-M005 when it is damaged, swapped or stale, EPLB-M004 when the peer runs another NIXL.
        """
        check_member(peer.rank, self._context)
        try:
            record = SourceRecord.from_bytes(peer.payload)
        except ValueError as error:
            raise _refused(peer.rank, str(error)) from error
        if record.rank != peer.rank:
            raise _refused(peer.rank, f"its NIXL metadata is of rank {record.rank}")
        expected = agent_name_prefix(self._context.name, peer.rank)
        if not record.agent_name.startswith(expected):
            problem = f"its NIXL agent is called {record.agent_name!r}"
            raise _refused(peer.rank, f"{problem}, expected {expected!r} and a random part")
        if peer.rank in self._sources:
            raise _refused(peer.rank, "it is connected already")
        own = self._agent.library.version
        if record.library_version != own:
            raise MetadataError(
                "EPLB-M004",
                label=LABEL,
                field="library version",
                peer=peer.rank,
                local=own,
                remote=record.library_version,
                detail="Install the same NIXL on every node.",
            )
        num_slots = 1 if record.mode == "zero_copy" else self._context.staging_layers
        expected_shape = (num_slots, self._index.num_rows if record.by_row else self._index.num_tensors)
        if record.bases.shape != expected_shape or (record.by_row and record.mode != "zero_copy"):
            problem = f"its NIXL metadata has {record.bases.shape[0]} slots of {record.bases.shape[1]} tensors"
            raise _refused(peer.rank, f"{problem}, expected {num_slots} of {self._index.num_tensors} ({record.mode})")
        return record

    def connect(self, peer: int, record: SourceRecord) -> None:
        """Make an accepted peer's agent and rows known, and begin its warm-up.

        Raises
        ------
        MetadataError
            EPLB-M005, when NIXL finds another agent in its metadata.
        NixlError
            NIXL refuses.
        """
        name = self._agent.add_peer(record.agent_metadata)
        if name != record.agent_name:
            self._agent.remove_peer(name)
            raise _refused(peer, f"NIXL found agent {name!r} in its metadata, expected {record.agent_name!r}")
        described = self._index.rows_apart if record.by_row else self._index.blocks
        blocks = described(record.bases, record.device_index)
        self._sources[peer] = _Source(
            record, self._agent.prepare(name, blocks, record.memory_type), Announced(self._context.epoch)
        )
        self._rank_of[name] = peer
        self._warm_up.begin(peer, record)

    def rows(self, peer: int, plan: TransferPlan, share: slice) -> tuple[Any, IndexArray]:
        """Return a peer's prepared list and the numbers in it of a share of the plan's receives."""
        source = self._source(peer)
        receives = plan.receives
        slot = plan.slot if source.record.mode == "staged" else 0
        return source.rows, self._index.rows(plan.layer, slot, receives.tensor[share], receives.peer_row[share])

    def readiness(self, peer: int, plan: TransferPlan) -> Callable[[], bool] | None:
        """Return what says whether a staged peer has announced a plan's rows; None for a zero-copy peer."""
        source = self._source(peer)
        return None if source.record.mode == "zero_copy" else lambda: source.announced.has(plan)

    def notify(self, peer: int, message: bytes) -> None:
        """Send a peer a notification."""
        self._agent.notify(self._source(peer).record.agent_name, message)

    def take_announcements(self) -> None:
        """Make progress and note which transfers were announced."""
        for name, messages in self._agent.progress().items():
            peer = self._rank_of.get(name)
            if peer is None:
                continue
            for message in messages:
                self._sources[peer].announced.take(message)

    def forget(self, plan: TransferPlan) -> None:
        """Forget the announcements of a transfer that is over."""
        for source in self._sources.values():
            source.announced.forget(plan)

    def _source(self, peer: int) -> _Source:
        source = self._sources.get(peer)
        if source is None:
            raise NixlError(f"rank {peer} is not connected")
        return source


def _refused(peer: int, problem: str) -> MetadataError:
    return MetadataError("EPLB-M005", peer=peer, problem=problem)
