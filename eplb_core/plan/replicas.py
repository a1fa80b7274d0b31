"""Where each row's new expert comes from: another row of its rank, or a row of a rank that holds it.

Pure functions of arrays. A map has up to hundreds of thousands of slots and every rank plans for all of them, so
everything here is a few sorts of packed integers, and reads the runs of equal values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_KEEPS, _CHANGES, _WANTS = range(3)


class Experts(NamedTuple):
    """Experts that ranks hold, or want to receive: int64 columns, each (layer, rank, expert) once."""

    layer: IntArray
    rank: IntArray
    expert: IntArray
    row: IntArray


class Moves(NamedTuple):
    """Experts that cross ranks: int64 columns."""

    layer: IntArray
    src: IntArray
    dst: IntArray
    src_row: IntArray
    dst_row: IntArray


def match_within_ranks(before: IntArray, after: IntArray) -> tuple[Experts, Experts, IntArray, IntArray]:
    """Split maps into experts that ranks hold, want from others, copy within, and duplicate.

    Notes
    -----
    ``before`` and ``after`` are ``[num_layers, world_size, num_local_physical_experts]``, -1 for an empty slot.
    ``held`` names the lowest row that holds an expert, ``wanted`` the lowest row that wants one its rank does not hold.
    ``local`` and ``duplicate`` are ``[num_copies, 3]``, (layer x world size + rank, destination row, source row),
    ordered by the first column: copies from a row that holds the expert, if possible one that keeps it, and copies from
    a row in ``wanted``.

    One sort does it: within each (layer, rank, expert) come rows that hold the expert and keep it, then rows that hold
    it and change, then rows that want it. The first row of each run says where the expert comes from.
    """
    _, world_size, num_rows = before.shape
    before, after = before.ravel(), after.ravel()
    stays = (before == after) | (after < 0)
    holds, wants = np.flatnonzero(before >= 0), np.flatnonzero(~stays)
    role = np.concatenate([np.where(stays[holds], _KEEPS, _CHANGES), np.full(len(wants), _WANTS)])
    slot = np.concatenate([holds, wants])
    rank = slot // num_rows
    rank, expert, role, row = ordered(rank, np.concatenate([before[holds], after[wants]]), role, slot - rank * num_rows)

    begins = runs(rank, expert)
    first = np.repeat(begins, np.diff(begins, append=len(rank)))
    wanting = np.flatnonzero(role == _WANTS)
    origin = first[wanting]
    here = role[origin] != _WANTS
    lands = origin == wanting
    local, duplicate = (
        np.stack([rank[wanting[chosen]], row[wanting[chosen]], row[origin[chosen]]], axis=1)
        for chosen in (np.flatnonzero(here), np.flatnonzero(~here & ~lands))
    )
    # The first row of a run is the lowest that keeps the expert; a lower one may hold it and change.
    turns = np.flatnonzero((role[1:] == _CHANGES) & (role[:-1] == _KEEPS) & (first[1:] == first[:-1])) + 1
    lowest = row
    lowest[first[turns]] = np.minimum(row[first[turns]], row[turns])
    experts = []
    for entries in (begins[np.flatnonzero(role[begins] != _WANTS)], wanting[np.flatnonzero(lands)]):
        at = rank[entries]
        layer = at // world_size
        experts.append(Experts(layer, at - layer * world_size, expert[entries], lowest[entries]))
    return experts[0], experts[1], local, duplicate


def choose_holders(held: Experts, wanted: Experts, node_of: IntArray) -> tuple[Moves, Experts]:
    """Serve wants from holders of the same node, round-robin; return the moves, in no order, and unserved wants.

    Notes
    -----
    ``node_of`` is ``[world_size]``, nodes from 0. The j-th want of an expert in a layer and node, by rank, is served by
    holder (j + layer) mod the number of holders: a greedy choice would be more even, cannot be vectorised, and costs
    0.2 s at scale. Unserved wants are ordered by layer, then expert.
    """
    layer, rank, expert, row = (np.concatenate(pair) for pair in zip(held, wanted, strict=True))
    want = np.ones(len(layer), np.int64)
    want[: len(held.layer)] = 0
    layer, expert, node, want, rank, row = ordered(layer, expert, node_of[rank], want, rank, row)

    # In each run the holders stand before those that want; both are in the order of their ranks.
    begins = runs(layer, expert, node)
    size = np.diff(begins, append=len(layer))
    num_holders = size - np.add.reduceat(want, begins) if len(begins) else size
    wanting = np.flatnonzero(want)
    run = np.repeat(np.arange(len(begins)), size)[wanting]
    served = num_holders[run] > 0
    missing = wanting[~served]
    if len(missing):
        wanting, run = wanting[served], run[served]
    begin, holders, layer_of = begins[run], num_holders[run], layer[wanting]
    source = begin + (wanting - begin + layer_of) % holders  # that wants stand behind all holders adds 0 modulo these
    return (
        Moves(layer_of, rank[source], rank[wanting], row[source], row[wanting]),
        Experts(layer[missing], rank[missing], expert[missing], row[missing]),
    )


def ordered(*columns: IntArray) -> tuple[IntArray, ...]:
    """Sort rows by their first column, then the next, and so on; values are 0 or more, and no two rows are equal."""
    widths = [int(column.max(initial=0)).bit_length() for column in columns]
    if sum(widths) > 63:
        order = np.lexsort(columns[::-1])
        return tuple(column[order] for column in columns)
    # Sorting plain integers is an order of magnitude faster than sorting indices.
    key = columns[0].copy()
    for column, width in zip(columns[1:], widths[1:], strict=True):
        if width:
            key <<= width
            key |= column
    key.sort()
    fields = []
    for width in widths[:0:-1]:
        fields.append(key & ((1 << width) - 1))
        if width:
            key >>= width
    return key, *reversed(fields)


def runs(*columns: IntArray) -> IntArray:
    """Return where each run of equal rows begins."""
    changes = columns[0][1:] != columns[0][:-1]
    for column in columns[1:]:
        changes |= column[1:] != column[:-1]
    return np.concatenate([[0], np.flatnonzero(changes) + 1]) if len(columns[0]) else np.zeros(0, np.int64)
