"""One try at each interval: place, move, and surface or mend what failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from eplb_core.balancing.handover import CLOSING
from eplb_core.balancing.patience import Patience
from eplb_core.balancing.recovery import Told, fails_over, rebuild, why_not_alone
from eplb_core.control.store import StoreGone
from eplb_core.errors import EplbError, error_for
from eplb_core.errors.texts import describe

if TYPE_CHECKING:
    from eplb_core.arrays import IntArray
    from eplb_core.balancing.core_access import CoreAccess
    from eplb_core.balancing.handover import Handover
    from eplb_core.balancing.load_exchange import Pause
    from eplb_core.balancing.load_window import LoadSnapshot
    from eplb_core.balancing.placing import Placing
    from eplb_core.balancing.progress import Progress
    from eplb_core.balancing.promise import PromiseBook

logger = logging.getLogger("eplb_core")


class StoppedError(Exception):
    """The load balancer is being closed."""


class Rearranger:
    """Tries to rearrange; used by the worker, or by the engine's thread where nothing is in the background.

    Parameters
    ----------
    core : CoreAccess
        The communicator.
    book : PromiseBook
        Counts steps.
    handover : Handover
        What holds, and what is to be raised.
    progress : Progress
        Is told what is done.
    placing : Placing
        Places experts by their load.
    move : callable
        Brings the layers to a new map; collective.
    """

    def __init__(
        self,
        core: CoreAccess,
        book: PromiseBook,
        handover: Handover,
        progress: Progress,
        placing: Placing,
        move: Callable[[IntArray], None],
    ) -> None:
        self._core = core
        self._book = book
        self._handover = handover
        self._progress = progress
        self._placing = placing
        self._move = move

    def run(self, snapshot: LoadSnapshot) -> bool:
        """Rearrange once; False when nothing can be rearranged any more until the host acts.

        Raises
        ------
        StoppedError
            The load balancer is being closed.
        """
        exchanged = False
        try:
            self._progress.enter("load")
            new_map = self._placing.run(snapshot, self._handover, self._pause())
            exchanged = True
            if new_map is not None:
                self._move(new_map)
                self._progress.succeeded()
        except StoppedError:
            raise
        except StoreGone as gone:
            error = error_for("EPLB-T005", where="the load balancer, phase load", problem=str(gone), layers="none")
            return self._failed(error, exchanged=False)
        except EplbError as error:
            return self._failed(error, exchanged=exchanged)
        except Exception as error:
            reason = describe(error)
            named = error_for("EPLB-T007", rank=self._core.rank, where="the load balancer", reason=reason)
            named.__cause__ = error
            return self._failed(named, exchanged=exchanged)
        return True

    def _pause(self) -> Pause:
        """Wait for the other ranks' loads as long as their engines may take to come to this step."""
        step = self._handover.next_step if self._core.config.use_async else None
        patience = Patience(self._book, self._progress, step, self._core.timeout_s, "the load balancer, phase load")

        def pause(what: str, missing: Callable[[], list[int]]) -> None:
            del what
            if self._handover.stopping:
                raise StoppedError
            self._core.check_members("the load balancer, phase load")
            worn_out = patience.worn_out(missing)
            if worn_out is not None:
                raise worn_out

        return pause

    # --- failures -----------------------------------------------------------------------------------------------------

    def recover(self, died: EplbError) -> bool:
        """Go on after an exception that nobody expected, with a new epoch: what the others know of this try is unknown.

        Returns
        -------
        bool
            As `run`.
        """
        return self._failed(died, exchanged=False)

    def _failed(self, error: EplbError, *, exchanged: bool) -> bool:
        core, communicator = self._core, self._core.communicator
        usable = communicator.usable and exchanged
        if error.code == "EPLB-T021":  # nothing failed, though a backend may have had to be stopped
            logger.info("%s: %s", communicator.name, error)
            return usable or (exchanged and error.fields.get("reason") != CLOSING and self._mended(error))
        if error.report is None:
            error.report = communicator.report
        self._progress.failed(error)
        if core.config.on_failure == "raise":
            self._handover.failure = error
            return usable
        logger.error("%s: a rearrangement failed, the placement that holds is kept: %s", communicator.name, error)
        return (usable and not fails_over(core, self._progress.failures_in_a_row)) or self._mended(error)

    def _mended(self, error: EplbError) -> bool:
        """Meet the members anew, where they can do that by themselves."""
        core, progress, handover = self._core, self._progress, self._handover
        name = core.communicator.name
        reason = why_not_alone(core, error)
        if reason is None and self._book.due:
            reason = "layers are decided and not yet committed"
        if reason is not None:
            logger.error("%s: nothing is rearranged until the host acts: %s", name, reason)
            return False
        progress.enter("rebuild")
        mine = Told(progress.failures_in_a_row, self._book.step)
        try:
            told = rebuild(core, mine, lambda: handover.stopping)
        except EplbError as final:
            if handover.stopping:
                raise StoppedError from final
            progress.failed(final)
            logger.error("%s: nothing is rearranged until the host acts: %s", name, final)  # noqa: TRY400 - named
            return False
        self._placing.begin_epoch()
        handover.resume_after(told.step)
        logger.warning(
            "%s: rebuilt, with %s; the next try is at step %d.", name, core.communicator.backend, handover.next_step
        )
        return True
