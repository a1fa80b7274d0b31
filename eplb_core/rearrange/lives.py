"""The epochs of one communicator, one after another, from the constructor to close."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eplb_core.backend.toolkit import Deadline
from eplb_core.control.process import ProcessIdentity
from eplb_core.control.store import StoreClient, StoreGone
from eplb_core.errors import EplbError, TransferError, error_for
from eplb_core.rearrange.entrance import Entrance
from eplb_core.rearrange.epoch import Epoch
from eplb_core.rearrange.failure import refusal_of
from eplb_core.rearrange.retirement import Retirement
from eplb_core.rearrange.setup import Setup, set_up
from eplb_core.rearrange.sleep import Asleep, awakened, put_to_sleep
from eplb_core.voting.meeting import Meeting
from eplb_core.voting.operations import Refusal, perform

if TYPE_CHECKING:
    import torch

    from eplb_core.control.plane import ControlPlane
    from eplb_core.rearrange.rearrangement import Rearrangement
    from eplb_core.rearrange.state import CommunicatorState

logger = logging.getLogger("eplb_core")

_CLOSE_FORCED_S = 0.8
_REFUSAL_HEARD_S = 2.0


class Lives:
    """Holds the current epoch, and makes the next.

    Parameters
    ----------
    control : ControlPlane
        The store, and the number of this rank.
    name : str
        Name of the communicator.
    timeout_s : float
        Limit of a wait, seconds.
    device_group : ProcessGroup or None
        The host's process group, for backends that use one.
    """

    def __init__(self, control: ControlPlane, name: str, timeout_s: float, device_group: Any) -> None:
        control.claim(name)
        self.control = control
        self.host_landing: list[list[torch.Tensor]] | None = None
        self.last: Rearrangement | None = None
        """The last rearrangement begun; its decided layers are committed when its epoch ends, at the latest."""
        self._name = name
        self._timeout_s = timeout_s
        self._device_group = device_group
        self._process = ProcessIdentity.mine()
        self._client: StoreClient | None = None
        self._keys: tuple[set[str], set[str]] = (set(), set())
        self._asleep: Asleep = []

    @property
    def rank(self) -> int:
        """This rank."""
        return self.control.rank

    def is_mine(self, process: ProcessIdentity) -> bool:
        """Is this the identity with which this communicator meets the others?"""
        return process == self._process

    @property
    def setup(self) -> Setup:
        """What its epochs are made of."""
        return self._setup

    def begin(self, setup: Setup, state: CommunicatorState) -> None:
        """Build the first epoch, over all ranks; local."""
        self._setup = setup
        self._state = state
        self._retirement = Retirement(state)
        self.epoch = self._build(tuple(range(self.control.world_size)))

    def _build(self, members: Sequence[int]) -> Epoch:
        return Epoch(self._setup, self.control, members, self._device_group, self.host_landing, self._state.leaving)

    # --- meeting the others ------------------------------------------------------------------------------------------

    def enter(self, timeout_s: float, *, everyone: bool) -> bool:
        """Meet the members of the current epoch; collective. False when they had met before."""
        if self.epoch.retired:  # trimmed
            self._build_next(self.epoch.asked, "connect")
        epoch, state = self.epoch, self._state
        if epoch.members is not None:
            return False
        meeting = self._meeting(epoch.asked, state.epoch)
        client = self._connected(timeout_s)
        Entrance(epoch, client, meeting, state.held).enter(timeout_s, everyone=everyone)
        state.new_epoch(epoch.number)
        self._retirement.forget(client, epoch.asked)
        return True

    def renew(
        self,
        *,
        control: ControlPlane | None,
        ranks: Sequence[int] | None,
        device_group: Any,
        landing: Any,
    ) -> None:
        """End the current epoch and build the next; local. See `Communicator.rebuild`."""
        self._state.check_open()
        if self._state.invalid is not None:
            problem = "the weights of this rank are invalid since a commit failed on it"
            raise TransferError("EPLB-T009", problem=problem) from self._state.invalid
        members = self.epoch.asked if ranks is None else tuple(sorted({int(rank) for rank in ranks}))
        if self.rank not in members or not set(members) <= set(range(self.control.world_size)):
            problem = f"ranks={list(members)} must be ranks of the group, {self.rank} among them"
            raise TransferError("EPLB-T009", problem=problem)
        if control is not None and (control.rank, control.world_size) != (self.rank, self.control.world_size):
            raise TransferError("EPLB-T009", problem="the new control plane gives this rank another number")
        given = None
        if landing is not None:
            given = self._setup.take_landing(landing)
        if control is not None and control is not self.control:
            control.claim(self._name)
            self.control.release(self._name)
            self.control = control
        self.finish()
        self._retirement.retire(self.epoch, host_landing=self.host_landing is not None, new_landing=given is not None)
        self.host_landing = self.host_landing if given is None else given
        self._device_group = self._device_group if device_group is None else device_group
        self._drop_client(another_store=control is not None)
        self._build_next(members, "rebuild")

    def trim(self) -> None:
        """End the current epoch; the next is built when it is entered. See `Communicator.trim`."""
        self._retirement.retire(self.epoch, host_landing=self.host_landing is not None, new_landing=False)
        self._drop_client(another_store=False)
        self._state.nbytes_spare = 0

    def _build_next(self, members: Sequence[int], where: str) -> None:
        with self.telling_the_others(members):
            try:
                self.epoch = self._build(members)
            except Exception as error:
                self._state.poison(refusal_of(error, self.rank, where), where)
                raise

    def suspend(self) -> None:
        """End the current epoch, and keep no memory of the host's alive; local."""
        self.finish()
        self.trim()
        self._asleep = put_to_sleep(self._setup.layout)

    def resume(
        self,
        weights: Sequence[Sequence[torch.Tensor | Sequence[torch.Tensor]]] | None,
        landing: Any,
        device_group: Any,
    ) -> None:
        """Build the next epoch, over the same members; local. See `Communicator.resume`."""
        layout = awakened(self._setup.layout, self._asleep, weights)
        setup = replace(self._setup, layout=layout)
        given = setup.take_landing(landing)
        self._setup = setup
        self.host_landing = self.host_landing if given is None else given
        self._device_group = self._device_group if device_group is None else device_group
        with self.telling_the_others(self.epoch.asked):
            self.epoch = self._build(self.epoch.asked)

    def take_backend(self, name: str) -> None:
        """Take another backend, with its default options, from the next `renew` on; EplbError where it cannot be."""
        before = self._setup
        config = before.config.model_copy(update={"communicator": name, "fallback": None})
        setup = set_up(
            config,
            before.layout,
            stream=before.streams.side,
            options=None,
            observers=before.observers,
            name=before.name,
            sources=before.sources,
        )
        self._setup = setup
        if self.host_landing is not None and setup.backend_class.landing_layout != "rows":
            logger.info("%s: the host's landing memory is not used: %s packs its own", before.name, setup.info.name)
            self.host_landing = None
        self._state.take_backend(setup.info.name, setup.allocator)

    def finish(self) -> None:
        """Commit the layers that are decided and not yet copied here, as every other rank does."""
        if self.last is not None:
            self.last.commit_decided()

    @contextmanager
    def telling_the_others(self, members: Sequence[int] | None = None) -> Iterator[None]:
        """If building fails, tell the other ranks why: they wait for this rank."""
        try:
            yield
        except Exception as error:
            refusal = error_for("EPLB-M006", rank=self.rank, reason=str(refusal_of(error, self.rank, "construction")))
            everyone = tuple(range(self.control.world_size)) if members is None else tuple(members)
            try:
                self._refuse(refusal, everyone)
            except (StoreGone, EplbError) as untold:
                logger.warning("rank %d could not tell the others why it failed: %s", self.rank, untold)
            if members is None:  # in the constructor: there will be no communicator
                self._process.release()
                self.control.release(self._name)
            raise

    def _refuse(self, refusal: EplbError, members: tuple[int, ...]) -> None:
        # The store ends with the process that hosts it, so that process stays until all have read the reason.
        heard = Deadline(self._timeout_s if self.control.hosts_store else min(_REFUSAL_HEARD_S, self._timeout_s))

        def pause() -> Refusal | None:
            time.sleep(2e-3)
            nobody_left = set(members) <= {self.rank, *self.control.absent()}
            return Refusal(refusal) if heard.over or nobody_left else None

        perform(self._meeting(members, 0).refusing(refusal), self._connected(self._timeout_s), pause)

    def _meeting(self, members: tuple[int, ...], epoch: int) -> Meeting:
        private = self.control.private
        return Meeting(self._name, self.rank, members, epoch, self._process, private=private)

    def _connected(self, timeout_s: float) -> StoreClient:
        if self._client is None:
            limit_s = min(timeout_s, self._timeout_s)
            self._client = client = self.control.client(f"eplb/{self._name}", limit_s)
            client.own |= self._keys[0]
            client.shared |= self._keys[1]
        return self._client

    def _drop_client(self, *, another_store: bool) -> None:
        """Close the connection, which may be out of step after a failure, and remember the keys it has set."""
        if self._client is not None:
            self._keys = (set(self._client.own), set(self._client.shared))
            self._client.close()
            self._client = None
        if another_store:
            self._keys = (set(), set())

    # --- the end -----------------------------------------------------------------------------------------------------

    def store_lost(self, gone: StoreGone, where: str) -> EplbError:
        """Make the error for a store that did not answer."""
        epoch = self.epoch
        dead = ", ".join(f"rank {rank}" for rank in (epoch.members.dead if epoch.members is not None else ()))
        detail = f"Gone: {dead}." if dead else ""
        return error_for("EPLB-T005", where=where, problem=str(gone), layers="none", detail=detail)

    def end(self, *, force: bool) -> None:
        """End the communicator: commit decided layers unless forced, close the backend, say goodbye, free memory.

        Notes
        -----
        A step that fails does not keep the later ones from being taken.
        """
        state = self._state
        with state.closing(self.rank, _CLOSE_FORCED_S if force else self._timeout_s):
            unclean = force or state.poisoned is not None or state.open is not None
            try:
                if state.invalid is None:
                    self.finish()
            finally:
                self._retirement.leave(
                    self.epoch,
                    unclean=unclean,
                    force=force,
                    wait_s=0.0 if force else _CLOSE_FORCED_S if unclean else self._timeout_s,
                    hosts_store=self.control.hosts_store,
                )
                if self.last is not None:
                    self.last.let_go()
                self._process.release()
                self.control.release(self._name)
                self._drop_client(another_store=True)
        self._finalizer.detach()

    def end_with(self, owner: object) -> None:
        """Leave at once when the owner is collected without `end`, so that the others notice and nothing leaks."""
        self._finalizer = weakref.finalize(owner, _dropped, self, os.getpid())
        self._finalizer.atexit = False  # the end of a process closes its connections by itself


def _dropped(lives: Lives, pid: int) -> None:
    if os.getpid() != pid:  # a forked child's copy: everything is the parent's
        return
    logger.warning("%s: dropped without close()", lives._name)
    with suppress(EplbError):
        lives.end(force=True)
