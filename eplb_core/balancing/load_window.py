"""The load window: the tokens of the last steps before a rearrangement, kept exactly and in little memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eplb_core.balancing.counter import Sums, TokenCounter
from eplb_core.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from eplb_core.arrays import IntArray
    from eplb_core.balancing.arguments import FloatArray


@dataclass(eq=False)
class _Segment:
    """Steps that are in a window together or not at all.

    Parameters
    ----------
    begins_after : int
        The last step before it.
    sums : Sums or None
        [num_layers, num_physical_experts], of the placement that held at its end.
    rows : tuple of IntArray
        That placement, a map row per layer.
    moved : list of (int, IntArray, Sums)
        Layers that changed their placement within it: what was counted before, and under which map row.
    """

    begins_after: int
    sums: Sums | None = None
    rows: tuple[IntArray, ...] = ()
    moved: list[tuple[int, IntArray, Sums]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class LoadSnapshot:
    """What one rank counted in a window; made by the engine's thread, read by the worker.

    Parameters
    ----------
    step : int
        The window's last.
    num_logical_experts : int
        Logical experts of each layer.
    segments : tuple
        The window's parts.
    event : torch.Event or None
        Happens on the device when all of it is counted; None on the host.
    """

    step: int
    num_logical_experts: int
    segments: tuple[_Segment, ...]
    event: Any = None

    def of_logical_experts(self, settle: Callable[[list[Any]], None] | None = None) -> FloatArray:
        """Read the tokens of each logical expert; blocks until the device has counted them.

        Parameters
        ----------
        settle : callable or None
            Waits, within a limit, for events; None takes the event's own wait.

        Returns
        -------
        FloatArray
            float64 [num_layers, num_logical_experts].

        Raises
        ------
        PlanError
            EPLB-P010: there are counts that are negative or not finite.
        """
        if self.event is not None:
            if settle is None:
                self.event.synchronize()
            else:
                settle([self.event])
        num_layers = len(self.segments[0].rows) if self.segments else 0
        # Slots that hold nothing count into a column of their own, which is left out.
        width = self.num_logical_experts + 1
        total = np.zeros(num_layers * width)
        for segment in self.segments:
            for layer, row, sums in segment.moved:
                total[layer * width : (layer + 1) * width] += _by_expert(row, _on_host(sums), width)
            if segment.sums is not None:
                placement = np.stack(segment.rows)
                starts = np.arange(num_layers)[:, None] * width
                flat = np.where(placement < 0, width - 1, placement) + starts
                total += _by_expert(flat, _on_host(segment.sums), num_layers * width)
        load = total.reshape(num_layers, width)[:, :-1]
        if not np.isfinite(load).all() or (load < 0).any():
            layer, expert = np.argwhere(~(np.isfinite(load) & (load >= 0)))[0]
            problem = f"the counts recorded for expert {expert} of layer {layer} add up to {load[layer, expert]}"
            raise PlanError("EPLB-P010", problem=problem)
        return np.ascontiguousarray(load)


class LoadWindow:
    """Counts the tokens of the last `window_size` steps before each multiple of `step_interval`.

    Parameters
    ----------
    physical_to_logical_map : IntArray, [num_layers, num_physical_experts]
        The placement at the start.
    num_logical_experts : int
        Logical experts of each layer.
    window_size, step_interval : int
        Forward steps.

    Notes
    -----
    A window is only ever looked at when a step is a multiple of the interval, so steps between the same two places
    where some window begins or ends need not be told apart: their sum is kept, and not the steps. With the usual
    window below the interval that is one array, and steps before the window are not even added.

    Counts belong to slots, and the expert of a slot changes within a window; what was counted before is kept with the
    map row that held then.
    """

    def __init__(
        self, physical_to_logical_map: IntArray, num_logical_experts: int, *, window_size: int, step_interval: int
    ) -> None:
        self._num_logical_experts = num_logical_experts
        self._window_size = window_size
        self._interval = step_interval
        self._rows = list(physical_to_logical_map.copy())
        self._counter = TokenCounter(*physical_to_logical_map.shape)
        self._open = _Segment(begins_after=0)
        self._closed: deque[_Segment] = deque()
        self.counts_next_step = self._is_in_a_window(1)

    def record(self, layer: int, counts: object, step: int) -> None:
        """Add the counts of one layer in a step, if a window holds it; see `TokenCounter.record`."""
        if self.counts_next_step:
            self._counter.record(layer, counts, step)
        else:
            self._counter.check(layer, counts)

    def placed(self, layer: int, new_row: npt.NDArray[np.int64]) -> None:
        """A layer's placement changed: what was counted so far belongs to the one before."""
        taken = self._counter.take_layer(layer)
        if taken is not None:
            self._open.moved.append((layer, self._rows[layer], taken))
        self._rows[layer] = new_row.copy()

    def end_step(
        self, step: int, *, is_dummy: bool = False, mark: Callable[[], Any] = lambda: None
    ) -> LoadSnapshot | None:
        """End a step, and tell what is known when a window ends with it.

        Parameters
        ----------
        step : int
            Steps are counted from 1.
        is_dummy : bool
            Drop what was recorded in it. It counts as a step, for the other ranks had a real one.
        mark : callable
            Records an event on the engine's current stream.

        Returns
        -------
        LoadSnapshot or None
        """
        if is_dummy:
            self._counter.drop_step(step)
        ends = step % self._interval == 0
        if ends or (step + self._window_size) % self._interval == 0:
            segment = self._open
            segment.sums, segment.rows = self._counter.take(), tuple(self._rows)
            self._closed.append(segment)
            self._open = _Segment(begins_after=step)
        self.counts_next_step = self._is_in_a_window(step + 1)
        if not ends:
            return None
        while self._closed and self._closed[0].begins_after < step - self._window_size:
            self._closed.popleft()
        on_device = any(
            sums is not None and not isinstance(sums, np.ndarray)
            for segment in self._closed
            for sums in (segment.sums, *(taken for _, _, taken in segment.moved))
        )
        return LoadSnapshot(step, self._num_logical_experts, tuple(self._closed), mark() if on_device else None)

    def _is_in_a_window(self, step: int) -> bool:
        return (step - 1) % self._interval >= self._interval - self._window_size


def _by_expert(expert: IntArray, tokens: FloatArray, width: int) -> FloatArray:
    wrapped = np.where(expert < 0, width - 1, expert)
    return np.bincount(wrapped.ravel(), weights=tokens.ravel(), minlength=width).astype(np.float64, copy=False)


def _on_host(sums: Sums) -> FloatArray:
    if isinstance(sums, np.ndarray):
        return sums
    array: FloatArray = sums.cpu().double().numpy()
    return array
