"""The worker: the thread that waits for the next interval and rearranges in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from eplb_core.balancing.rearranger import StoppedError
from eplb_core.errors import error_for
from eplb_core.errors.texts import describe

if TYPE_CHECKING:
    from eplb_core.balancing.core_access import CoreAccess
    from eplb_core.balancing.handover import Handover
    from eplb_core.balancing.load_window import LoadSnapshot
    from eplb_core.balancing.progress import Progress
    from eplb_core.errors import EplbError

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
    recover : callable
        ``recover(error)`` after an exception that nobody expected; as `rearrange`.
    """

    def __init__(
        self,
        core: CoreAccess,
        handover: Handover,
        progress: Progress,
        rearrange: Callable[[LoadSnapshot], bool],
        recover: Callable[[EplbError], bool],
    ) -> None:
        self._core = core
        self._handover = handover
        self._progress = progress
        self._rearrange = rearrange
        self._recover = recover
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
        able = True
        while not self._handover.stopping:
            try:
                able = self._work() if able else self._rest()
            except StoppedError:
                return
            except BaseException as error:
                died = error_for("EPLB-T022", problem=f"died of {describe(error)}")
                died.__cause__ = error
                if self._core.config.on_failure == "raise":
                    logger.exception("%s: the load balancer's worker died", self._core.communicator.name)
                    self._progress.enter("failed")
                    self._handover.failure = died
                    return
                able = self._revived(died)

    def _work(self) -> bool:
        """Do the next thing there is to do; False when nothing can be rearranged any more."""
        handover = self._handover
        self._progress.enter("idle")
        snapshot = handover.await_work()
        if handover.reloaded is not None:
            self._core.communicator.reloaded(handover.reloaded)
            handover.reloaded = None
        elif snapshot is not None:
            return self._rearrange(snapshot)
        return True

    def _rest(self) -> bool:
        self._progress.enter("failed")
        self._handover.await_the_end()
        return False

    def _revived(self, died: EplbError) -> bool:
        try:
            return self._recover(died)
        except StoppedError:
            return True  # and the load balancer is stopping
        except BaseException:
            logger.exception("%s: nothing is rearranged until the host acts", self._core.communicator.name)
            return False
