"""How a layer's moves are sent: in canonical order, cut into messages and batches, with each row's landing place."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eplb_core.arrays import IntArray, aligned, frozen
from eplb_core.backend import MoveColumns
from eplb_core.plan.rules import TransferRules
from eplb_core.weights.layout import LayerGeometry


class LayerMoves(NamedTuple):
    """The part of a `TransferPlan` that follows from the maps; fields as there."""

    sends: MoveColumns
    receives: MoveColumns
    num_batches: int


class Moves(NamedTuple):
    """Experts that cross ranks, int64 columns ``[num_moves]`` ordered by (src, dst, source row).

    Notes
    -----
    Several layers lie side by side: rank r of the i-th is number ``i * world_size + r``. Ranks of different layers
    never exchange anything, so one pass plans all layers, and comes to the same as one pass for each.
    """

    src: IntArray
    dst: IntArray
    src_row: IntArray
    dst_row: IntArray


class Pairs(NamedTuple):
    """The (source, destination) pairs of some moves, ordered by both: where the moves of each start, and how many."""

    src: IntArray
    dst: IntArray
    start: IntArray
    size: IntArray


class _Rows(NamedTuple):
    """Tensor rows of some pairs, int64 columns ordered by (src, dst, tensor, source row)."""

    pair: IntArray  # index into the pairs they were made of
    place: IntArray  # 0 to n-1 within the pair
    move: IntArray  # index into the moves
    tensor: IntArray
    nbytes: IntArray


def layer_moves(
    moves: Moves, num_layers: int, world_size: int, rank: int, geometry: LayerGeometry, rules: TransferRules
) -> list[LayerMoves]:
    """Return what one rank sends and receives in each of ``num_layers`` layers of one geometry, in canonical order.

    Parameters
    ----------
    moves : Moves
        The moves of all ranks.
    num_layers, world_size : int
        Number of layers, and number of ranks.
    rank : int
        Rank whose shares are laid out.
    geometry : LayerGeometry
        Row sizes, the same for all of the layers.
    rules : TransferRules
        How moves are cut, and where they land.

    Returns
    -------
    list of LayerMoves
        ``[num_layers]``, columns in canonical order; 0 batches where nothing moves.
    """
    pairs = _pairs(moves)
    num_tensors = len(geometry.moving)
    mine = (pairs.src % world_size == rank) | (pairs.dst % world_size == rank)
    if rules.landing_layout == "packed_by_peer":
        # Packing depends on everything a source sends, and the landing place on everything a receiver gets.
        rows = _rows(pairs, geometry)
        message, offset = _packed(moves, pairs, rows, geometry, rules.coalesce_nbytes)
        keep = mine[rows.pair]
        rows = _Rows(*(column[keep] for column in rows))
        message, offset = message[keep], offset[keep]
    else:
        own = Pairs(*(column[mine] for column in pairs))
        rows = _rows(own, geometry)
        message = rows.place
        offset = geometry.offsets[rows.tensor] + moves.dst_row[rows.move] * rows.nbytes
    per_layer = np.bincount(pairs.src // world_size, pairs.size * num_tensors, num_layers).astype(np.int64)
    num_batches = (per_layer > 0).astype(np.int64)
    batch = np.zeros_like(message)
    if rules.max_ops_per_batch is not None and per_layer.any():
        of_row = _batches(pairs, num_tensors, rules.max_ops_per_batch, rules.one_peer_per_batch)
        batch = of_row[np.repeat(mine, pairs.size * num_tensors)]
        np.maximum.at(num_batches, np.repeat(np.arange(num_layers), per_layer), of_row + 1)
    layer, src = np.divmod(moves.src[rows.move], world_size)
    dst = moves.dst[rows.move] % world_size
    src_row, dst_row = moves.src_row[rows.move], moves.dst_row[rows.move]
    sent, received = src == rank, dst == rank
    others = (rows.nbytes, offset, message, batch)
    sends = _by_layer(layer[sent], num_layers, [c[sent] for c in (dst, rows.tensor, src_row, dst_row, *others)])
    receives = _by_layer(
        layer[received], num_layers, [c[received] for c in (src, rows.tensor, dst_row, src_row, *others)]
    )
    return [LayerMoves(*share) for share in zip(sends, receives, num_batches.tolist(), strict=True)]


def _pairs(moves: Moves) -> Pairs:
    changes = np.ones(len(moves.src), bool)
    changes[1:] = (moves.src[1:] != moves.src[:-1]) | (moves.dst[1:] != moves.dst[:-1])
    start = np.flatnonzero(changes)
    return Pairs(moves.src[start], moves.dst[start], start, np.diff(start, append=len(moves.src)))


def _rows(pairs: Pairs, geometry: LayerGeometry) -> _Rows:
    num_tensors = len(geometry.moving)
    num_rows = pairs.size * num_tensors
    pair = np.repeat(np.arange(len(num_rows)), num_rows)
    place = np.arange(len(pair)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    size = pairs.size[pair]
    nth = place // size
    tensor = geometry.moving[nth]
    return _Rows(pair, place, pairs.start[pair] + place - nth * size, tensor, geometry.nbytes[tensor])


def _packed(
    moves: Moves, pairs: Pairs, rows: _Rows, geometry: LayerGeometry, coalesce_nbytes: int
) -> tuple[IntArray, IntArray]:
    """Return the message number and the landing offset of every row of whole layers."""
    if not len(rows.pair):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    # A source stages every distinct row once, whether it travels packed or alone. Packing a row again, for a further
    # receiver, takes staging memory a second time: only while the slot has some left. All tensors of an expert go to
    # the same ranks, so what is the first destination of one is the first of all.
    first = np.zeros(len(moves.src), bool)
    distinct = moves.src * geometry.num_local_physical_experts + moves.src_row
    first[np.unique(distinct, return_index=True)[1]] = True
    nbytes_row = int(geometry.nbytes[geometry.moving].sum())
    left = geometry.nbytes_rows - nbytes_row * np.bincount(moves.src[first], minlength=int(moves.src[-1]) + 1)
    src = pairs.src[rows.pair]
    small = rows.nbytes < coalesce_nbytes
    again = small & ~first[rows.move]
    repeated = _inclusive(np.where(again, rows.nbytes, 0), src)
    packed = small & (~again | (repeated <= left[src]))

    alone = ~packed
    packed_nbytes = np.where(packed, rows.nbytes, 0)
    alone_nbytes = np.where(alone, aligned(rows.nbytes), 0)
    begins = np.flatnonzero(rows.place == 0)
    packed_total = np.add.reduceat(packed_nbytes, begins)
    number = _inclusive(alone.astype(np.int64), rows.pair) - 1 + (packed_total > 0)[rows.pair]
    message = np.where(packed, 0, number)

    packed_end = aligned(packed_total)
    pair_nbytes = packed_end + np.add.reduceat(alone_nbytes, begins)
    by_receiver = np.argsort(pairs.dst, kind="stable")
    pair_offset = np.empty_like(pair_nbytes)
    pair_offset[by_receiver] = _inclusive(pair_nbytes[by_receiver], pairs.dst[by_receiver]) - pair_nbytes[by_receiver]
    within_packed = _inclusive(packed_nbytes, rows.pair) - packed_nbytes
    within_alone = packed_end[rows.pair] + _inclusive(alone_nbytes, rows.pair) - alone_nbytes
    return message, pair_offset[rows.pair] + np.where(packed, within_packed, within_alone)


def _batches(pairs: Pairs, num_tensors: int, limit: int, one_peer: bool) -> IntArray:
    """Return the batch of every row of whole layers: the first one with room at both its ends.

    Notes
    -----
    Rows of a pair follow one another and have the same ends, so they fill batch after batch: the loop is over (pair,
    batch). A set of batches is the bits of one integer, and keys are plain integers too: thousands of small containers
    would wake the garbage collector.
    """
    full: dict[int, int] = defaultdict(int)  # by rank: batches without room
    taken: dict[int, int] = defaultdict(int)  # by rank: batches in which it has a peer
    shared: dict[int, int] = defaultdict(int)  # by pair of ranks: batches in which they have each other
    load: dict[int, int] = defaultdict(int)  # by batch and rank: operations
    world = 1 + int(max(pairs.src.max(), pairs.dst.max()))
    batches: list[int] = []
    counts: list[int] = []
    for src, dst, size in zip(pairs.src.tolist(), pairs.dst.tolist(), (pairs.size * num_tensors).tolist(), strict=True):
        ends = min(src, dst) * world + max(src, dst)
        rest = size
        while rest:
            closed = full[src] | full[dst]
            if one_peer:
                closed |= (taken[src] | taken[dst]) & ~shared[ends]
            bit = ~closed & (closed + 1)  # the lowest batch that is not closed
            batch = bit.bit_length() - 1
            at_src, at_dst = batch * world + src, batch * world + dst
            count = min(rest, limit - max(load[at_src], load[at_dst]))
            rest -= count
            load[at_src] += count
            load[at_dst] += count
            if load[at_src] == limit:
                full[src] |= bit
            if load[at_dst] == limit:
                full[dst] |= bit
            if one_peer:
                taken[src] |= bit
                taken[dst] |= bit
                shared[ends] |= bit
            batches.append(batch)
            counts.append(count)
    return np.repeat(np.array(batches, np.int64), counts)


def _by_layer(layer: IntArray, num_layers: int, columns: Sequence[IntArray]) -> list[MoveColumns]:
    """Cut columns that are ordered by layer into one set for each."""
    columns = [frozen(column) for column in columns]
    ends = np.searchsorted(layer, np.arange(num_layers + 1)).tolist()
    return [MoveColumns(*(column[a:b] for column in columns)) for a, b in itertools.pairwise(ends)]


def _inclusive(values: IntArray, group: IntArray) -> IntArray:
    """Return the cumulative sum, started anew where the group changes."""
    total = np.cumsum(values)
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    before = total[begins] - values[begins]
    return total - np.repeat(before, np.diff(begins, append=len(values)))
