"""How one rank puts a layer in place: copies among its rows, in an order in which no row is lost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CommitPlan:
    """How one rank puts one layer in place: `copies` level by level, then received rows, then `duplicates`.

    Read-only int64 arrays.

    Parameters
    ----------
    copies : IntArray
        ``[num_copies, 2]``, (destination row, source row) within the rank's live rows, in an order in which no row is
        overwritten before its old content has been read. Row number ``num_local_physical_experts`` is the spare row.
    level_starts : IntArray
        ``[num_levels + 1]``: level i is ``copies[level_starts[i]:level_starts[i + 1]]``. No row that a level writes is
        read or written by another copy of that level.
    duplicates : IntArray
        ``[num_duplicates, 2]``, (destination row, received row): further rows that take the same received row.
    """

    copies: IntArray
    level_starts: IntArray
    duplicates: IntArray


def order_copies(destination: IntArray, source: IntArray, spare: int) -> tuple[IntArray, IntArray]:
    """Order copies within one set of rows so that they can be made in place: the arrays of a `CommitPlan`.

    Notes
    -----
    ``destination`` and ``source`` are ``[num_copies]``, destinations all different; ``spare`` is the number of the
    spare row. A row is written once its old content is not needed any more, level by level. Every row has at most one
    source, so the rest is a set of disjoint cycles; each is broken by saving one of its rows.
    """
    pending = dict(zip(destination.tolist(), source.tolist(), strict=True))
    readers: dict[int, int] = defaultdict(int)
    for row in pending.values():
        readers[row] += 1
    levels: list[list[tuple[int, int]]] = []
    free = sorted(row for row in pending if not readers[row])
    while free:
        levels.append([(row, pending.pop(row)) for row in free])
        released = []
        for _, row in levels[-1]:
            readers[row] -= 1
            if not readers[row] and row in pending:
                released.append(row)
        free = sorted(released)
    for saved in sorted(pending):
        if saved not in pending:
            continue
        levels.append([(spare, saved)])
        row = saved
        while (origin := pending.pop(row)) != saved:
            levels.append([(row, origin)])
            row = origin
        levels.append([(row, spare)])
    copies = np.array([copy for level in levels for copy in level], np.int64).reshape(-1, 2)
    return frozen(copies), frozen(np.cumsum([0, *(len(level) for level in levels)], dtype=np.int64))


def frozen(array: npt.NDArray[np.int64]) -> IntArray:
    """Return the array, contiguous and read-only."""
    array = np.ascontiguousarray(array)
    array.setflags(write=False)
    return array
