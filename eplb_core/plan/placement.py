"""From a pair of maps to the moves of every layer, in one canonical order, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from eplb_core.arrays import IntArray, frozen
from eplb_core.backend import TransferPlan
from eplb_core.errors import PlanError
from eplb_core.plan.in_place import CommitPlan, order_copies
from eplb_core.plan.messages import LayerShare, Moves, layer_shares
from eplb_core.plan.replicas import Experts, choose_holders, match_within_ranks, ordered
from eplb_core.weights.layout import LayerGeometry

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PlacementPlan:
    """All that one rearrangement moves, over all layers and ranks; made by `plan_moves`. Its arrays are read-only.

    Parameters
    ----------
    world_size : int
        Ranks, absent ones included.
    num_local_physical_experts : int
        Rows per rank.
    layers : tuple of int
        Layers that move anything on any rank, across ranks or within one, ascending.
    layer, src, dst, src_row, dst_row : IntArray
        ``[num_moves]``: experts that cross ranks, ordered by (layer, src, dst, src_row).
    layer_starts : IntArray
        ``[num_layers + 1]``: a layer's moves are those from ``layer_starts[layer]`` to ``layer_starts[layer + 1]``.
    local, duplicate : IntArray
        ``[num_copies, 3]``, ordered by the first column: (layer x world size + rank, destination row, source row) of
        copies within a rank, and of rows that take what lands for another row.
    """

    world_size: int
    num_local_physical_experts: int
    layers: tuple[int, ...]
    layer: IntArray
    src: IntArray
    dst: IntArray
    src_row: IntArray
    dst_row: IntArray
    layer_starts: IntArray
    local: IntArray
    duplicate: IntArray

    @cached_property
    def pairs(self) -> IntArray:
        """Every (low, high) pair of ranks that exchanges anything in any layer, ``[num_pairs, 2]``, ordered."""
        low, high = np.minimum(self.src, self.dst), np.maximum(self.src, self.dst)
        return frozen(np.stack(np.divmod(np.unique(low * self.world_size + high), self.world_size), axis=1))

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return every rank that `rank` exchanges with in any layer, ascending."""
        self._check_rank(rank)
        here = self.pairs[(self.pairs == rank).any(axis=1)]
        return tuple(sorted(int(low) + int(high) - rank for low, high in here))

    def transfer_plan(
        self,
        layer: int,
        rank: int,
        geometry: LayerGeometry,
        *,
        generation: int,
        sequence: int,
        slot: int,
        landing_layout: Literal["rows", "packed_by_peer"],
        coalesce_nbytes: int,
        batched: bool,
        max_ops_per_batch: int,
        migration_batching: bool,
    ) -> TransferPlan:
        """Return what one rank sends and receives in one layer; both ends of a move compute the same of it.

        Parameters
        ----------
        layer, rank : int
            Which layer, for whom.
        geometry : LayerGeometry
            Sizes of the layer's rows.
        generation, sequence, slot : int
            Passed on to the `TransferPlan`.
        landing_layout : {"rows", "packed_by_peer"}
            ``"rows"``: a row lands at ``geometry.offsets[tensor] + row * nbytes``, every row is a message.
            ``"packed_by_peer"``: per receiver, sources and their messages follow one another, each message 64-byte
            aligned. Of each (source, destination) pair the packed rows are one message, number 0, and every other row
            is one of its own. A row is packed when it is small and its source still has room: one slot of
            ``geometry.nbytes_rows`` holds each distinct row once, what then remains goes to small rows that leave
            for a further receiver, in canonical order, until one does not fit.
        coalesce_nbytes : int
            Rows below it are small; 0 packs nothing.
        batched : bool
            Cut the moves into batches: each one goes, in canonical order, into the first batch in which both its ends
            have fewer than `max_ops_per_batch` operations.
        max_ops_per_batch : int
            Most sends and receives of a rank in one batch.
        migration_batching : bool
            With `batched`, additionally at most one peer per rank and batch.

        Returns
        -------
        TransferPlan
            Empty columns when this rank moves nothing.

        Raises
        ------
        PlanError
            EPLB-P007, an argument is out of range.
        """
        self._check_layer(layer)
        (share,) = self.shares(
            layer,
            layer + 1,
            geometry,
            rank=rank,
            landing_layout=landing_layout,
            coalesce_nbytes=coalesce_nbytes,
            batched=batched,
            max_ops_per_batch=max_ops_per_batch,
            migration_batching=migration_batching,
        )
        return TransferPlan(generation, sequence, layer, slot, *share)

    def shares(
        self,
        first: int,
        stop: int,
        geometry: LayerGeometry,
        *,
        rank: int,
        landing_layout: Literal["rows", "packed_by_peer"],
        coalesce_nbytes: int,
        batched: bool,
        max_ops_per_batch: int,
        migration_batching: bool,
    ) -> list[LayerShare]:
        """Return what one rank sends and receives in each of some layers of one geometry, which is cheaper by far.

        Parameters
        ----------
        first, stop : int
            The layers from `first` to ``stop - 1``.
        geometry, rank, landing_layout, coalesce_nbytes, batched, max_ops_per_batch, migration_batching
            As for `transfer_plan`.

        Returns
        -------
        list of LayerShare
            ``[stop - first]``.

        Raises
        ------
        PlanError
            EPLB-P007, an argument is out of range.
        """
        self._check_layer(first)
        self._check_layer(max(first, stop - 1))
        self._check_rank(rank)
        if geometry.num_local_physical_experts != self.num_local_physical_experts:
            raise PlanError(
                "EPLB-P007",
                problem=f"layer {first} has {geometry.num_local_physical_experts} experts per rank, "
                f"the maps {self.num_local_physical_experts}",
            )
        if landing_layout not in {"rows", "packed_by_peer"}:
            raise PlanError("EPLB-P007", problem=f"landing_layout is {landing_layout!r}")
        if batched and max_ops_per_batch < 1:
            raise PlanError("EPLB-P007", problem=f"max_ops_per_batch is {max_ops_per_batch}")
        part = slice(self.layer_starts[first], self.layer_starts[stop])
        number = (self.layer[part] - first) * self.world_size
        return layer_shares(
            Moves(self.src[part] + number, self.dst[part] + number, self.src_row[part], self.dst_row[part]),
            stop - first,
            self.world_size,
            rank,
            geometry,
            landing_layout=landing_layout,
            coalesce_nbytes=coalesce_nbytes,
            max_ops_per_batch=max_ops_per_batch if batched else None,
            one_peer_per_batch=migration_batching,
        )

    def commit_plan(self, layer: int, rank: int) -> CommitPlan:
        """Return how one rank puts one layer in place once everyone's reads of it are done.

        Parameters
        ----------
        layer, rank : int
            Which layer, for whom.

        Returns
        -------
        CommitPlan
            Empty arrays when the rank keeps its rows.

        Raises
        ------
        PlanError
            EPLB-P007, an argument is out of range.
        """
        self._check_layer(layer)
        self._check_rank(rank)
        local = self._of(self.local, self._local_keys, layer, rank)
        duplicate = self._of(self.duplicate, self._duplicate_keys, layer, rank)
        copies, level_starts = order_copies(local[:, 0], local[:, 1], self.num_local_physical_experts)
        return CommitPlan(copies, level_starts, frozen(duplicate))

    @cached_property
    def _local_keys(self) -> IntArray:
        return frozen(self.local[:, 0])

    @cached_property
    def _duplicate_keys(self) -> IntArray:
        return frozen(self.duplicate[:, 0])

    def _of(self, copies: IntArray, keys: IntArray, layer: int, rank: int) -> IntArray:
        at = layer * self.world_size + rank
        start, end = keys.searchsorted([at, at + 1])
        return copies[start:end, 1:]

    def _check_layer(self, layer: int) -> None:
        num_layers = len(self.layer_starts) - 1
        if not 0 <= layer < num_layers:
            raise PlanError("EPLB-P007", problem=f"layer is {layer}, there are {num_layers} layers")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise PlanError("EPLB-P007", problem=f"rank is {rank} in a world of {self.world_size}")


