"""A rearrangement as vLLM runs it, and the error of one that failed in the foreground: data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from eplb_core import Rearrangement

IntArray = npt.NDArray[np.int64]


@dataclass(eq=False)
class Cycle:
    """A rearrangement whose layers are asked for in turn, also those that do not move.

    Parameters
    ----------
    old, new : IntArray
        ``[num_layers, num_physical_experts]``, the maps; of a single layer ``[1, num_physical_experts]``.
    first : int
        Layer of the first row.
    gen : Rearrangement or None
        None where it could not be begun, is over, or moves nothing.
    failure : Exception or None
        Why it is over. It surfaces at the next layer whose rows differ, which is the same on every rank.
    """

    old: IntArray
    new: IntArray
    first: int = 0
    gen: Rearrangement | None = None
    failure: Exception | None = None
    told: bool = False
    """Was a layer answered with the failure?"""
    staged: int | None = None
    """The layer that is staged, and neither committed nor dropped."""
    left: int = 0
    """How many that move are neither committed nor dropped."""

    def covers(self, layer: int, old_row: IntArray, new_row: IntArray) -> bool:
        """Is a layer, with these rows, part of this rearrangement?"""
        row = layer - self.first
        if not 0 <= row < len(self.old):
            return False
        return np.array_equal(self.old[row], old_row) and np.array_equal(self.new[row], new_row)

    def moves(self, layer: int) -> bool:
        """Does a layer have another placement afterwards?"""
        row = layer - self.first
        return not np.array_equal(self.old[row], self.new[row])


class RearrangeFailedError(Exception):
    """A synchronous rearrangement failed.

    Parameters
    ----------
    error : Exception
        What ended it.
    physical_to_logical_map : IntArray
        ``[num_moe_layers, num_physical_experts]``, the placement that holds.
    final : bool
        Can that not be vouched for?
    """

    def __init__(self, error: Exception, physical_to_logical_map: IntArray, final: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.physical_to_logical_map = physical_to_logical_map
        self.final = final
