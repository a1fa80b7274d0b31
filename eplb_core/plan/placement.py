"""From a pair of maps to the moves of every layer, in one canonical order, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from eplb_core.arrays import IntArray, frozen
from eplb_core.backend import TransferPlan
from eplb_core.errors import PlanError
from eplb_core.plan.in_place import CommitPlan, order_copies
from eplb_core.plan.members import held_nowhere, without_absent
from eplb_core.plan.messages import LayerMoves, Moves, layer_moves
from eplb_core.plan.replicas import choose_holders, match_within_ranks, ordered
from eplb_core.plan.rules import TransferRules
from eplb_core.weights.layout import LayerGeometry


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
    sourced : IntArray
        ``[num_needs, 4]``, (layer, rank, expert, row) of experts that no member holds, which a source is to supply,
        ordered by layer, then expert; a plan has none unless it was asked for them.
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
    sourced: IntArray = field(default_factory=lambda: frozen(np.zeros((0, 4), np.int64)))

    def sourced_rows(self, layer: int, rank: int) -> IntArray:
        """Return what sources are to supply to one rank in one layer, ``[num_needs, 4]``."""
        here: IntArray = self.sourced[(self.sourced[:, 0] == layer) & (self.sourced[:, 1] == rank)]
        return here

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
        rules: TransferRules,
        *,
        generation: int,
        sequence: int,
        slot: int,
    ) -> TransferPlan:
        """Return what one rank sends and receives in one layer; both ends of a move compute the same of it.

        Parameters
        ----------
        layer, rank : int
            The layer, and the rank whose part of it is wanted.
        geometry : LayerGeometry
            The layer's tensors.
        rules : TransferRules
            How its moves are cut, and where they land.
        generation, sequence, slot : int
            Passed on to the `TransferPlan`.

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
        (share,) = self.layer_moves(layer, layer + 1, geometry, rank=rank, rules=rules)
        return TransferPlan(generation, sequence, layer, slot, *share)

    def layer_moves(
        self, first: int, stop: int, geometry: LayerGeometry, *, rank: int, rules: TransferRules
    ) -> list[LayerMoves]:
        """Return what one rank sends and receives in each of some layers of one geometry, which is cheaper by far.

        Parameters
        ----------
        first, stop : int
            The layers from `first` to ``stop - 1``.
        geometry : LayerGeometry
            Row sizes, the same for all of these layers.
        rank : int
            The rank whose part is wanted.
        rules : TransferRules
            How moves are cut, and where they land.

        Returns
        -------
        list of LayerMoves
            ``[stop - first]``.

        Raises
        ------
        PlanError
            EPLB-P007, an argument is out of range.
        """
        self._check_layer(first)
        self._check_layer(max(first, stop - 1))
        self._check_rank(rank)
        if geometry.num_local_physical_experts > self.num_local_physical_experts:
            raise PlanError(
                "EPLB-P007",
                problem=f"layer {first} has {geometry.num_local_physical_experts} experts per rank, "
                f"the maps {self.num_local_physical_experts}",
            )
        part = slice(self.layer_starts[first], self.layer_starts[stop])
        number = (self.layer[part] - first) * self.world_size
        return layer_moves(
            Moves(self.src[part] + number, self.dst[part] + number, self.src_row[part], self.dst_row[part]),
            stop - first,
            self.world_size,
            rank,
            geometry,
            rules,
        )

    def commit_plan(self, layer: int, rank: int) -> CommitPlan:
        """Return how one rank puts one layer in place once everyone's reads of it are done.

        Parameters
        ----------
        layer, rank : int
            The layer, and the rank whose part of it is wanted.

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
    missing: Literal["raise", "source"] = "raise",
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
    missing : {"raise", "source"}
        What becomes of experts that no member holds: an error, or `PlacementPlan.sourced`.

    Returns
    -------
    PlacementPlan
        Of O(slots) memory.

    Raises
    ------
    PlanError
        EPLB-P002, with ``missing="raise"`` a needed expert is held nowhere; EPLB-P005, a rank that is no member is to
        hold an expert; EPLB-P007, an argument does not fit the others.
    """
    if old.ndim != 2 or old.shape != new.shape or world_size < 1 or old.shape[1] % world_size:
        raise PlanError("EPLB-P007", problem=f"maps of shapes {old.shape} and {new.shape} for {world_size} ranks")
    num_layers, num_slots = old.shape
    shape = (num_layers, world_size, num_slots // world_size)
    before, after = old.reshape(shape), new.reshape(shape)
    if members is not None:
        before = without_absent(before, after, members)
    held, wanted, local, duplicate = match_within_ranks(before, after)
    served = []
    if nodes is not None:
        near, wanted = choose_holders(held, wanted, _node_of(nodes, world_size))
        served.append(near)
    anywhere, nowhere = choose_holders(held, wanted, np.zeros(world_size, np.int64))
    if len(nowhere.layer) and missing == "raise":
        raise held_nowhere(nowhere, old, num_slots // world_size)
    served.append(anywhere)
    layer, src, dst, src_row, dst_row = ordered(*(np.concatenate(parts) for parts in zip(*served, strict=True)))

    per_layer = np.bincount(layer, minlength=num_layers)
    within = np.bincount(local[:, 0] // world_size, minlength=num_layers)
    moving = per_layer + within + np.bincount(nowhere.layer, minlength=num_layers) > 0
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
        frozen(np.stack([nowhere.layer, nowhere.rank, nowhere.expert, nowhere.row], axis=1)),
    )


def _node_of(nodes: Sequence[int], world_size: int) -> IntArray:
    if len(nodes) != world_size:
        raise PlanError("EPLB-P007", problem=f"{len(nodes)} nodes are given for {world_size} ranks")
    return np.unique(np.asarray(nodes), return_inverse=True)[1].astype(np.int64).reshape(-1)
