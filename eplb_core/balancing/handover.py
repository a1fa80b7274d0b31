"""What the engine's thread and the worker hand to each other, besides promises."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eplb_core.errors import error_for

if TYPE_CHECKING:
    from eplb_core.arrays import IntArray
    from eplb_core.balancing.core_access import CoreAccess
    from eplb_core.balancing.load_window import LoadSnapshot
    from eplb_core.balancing.promise import PromiseBook
    from eplb_core.balancing.vote_store import VoteStore
    from eplb_core.errors import EplbError
    from eplb_core.rearrange.background_moves import BackgroundMoves


CLOSING = "a rank closes its LoadBalancer"
RELOADING = "the host is about to rewrite weights"


@dataclass(eq=False)
class UnderWay:
    """A rearrangement in the background.

    Parameters
    ----------
    rearrangement : BackgroundMoves
        The core's, agreed on by all ranks.
    new_map : IntArray
        Where it leads.
    votes : dict of int to VoteStore
        By layer: the keys of its vote, over the engine's own connection.
    """

    rearrangement: BackgroundMoves
    new_map: IntArray
    votes: dict[int, VoteStore] = field(default_factory=dict)


class Handover:
    """Guarded by the lock of the `PromiseBook`, whose condition wakes the worker.

    Parameters
    ----------
    book : PromiseBook
        Lends its lock.
    physical_to_logical_map : IntArray
        What holds; the engine's thread changes it, layer by layer.
    step_interval : int
        Forward steps from one rearrangement to the next.
    """

    def __init__(self, book: PromiseBook, physical_to_logical_map: IntArray, step_interval: int) -> None:
        self._book = book
        self._map: IntArray = physical_to_logical_map.copy()
        self._interval = step_interval
        self.next_step = step_interval
        """From which on all ranks rearrange again; the same on all, for it follows from what all know."""
        self.snapshot: LoadSnapshot | None = None
        self.under_way: UnderWay | None = None
        self.called_off: EplbError | None = None
        """Why what is under way is not wanted any more."""
        self._stopping = False
        self.failure: EplbError | None = None
        """To be raised in the next step."""
        self.version = 0
        """How often the host replaced the map."""
        self.reloaded: IntArray | None = None
        """What the host says that it loaded, until the communicator knows."""

    @property
    def stopping(self) -> bool:
        """Is there nothing more to do: it was closed or dropped, or the process is about to end?"""
        return self._stopping or not threading.main_thread().is_alive()

    # --- the engine's side --------------------------------------------------------------------------------------------

    def offer(self, snapshot: LoadSnapshot) -> None:
        """A window has ended."""
        with self._book.changed:
            self.snapshot = snapshot
            self._book.changed.notify_all()

    def set_row(self, layer: int, row: IntArray) -> IntArray:
        """A layer is committed; return the row before."""
        with self._book.changed:
            before: IntArray = self._map[layer].copy()
            self._map[layer] = row
            return before

    def set_map(self, physical_to_logical_map: IntArray) -> None:
        """All layers hold something else."""
        with self._book.changed:
            self._map = physical_to_logical_map.copy()

    def map(self) -> IntArray:
        """Return a copy of what holds."""
        return self.versioned_map()[1]

    def versioned_map(self) -> tuple[int, IntArray]:
        """Return a copy of what holds, and how often the host replaced it."""
        with self._book.changed:
            return self.version, self._map.copy()

    def take_failure(self) -> EplbError | None:
        """Return, once, what is to be raised."""
        failure, self.failure = self.failure, None
        return failure

    def call_off(self, reason: str, *, stopping: bool = False, reloaded: IntArray | None = None) -> None:
        """Do not go on with what is under way, nor, when `stopping`, with anything else."""
        with self._book.changed:
            self.called_off = error_for("EPLB-T021", reason=reason)
            self._stopping = self._stopping or stopping
            if reloaded is not None:
                self.reloaded, self._map = reloaded, reloaded.copy()
                self.version += 1
            self._book.changed.notify_all()

    # --- the worker's side --------------------------------------------------------------------------------------------

    def await_work(self) -> LoadSnapshot | None:
        """Wait for the next window that is due; None when there is something else to do: to stop, or a reload."""
        with self._book.changed:
            while not (self.stopping or self.reloaded is not None):
                snapshot = self.snapshot
                if snapshot is not None and snapshot.step >= self.next_step:
                    self.called_off = None
                    return snapshot
                self._book.changed.wait(0.5)
            return None

    def await_the_end(self) -> None:
        """Wait until this load balancer is closed."""
        with self._book.changed:
            while not self.stopping:
                self._book.changed.wait(0.5)

    def await_commits(self, layer: int | None = None, timeout_s: float = 0.05) -> bool:
        """Wait a moment for the engine's commit of a layer, or of all; True when nothing is left to wait for."""
        with self._book.changed:
            due = self._book.due
            if due if layer is None else layer in due:
                self._book.changed.wait(timeout_s)
            return not (due if layer is None else layer in due)

    def rearranged_at(self, step: int) -> None:
        """All ranks know that they rearranged at a step, so they know when they do again."""
        with self._book.changed:
            self.next_step = step + self._interval

    def resume_after(self, step: int) -> None:
        """All ranks know the latest step of any, so they know when they rearrange again."""
        with self._book.changed:
            self.next_step = (step // self._interval + 1) * self._interval


def let_go(core: CoreAccess, handover: Handover) -> None:
    """The load balancer was dropped without `close`: its worker ends, and another may take the communicator."""
    if not core.is_inherited:
        core.release()
        handover.call_off(CLOSING, stopping=True)
