"""One rank's share of a rearrangement, worked out for several small layers at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from eplb_core.plan.messages import LayerShare
from eplb_core.weights.layout import LayerGeometry

if TYPE_CHECKING:
    from eplb_core.plan.placement import PlacementPlan


class RankShares:
    """What one rank sends and receives, layer by layer.

    Planning a layer of few moves takes some sixty numpy calls of a microsecond each, and as many for sixteen such
    layers together, so neighbours of one geometry are planned at once, up to some thousand rows; larger layers one by
    one, each when it is asked for, so that a plan of any size takes the memory of one layer.

    Parameters
    ----------
    plan : PlacementPlan
        Of all layers and ranks.
    geometries : sequence of LayerGeometry
        ``[num_layers]``; equal ones are one object.
    work_out : callable
        ``(first, stop, geometry)`` to the shares of those layers: `PlacementPlan.shares` of the rank and the backend.
    rows_at_a_time : int
        Most tensor rows of all ranks that are worked out at once, unless one layer has more.
    """

    def __init__(
        self,
        plan: PlacementPlan,
        geometries: Sequence[LayerGeometry],
        work_out: Callable[[int, int, LayerGeometry], list[LayerShare]],
        rows_at_a_time: int = 1 << 14,
    ) -> None:
        self._starts = plan.layer_starts
        self._geometries = geometries
        self._work_out = work_out
        self._rows_at_a_time = rows_at_a_time
        self._first = 0
        self._known: list[LayerShare] = []

    def of(self, layer: int) -> LayerShare:
        """Return the share of a layer; in ascending order each is worked out once.

        Raises
        ------
        PlanError
            See `PlacementPlan.shares`.
        """
        if not self._first <= layer < self._first + len(self._known):
            self._known = self._work_out(layer, self._stop(layer), self._geometries[layer])
            self._first = layer
        return self._known[layer - self._first]

    def _stop(self, first: int) -> int:
        """Return the end of the layers that are worked out with `first`."""
        geometry, starts = self._geometries[first], self._starts
        most = int(starts[first]) + self._rows_at_a_time // max(len(geometry.moving), 1)
        stop = first + 1
        while stop < len(self._geometries) and self._geometries[stop] is geometry and starts[stop + 1] <= most:
            stop += 1
        return stop
