"""What a successor takes over from the communicator before it: the placement that this one holds, in other numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eplb_core.arrays import IntArray
from eplb_core.plan.translation import translate_map


@dataclass(frozen=True, eq=False)
class Inheritance:
    """What the communicator before this one holds, in the numbers of this one.

    Parameters
    ----------
    held : callable
        Returns what it holds now, for it may go on rearranging; None as long as nobody knows.
    mapping : dict of int to int
        Old rank to new rank; -1 for one that leaves.
    num_local, world_size : int
        Slots of a rank, and ranks of the new group.
    """

    held: Callable[[], IntArray | None]
    mapping: dict[int, int]
    num_local: int
    world_size: int

    @property
    def continuing(self) -> frozenset[int]:
        """Ranks of the new group that were in the old one."""
        return frozenset(after for after in self.mapping.values() if after >= 0)

    def map(self) -> IntArray | None:
        """Return the map that holds now; None as long as nobody knows."""
        held = self.held()
        return None if held is None else translate_map(held, self.mapping, self.num_local, self.world_size)
