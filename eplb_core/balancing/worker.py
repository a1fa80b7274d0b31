"""The worker: the thread that waits for the next interval and rearranges in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from eplb_core.balancing.rearranger import StoppedError
from eplb_core.errors import error_for

if TYPE_CHECKING:
    from eplb_core.balancing.core_access import CoreAccess
    from eplb_core.balancing.handover import Handover
    from eplb_core.balancing.load_window import LoadSnapshot
    from eplb_core.balancing.progress import Progress

logger = logging.getLogger("eplb_core")


class Worker:
    """One thread, from the load balancer's construction to its close.

    Parameters
    ----------
    core : CoreAccess
        The communicator, which this thread alone uses, but for commits.
    handover : Handover
        Shared with the engine.
    progress : Progress
        Is told what is done.
    rearrange : callable
        Rearranges once; False when nothing can be rearranged any more.
    """

    def __init__(
        self, core: CoreAccess, handover: Handover, progress: Progress, rearrange: Callable[[LoadSnapshot], bool]
    ) -> None:
        self._core = core
        self._handover = handover
        self._progress = progress
        self._rearrange = rearrange
        # Not daemonic: it ends before the interpreter does, whose libraries it uses. See `Handover.stopping`.
        self._thread = threading.Thread(target=self._run, name=f"eplb-load-balancer-{core.communicator.name}")
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Does the thread run?"""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, at most so long; False when it has not."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        handover, progress = self._handover, self._progress
        try:
            while not handover.stopping:
                progress.enter("idle")
                snapshot = handover.await_work()
                if handover.reloaded is not None:
                    self._core.communicator.reloaded(handover.reloaded)
                    handover.reloaded = None
                elif snapshot is not None and not self._rearrange(snapshot):
                    progress.enter("failed")
                    handover.await_the_end()
        except StoppedError:
            pass
        except BaseException as error:
            logger.exception("%s: the load balancer's worker died", self._core.communicator.name)
            progress.enter("failed")
            died = error_for("EPLB-T022", problem=f"died of {type(error).__name__}: {error}")
            died.__cause__ = error
            handover.failure = died
