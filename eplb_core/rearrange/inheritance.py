"""What a communicator holds when it succeeds another one that still serves."""

from __future__ import annotations

from collections.abc import Callable

from eplb_core.arrays import IntArray
from eplb_core.plan.translation import translate_map


class Inheritance:
    """What the communicator before this one holds, in the numbers of this one.

    Parameters
    ----------
    before : callable
        Returns the map of the one before, which may go on rearranging meanwhile; None as long as nobody knows.
    num_local : int
        Rows of a rank.
    mapping : dict of int to int
        Old rank to new rank; -1 for one that leaves.
    world_size : int
        Ranks of the new group.
    """

    def __init__(
        self, before: Callable[[], IntArray | None], num_local: int, mapping: dict[int, int], world_size: int
    ) -> None:
        self._before = before
        self._num_local = num_local
        self._mapping = mapping
        self._world_size = world_size
        self.continuing = frozenset(after for after in mapping.values() if after >= 0)
        """Ranks of the new group that were in the old one."""

    def map(self) -> IntArray | None:
        """Return the map that holds now; None as long as nobody knows."""
        held = self._before()
        return None if held is None else translate_map(held, self._mapping, self._num_local, self._world_size)