def plan_moves(
    old: IntArray,
    new: IntArray,
    *,
    world_size: int,
    members: Sequence[int] | None = None,
    nodes: Sequence[int] | None = None,
) -> PlacementPlan:
    """Plan one rearrangement for all layers and ranks; equal arguments give equal plans on every rank.

    Each rank receives each expert it newly needs once, into the lowest row that needs it. Experts it holds already are
    copied within it. Rows whose expert stays, and rows that become empty, are left as they are. Of the ranks that hold
    an expert, those of the receiver's own node serve it where there are any. The j-th need, by destination rank, is
    served by holder ``(j + layer) mod number of holders``: needs served within a node are counted node by node, those
    that find no holder on their node all together.

    Parameters
    ----------
    old, new : IntArray
        ``[num_layers, num_physical_experts]``, from `check_maps`.
    world_size : int
        Ranks of the group, absent ones included.
    members : sequence of int or None
        Ranks that take part; None is all. What the others hold in `old` is lost.
    nodes : sequence of int or None
        ``[world_size]``, the node of each rank; None takes all ranks as equally near.

    Returns
    -------
    PlacementPlan
        Of O(slots) memory.

    Raises
    ------
    PlanError
        EPLB-P002, a needed expert is held nowhere; EPLB-P005, a rank that is no member is to hold an expert;
        EPLB-P007, an argument does not fit the others.
    """
    if old.ndim != 2 or old.shape != new.shape or world_size < 1 or old.shape[1] % world_size:
        raise PlanError("EPLB-P007", problem=f"maps of shapes {old.shape} and {new.shape} for {world_size} ranks")
    num_layers, num_slots = old.shape
    shape = (num_layers, world_size, num_slots // world_size)
    before, after = old.reshape(shape), new.reshape(shape)
    if members is not None:
        before = _without_absent(before, after, _present(members, world_size))
    held, wanted, local, duplicate = match_within_ranks(before, after)
    served = []
    if nodes is not None:
        near, wanted = choose_holders(held, wanted, _node_of(nodes, world_size))
        served.append(near)
    anywhere, missing = choose_holders(held, wanted, np.zeros(world_size, np.int64))
    if len(missing.layer):
        raise _held_nowhere(missing, old, num_slots // world_size)
    served.append(anywhere)
    layer, src, dst, src_row, dst_row = ordered(*(np.concatenate(parts) for parts in zip(*served, strict=True)))

    per_layer = np.bincount(layer, minlength=num_layers)
    moving = per_layer + np.bincount(local[:, 0] // world_size, minlength=num_layers) > 0
    return PlacementPlan(
        world_size,
        num_slots // world_size,
        tuple(np.flatnonzero(moving).tolist()),
        frozen(layer),
        frozen(src),
        frozen(dst),
        frozen(src_row),
        frozen(dst_row),
        frozen(np.concatenate([[0], np.cumsum(per_layer)])),
        frozen(local),
        frozen(duplicate),
    )


def _present(members: Sequence[int], world_size: int) -> BoolArray:
    present = np.zeros(world_size, bool)
    for rank in members:
        if not 0 <= rank < world_size:
            raise PlanError("EPLB-P007", problem=f"member {rank} is no rank of a world of {world_size}")
        present[rank] = True
    return present


def _node_of(nodes: Sequence[int], world_size: int) -> IntArray:
    if len(nodes) != world_size:
        raise PlanError("EPLB-P007", problem=f"{len(nodes)} nodes are given for {world_size} ranks")
    return np.unique(np.asarray(nodes), return_inverse=True)[1].astype(np.int64).reshape(-1)


def _without_absent(before: IntArray, after: IntArray, present: BoolArray) -> IntArray:
    asked = np.argwhere((after >= 0).any(axis=2) & ~present)
    if len(asked):
        layer, rank = asked[0].tolist()
        experts = after[layer, rank]
        detail = f"The new map puts expert {experts[experts >= 0][0]} on it."
        raise PlanError("EPLB-P005", layer=layer, rank=rank, detail=detail)
    return np.where(present[:, None], before, -1)


def _held_nowhere(missing: Experts, old: IntArray, num_rows: int) -> PlanError:
    layer, expert, rank = (int(column[0]) for column in (missing.layer, missing.expert, missing.rank))
    detail = []
    absent = np.unique(np.flatnonzero(old[layer] == expert) // num_rows).tolist()
    if absent:
        detail.append(f"Only ranks {absent} hold it in the old map, and they are no members.")
    if len(missing.layer) > 1:
        detail.append(f"{len(missing.layer) - 1} more needs cannot be served.")
    return PlanError("EPLB-P002", layer=layer, expert=expert, rank=rank, detail=" ".join(detail))
