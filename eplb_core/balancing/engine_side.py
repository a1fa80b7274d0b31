"""What the engine's thread does in a step: end it, commit what is due, and wait for nothing but a promise."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from eplb_core.balancing.engine_step import EngineStep
from eplb_core.balancing.handover import RELOADING
from eplb_core.balancing.promise import Operation, Outcome
from eplb_core.control.store import StoreGone
from eplb_core.errors import EplbError, error_for

if TYPE_CHECKING:
    from eplb_core.arrays import IntArray
    from eplb_core.balancing.core_access import CoreAccess
    from eplb_core.balancing.handover import Handover
    from eplb_core.balancing.load_window import LoadSnapshot, LoadWindow
    from eplb_core.balancing.progress import Progress
    from eplb_core.balancing.promise import PromiseBook
    from eplb_core.balancing.worker import Worker

logger = logging.getLogger("eplb_core")

OnCommit: TypeAlias = "Callable[[int, IntArray, IntArray], None]"
"""``on_commit(layer, old_row, new_row)``: a layer's weights and map, [num_physical_experts], have changed."""

_LONGEST_WAIT_S = 0.05
_WORKER_NOTES_WITHIN_S = 5.0
_WAITS_IN_A_PHASE = 4
_STALLED_GRACE_S = 10.0
_BOUNDED_PHASES = ("agree", "stage", "vote", "end")


