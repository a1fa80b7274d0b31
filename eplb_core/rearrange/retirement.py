"""How an epoch ends: close the backend, tell the others, and keep memory that may still be written."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from eplb_core.control.store import StoreClient, StoreGone
from eplb_core.errors import TransferError
from eplb_core.memory.quarantine import keep_forever
from eplb_core.voting import departure, store_keys

if TYPE_CHECKING:
    from eplb_core.rearrange.epoch import Epoch
    from eplb_core.rearrange.state import CommunicatorState
    from eplb_core.voting.members import Members

logger = logging.getLogger("eplb_core")


class Retirement:
    """Ends the epochs of one communicator.

    Parameters
    ----------
    state : CommunicatorState
        Says which memory may still be written, and is told what was freed.
    """

    def __init__(self, state: CommunicatorState) -> None:
        self._state = state
        self._quarantined = 0
        self._landing_kept: list[Epoch] = []  # layers in doubt may still have to be copied out of it
        self._left: list[Members] = []

    def retire(self, epoch: Epoch, *, host_landing: bool, new_landing: bool) -> None:
        """Close an epoch's backend before the next is built; memory that it may still write is quarantined.

        Raises
        ------
        TransferError
            As much is quarantined as the limit allows, or the host's landing memory may still be written (EPLB-T009).
        """
        if epoch.retired:  # an earlier rebuild came this far
            return
        safe = self._close_backend(epoch, force=True)
        if epoch.members is not None:
            departure.say_goodbye(epoch.members)
            self._left.append(epoch.members)
        if safe and self._state.held.doubts:
            self._landing_kept.append(epoch)
        elif safe and self._give_landing_back(epoch):
            epoch.let_go()
        else:
            self._quarantine(epoch, host_landing=host_landing, new_landing=new_landing)
        epoch.retired = True

    def forget(self, client: StoreClient, present: Sequence[int]) -> None:
        """Delete the keys and free the landing memory of earlier epochs, once the next epoch is entered."""
        left, self._left = self._left, []
        for members in left:
            with suppress(StoreGone):
                store_keys.leave_epoch_behind(client, members.namespace, members.rank, members.members, present)
        kept, self._landing_kept = self._landing_kept, []
        for epoch in kept:
            if self._give_landing_back(epoch):
                epoch.let_go()
            else:
                keep_forever(epoch)

    def leave(self, epoch: Epoch, *, unclean: bool, force: bool, wait_s: float, hosts_store: bool) -> None:
        """Close the backend, tell the others, give the memory back; a step that fails does not stop the later ones."""
        if epoch.retired and self._state.poisoned is None:  # it was trimmed, or sleeps, and has left already
            epoch.setup.layout.let_go()
            return
        safe = epoch.retired or self._close_backend(epoch, force=unclean)
        members = epoch.members
        if members is not None:
            self._tell(members, unclean=unclean, force=force, stays_s=wait_s if hosts_store else 0.0)
        if epoch.retired:  # its memory was given back, or is kept, already
            epoch.setup.layout.let_go()
        elif safe and self._give_landing_back(epoch):
            epoch.let_go()
            epoch.setup.layout.let_go()
        else:
            keep_forever(epoch)
        self._state.held.doubts = []
        self._landing_kept = []

    def _tell(self, members: Members, *, unclean: bool, force: bool, stays_s: float) -> None:
        try:
            if unclean:
                departure.vanish(members)
                if not force:  # the store may not answer; a later process can see anyway that this one is gone
                    departure.take_post_back(members)
            else:
                departure.say_goodbye(members, tidies=not stays_s)
            if stays_s:
                departure.await_goodbyes(members, stays_s)
                if not unclean:
                    # last, for the others' goodbyes are keys as well
                    store_keys.tidy_up(members.client, members.namespace, members.members)
        except StoreGone as gone:
            logger.warning("%s: the store was gone at close: %s", members.name, gone)

    def _close_backend(self, epoch: Epoch, *, force: bool) -> bool:
        """Close a backend; True when it certainly no longer touches memory. An exception is logged."""
        # An open rearrangement may have transfers in flight that nobody has stopped.
        undrained = self._state.undrained or self._state.open is not None
        try:
            return epoch.close_backend(force=force, undrained=undrained)
        except Exception as error:
            logger.warning("%s: %s failed to close: %r", self._state.name, epoch.setup.info.name, error)
            return False

    def _give_landing_back(self, epoch: Epoch) -> bool:
        """Release the slots, each after the event of its last copies; False when the device cannot tell."""
        try:
            # A commit may have run on another stream than the caller's; a failed or recovered one left no event.
            rest = epoch.setup.streams.mark()
        except RuntimeError as error:
            logger.warning("%s: the landing memory is kept, for the device failed: %s", self._state.name, error)
            return False
        epoch.landing.release(self._state.slot_events, rest)
        return True

    def _quarantine(self, epoch: Epoch, *, host_landing: bool, new_landing: bool) -> None:
        keep_forever(epoch)
        limit = epoch.setup.config.staging_layers
        if self._quarantined >= limit:
            problem = f"{self._quarantined} sets of landing memory are quarantined, as many as the limit allows"
            raise TransferError("EPLB-T009", problem=problem, detail="Restart this process.")
        if host_landing and not new_landing:
            raise TransferError("EPLB-T009", problem="the host's landing= may still be written; give a new one")
        self._quarantined += 1
        self._state.quarantined_nbytes += epoch.landing.nbytes
