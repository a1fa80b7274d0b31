"""The sends and receives of one rank, planned for several small layers at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from eplb_core.plan.messages import LayerMoves
from eplb_core.weights.layout import LayerGeometry

if TYPE_CHECKING:
    from eplb_core.plan.placement import PlacementPlan


class RankMoves:
    """The sends and receives of one rank by layer, planned for several small layers at a time.

    Notes
    -----
    A layer of few moves takes some sixty numpy calls of a microsecond each, and sixteen such layers together take no
    more. So neighbours of one geometry are planned together, up to ``rows_at_a_time`` tensor rows of all ranks; a
    larger layer is planned alone, when it is asked for, and a plan of any size takes the memory of one layer.
    ``work_out(first, stop, geometry)`` is `PlacementPlan.layer_moves` with rank and backend filled in.
    """

    def __init__(
        self,
        plan: PlacementPlan,
        geometries: Sequence[LayerGeometry],
        work_out: Callable[[int, int, LayerGeometry], list[LayerMoves]],
        rows_at_a_time: int = 1 << 14,
    ) -> None:
        self._starts = plan.layer_starts
        self._geometries = geometries
        self._work_out = work_out
        self._rows_at_a_time = rows_at_a_time
        self._first = 0
        self._known: list[LayerMoves] = []

    def of(self, layer: int) -> LayerMoves:
        """Return the rank's sends and receives in a layer; in ascending order each is planned once."""
        if not self._first <= layer < self._first + len(self._known):
            self._known = self._work_out(layer, self._stop(layer), self._geometries[layer])
            self._first = layer
        return self._known[layer - self._first]

    def _stop(self, first: int) -> int:
        """Return the end of the layers that are planned together with `first`."""
        geometry, starts = self._geometries[first], self._starts
        most = int(starts[first]) + self._rows_at_a_time // max(len(geometry.moving), 1)
        stop = first + 1
        while stop < len(self._geometries) and self._geometries[stop] is geometry and starts[stop + 1] <= most:
            stop += 1
        return stop