class EngineSide:
    """The engine's half of a load balancer.

    Parameters
    ----------
    core : CoreAccess
        The communicator; this thread only commits.
    book : PromiseBook
        Shared with the worker.
    handover : Handover
        Shared with the worker: the map, and what is to be raised.
    progress : Progress
        Is told of waits.
    window : LoadWindow
        This rank's load.
    on_commit : callable or None
        What the host wants called after each commit.

    Attributes
    ----------
    worker : Worker or None
        The thread, where there is one.
    """

    def __init__(
        self,
        core: CoreAccess,
        book: PromiseBook,
        handover: Handover,
        progress: Progress,
        window: LoadWindow,
        on_commit: OnCommit | None,
    ) -> None:
        self._core = core
        self._book = book
        self._handover = handover
        self._progress = progress
        self._window = window
        self._on_commit = on_commit
        self._problem: Exception | None = None
        self._moved: list[int] = []
        self._step: EngineStep | None = None  # the one that is being left, until it is over
        self._snapshot: LoadSnapshot | None = None
        self._due: list[int] | None = None
        self._committed_now: list[int] = []
        self._said_stalled = False
        self._settled: tuple[object, float] | None = None  # what the worker was at, and when the engine settled
        self.worker: Worker | None = None

    # --- a step -------------------------------------------------------------------------------------------------------

    def end_step(self, *, is_dummy: bool) -> None:
        """Count a step and keep the promises that end with it; or go on with one that was left by an exception.

        Raises
        ------
        StoreLostError
            A promise cannot be kept: nobody can tell what was decided. The step is not over.
        """
        if self._due is not None:  # it was left in the middle of its commits
            return
        if self._step is None:
            self._step = EngineStep(self._book, self._core.rank)
        self._keep_promises(self._step)
        self._snapshot = self._window.end_step(self._book.step, is_dummy=is_dummy, mark=self._core.mark)
        self._due = self._step.due

    def _keep_promises(self, step: EngineStep) -> None:
        waited_since_s: float | None = None
        while (operation := step.operation()) is not None:
            if operation.verb == "book":
                step.take()
            elif operation.verb == "pause":
                waited_since_s = waited_since_s or time.monotonic()
                step.take(self._wait(step.layer, waited_since_s))
            else:
                step.take(self._settle(step.layer, operation))
        if waited_since_s is not None:
            self._progress.engine_waited(time.monotonic() - waited_since_s)

    def _wait(self, layer: Any, since_s: float) -> bool:
        """Wait a moment for a decision; True: give up, for the limit is over or the worker is dead."""
        book = self._book
        with book.changed:
            book.changed.wait_for(lambda: layer not in book.promised, _LONGEST_WAIT_S)
        dead = self.worker is None or not self.worker.alive
        return dead or time.monotonic() - since_s > self._core.timeout_s

    def _settle(self, layer: Any, operation: Operation) -> Outcome:
        """Put an abort with this thread's own connection, and return what stands."""
        self._progress.num_engine_settled += 1
        self._settled = (self._progress.at, time.monotonic())
        under_way = self._handover.under_way
        where = f"layer {layer}, the engine at its promise"
        error = error_for("EPLB-T002", seconds=self._core.timeout_s, where=where, waiting_for="a decision")
        proposal = Outcome(None, self._core.rank, error, fatal=True)
        try:
            if under_way is None:
                raise StoreGone("no rearrangement is under way")
            stands: Outcome = under_way.votes[layer].execute(operation._replace(value=proposal))
        except StoreGone as gone:
            lost = error_for("EPLB-T005", where=where, problem=str(gone), layers=[layer])
            lost.report = self._core.communicator.report
            raise lost from gone
        if stands.step is not None:
            # A worker that lives notes it within moments; one that is dead, or hangs, does not.
            until_s = time.monotonic() + _WORKER_NOTES_WITHIN_S
            while not under_way.rearrangement.is_decided(layer):
                if self.worker is None or not self.worker.alive or time.monotonic() > until_s:
                    under_way.rearrangement.accept(layer)
                    break
                time.sleep(1e-3)
        return stands

    def commit_due(self) -> list[int]:
        """Commit what is due in this step, which is over then.

        Raises
        ------
        CommitError
            A copy failed: the weights of this rank are invalid.
        """
        while self._due:
            if self._due[0] in self._book.due:  # else a callback of the host's dropped it, or closed
                self._commit(self._due[0])
            self._due.pop(0)
        committed, self._committed_now = self._committed_now, []
        self._due = self._step = None
        return committed

    def take_snapshot(self) -> LoadSnapshot | None:
        """Return, once, the load of the window that ended with the last step, if one did."""
        snapshot, self._snapshot = self._snapshot, None
        return snapshot

    def commit_all(self) -> None:
        """Commit what is decided, whenever it is due: the load balancer ends, and so it does on all ranks."""
        for layer in list(self._book.due):
            self._commit(layer)
        under_way = self._handover.under_way
        if under_way is not None:  # a worker that stops leaves the end to whoever commits
            self._core.end(under_way.rearrangement)

    def _commit(self, layer: int) -> None:
        under_way = self._handover.under_way
        if under_way is None:
            raise error_for("EPLB-P004", problem=f"layer {layer} is due, and no rearrangement is under way")
        if not under_way.rearrangement.is_decided(layer):
            self._take_over(layer)
            return
        under_way.rearrangement.commit(layer)
        self._committed(layer, under_way.new_map[layer])

    def _take_over(self, layer: int) -> None:
        """A rebuild of the host's committed a layer, as it does all that is decided."""
        self._committed(layer, self._core.communicator.report.physical_to_logical_map[layer])

    def _committed(self, layer: int, row: IntArray) -> None:
        before = self._handover.set_row(layer, row)
        self._committed_now.append(layer)
        self._book.committed(layer)
        self._tell_host(layer, before, row)

    def _tell_host(self, layer: int, before: IntArray, row: IntArray) -> None:
        self._window.placed(layer, row)
        if self._on_commit is not None:
            try:
                self._on_commit(layer, before, row.copy())
            except Exception as error:
                self._problem = self._problem or error

    def raise_problem(self) -> None:
        """Raise what the host's own callback raised, once every layer is committed."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    # --- without a worker ---------------------------------------------------------------------------------------------

    def move_now(self, new_map: IntArray) -> None:
        """Bring all layers to a new map, here and now; collective."""
        communicator, old_map = self._core.communicator, self._handover.map()
        try:
            communicator.rearrange(old_map, new_map)
        finally:  # after a failure, or Ctrl-C, some layers hold the new placement
            self._note_moved(old_map, communicator.report.physical_to_logical_map)

    def _note_moved(self, old_map: IntArray, held: IntArray) -> None:
        if held.shape != old_map.shape:
            return
        self._handover.set_map(held)
        for layer in (old_map != held).any(axis=1).nonzero()[0].tolist():
            self._tell_host(layer, old_map[layer], held[layer])
            self._moved.append(layer)

    def take_moved(self) -> list[int]:
        """Return, once, the layers that `move_now` moved."""
        moved, self._moved = self._moved, []
        return moved

    # --- what went wrong ----------------------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise, once, what failed in the background.

        Raises
        ------
        EplbError
            See `LoadBalancer.step`.
        """
        failure = self._handover.take_failure()
        if failure is None:
            failure = self._stalled()
        if failure is not None:
            if failure.report is None:
                failure.report = self._core.communicator.report
            raise failure

    def _stalled(self) -> EplbError | None:
        at = phase, _, since_s = self._progress.at
        if self.worker is None or self._said_stalled or phase not in _BOUNDED_PHASES:
            return None
        now_s = time.monotonic()
        for_s, limit_s = now_s - since_s, _WAITS_IN_A_PHASE * self._core.timeout_s + _STALLED_GRACE_S
        if self._settled is not None and self._settled[0] == at:  # what it waits for stands: it should have seen it
            limit_s = self._settled[1] - since_s + _WORKER_NOTES_WITHIN_S
        if for_s <= limit_s:
            return None
        self._said_stalled = True
        return error_for("EPLB-T022", problem=self._progress.place())

    # --- calling off --------------------------------------------------------------------------------------------------

    def drop(self, reloaded: IntArray | None) -> None:
        """Give up every layer whose step has not come, and what follows."""
        under_way = self._handover.under_way
        for layer in self._book.drop():
            if under_way is not None and under_way.rearrangement.is_decided(layer):
                under_way.rearrangement.discard(layer)
            elif under_way is not None:
                self._take_over(layer)
        self._handover.call_off(RELOADING, reloaded=reloaded)
        if reloaded is not None:
            for layer, row in enumerate(reloaded):
                self._window.placed(layer, row)
            if self.worker is None:  # which tells the communicator otherwise
                self._core.communicator.reloaded(reloaded)
                self._handover.reloaded = None
