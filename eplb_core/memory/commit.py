"""The copies of one layer's commit, laid out before its vote."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from eplb_core.weights.layout import LayerGeometry

if TYPE_CHECKING:
    from eplb_core.backend import MoveColumns
    from eplb_core.plan import CommitPlan
from eplb_core.memory.landing import LandingMemory


@dataclass(frozen=True, eq=False)
class CommitCopies:
    """The copies of one layer's commit, ready to run: steps in order, each a list of (to, from) rows.

    Parameters
    ----------
    steps : tuple of (list of torch.Tensor, list of torch.Tensor)
        Destinations and sources of each step; the copies of a step are independent of each other.
    nbytes_local : int
        Bytes of rows that come from this rank itself.

    Notes
    -----
    They are built before the vote, so that a commit allocates and checks nothing.
    """

    steps: tuple[tuple[list[torch.Tensor], list[torch.Tensor]], ...]
    nbytes_local: int

    def run(self) -> None:
        """Copy, on the caller's current stream."""
        for destinations, sources in self.steps:
            torch._foreach_copy_(destinations, sources, non_blocking=True)


NOTHING = CommitCopies((), 0)
"""The commit of a layer whose transfer was never started."""


def commit_copies(
    row_views: Sequence[Sequence[torch.Tensor]],
    geometry: LayerGeometry,
    plan: CommitPlan,
    receives: MoveColumns,
    landing: LandingMemory,
    slot: int,
    supplied: Sequence[tuple[int, int, torch.Tensor]] = (),
) -> CommitCopies:
    """Lay out the commit of one layer on this rank: local copies by level, received rows, then duplicates of these.

    Notes
    -----
    ``supplied`` is (tensor, row, landing row) of what sources supply; it is copied with the received rows.
    ``row_views`` are the live rows, uint8, ``[num_tensors][num_local_physical_experts]``.
    """
    moving = geometry.moving.tolist()
    sizes = geometry.nbytes.tolist()
    num_rows = geometry.num_local_physical_experts  # the spare row has a higher number
    steps: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def live(tensor: int, row: int) -> torch.Tensor:
        return landing.spare_row(tensor, sizes[tensor]) if row >= num_rows else row_views[tensor][row]

    pairs = plan.copies.tolist()
    for start, end in itertools.pairwise(plan.level_starts.tolist()):
        level = pairs[start:end]
        steps.append(
            (
                [live(tensor, to) for to, _ in level for tensor in moving],
                [live(tensor, source) for _, source in level for tensor in moving],
            )
        )
    if len(receives) or supplied:
        to = [row_views[t][r] for t, r in zip(receives.tensor.tolist(), receives.row.tolist(), strict=True)]
        to += [row_views[tensor][row] for tensor, row, _ in supplied]
        steps.append((to, landing.landed_rows(slot, receives) + [landed for _, _, landed in supplied]))
    duplicates = plan.duplicates.tolist()
    if duplicates:
        steps.append(
            (
                [row_views[tensor][to] for to, _ in duplicates for tensor in moving],
                [row_views[tensor][source] for _, source in duplicates for tensor in moving],
            )
        )
    local_rows = sum(1 for to, _ in pairs if to < num_rows) + len(duplicates)
    return CommitCopies(tuple(steps), local_rows * sum(sizes[tensor] for tensor in moving))
