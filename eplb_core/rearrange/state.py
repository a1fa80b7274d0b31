"""Whether a communicator may be used, by which thread, and what it reports."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_core.errors import CommitError, EplbError, PlanError, PoisonedError, TransferError, error_for
from eplb_core.rearrange.counts import Counts
from eplb_core.rearrange.held import HeldPlacement
from eplb_core.report import RearrangeReport, StagingStats

if TYPE_CHECKING:
    from eplb_core.backend import StagingAllocator

logger = logging.getLogger("eplb_core")


class CommunicatorState:
    """The state of one communicator over all its epochs.

    Parameters
    ----------
    name : str
        Name of the communicator.
    backend : str
        Name of its backend.
    held : HeldPlacement
        What the rows hold.
    allocator : StagingAllocator
        Staging allocator; the report shows its bytes.

    Notes
    -----
    There are two locks: one for collective calls, one for commits, which are local and may come from another thread
    than the one that stages the next layer. Only `closing` waits for them, within a limit.
    """

    def __init__(self, name: str, backend: str, held: HeldPlacement, allocator: StagingAllocator) -> None:
        self.name = name
        self.held = held
        self.counts = Counts()
        self.epoch = 0
        self.generation = 0
        self.open: object | None = None
        """The rearrangement that is open: begun, and neither ended nor abandoned."""
        self.invalid: CommitError | None = None
        """Why the weights of this rank are invalid; this is final."""
        self.undrained = False
        """May a transfer of this epoch still write, although the backend was asked to stop it?"""
        self.slot_events: dict[int, Any] = {}
        """Event after the last copies out of each landing slot."""
        self.quarantined_nbytes = 0
        self.nbytes_spare = 0
        """Bytes of the spare rows of landing memory; torch allocates them, whichever allocator is configured."""
        self._backend = backend
        self._allocator = allocator
        self._staging = StagingStats(0, 0, 0)
        self._poison: tuple[EplbError, str] | None = None
        self._closed = False
        self.suspended = False
        """Is nothing registered, from `suspend` to `resume`?"""
        self._leaving: EplbError | None = None
        self._pid = os.getpid()
        self._calls = _OneUser("a call while another thread is inside one")
        self._commits = _OneUser("a commit while another thread is inside one")

    def take_backend(self, name: str, allocator: StagingAllocator) -> None:
        """Report of another backend from now on."""
        self._backend, self._allocator = name, allocator

    # --- a rearrangement's life --------------------------------------------------------------------------------------

    def entered(self, epoch: int, generation: int) -> None:
        """Begin a generation: its number rises at entry, whatever comes of it."""
        self.epoch, self.generation = epoch, generation
        self.counts = Counts()
        self.held.entered()

    def ended(self, rearrangement: object) -> None:
        """Note that a rearrangement is over, finished or abandoned."""
        if self.open is rearrangement:
            self.open = None
            self.counts.end()

    def new_epoch(self, epoch: int) -> None:
        """Note that connections are new: a poisoned communicator is usable again."""
        self.epoch, self.generation = epoch, 0
        self._poison = None
        self.undrained = False
        self.open = None
        self.slot_events = {}

    def take_slot_events(self, slot: int | None = None) -> list[Any]:
        """Return, once, the events after the last copies out of a slot, or out of all."""
        slots = list(self.slot_events) if slot is None else [slot]
        return [self.slot_events.pop(number, None) for number in slots]

    # --- may it be used? ---------------------------------------------------------------------------------------------

    def poison(self, error: EplbError, where: str, *, undrained: bool = False) -> None:
        """Refuse all use from now on, until a rebuild; the first reason stays."""
        if self._poison is None:
            self._poison = (error, where)
            wanted = error.code == "EPLB-T021"  # by the host, as when it closes its LoadBalancer: no failure
            logger.log(logging.INFO if wanted else logging.ERROR, "%s: unusable until rebuild: %s", self.name, error)
        self.undrained = self.undrained or undrained

    @property
    def poisoned(self) -> EplbError | None:
        """The error for which all use is refused, or None."""
        return None if self._poison is None else self._poison[0]

    @property
    def closed(self) -> bool:
        """Was it closed?"""
        return self._closed

    @property
    def forked(self) -> bool:
        """Is this another process than the one that made it?"""
        return os.getpid() != self._pid

    def leaving(self) -> EplbError | None:
        """Return why this rank should give up: another thread closes the communicator. Else None."""
        return self._leaving

    def note(self, text: str) -> None:
        """Log an error that another one, already being raised, would hide."""
        logger.warning("%s: %s", self.name, text)

    def check_open(self) -> None:
        """Raise when it was closed (EPLB-T008), made in another process (EPLB-T013), or is suspended (EPLB-T025)."""
        self.check_not_closed()
        if self.suspended:
            raise TransferError("EPLB-T025", name=self.name)

    def check_not_closed(self) -> None:
        """Raise when it was closed (EPLB-T008), or made in another process (EPLB-T013)."""
        if self.forked:
            raise TransferError("EPLB-T013", name=self.name, pid=self._pid)
        if self._closed:
            raise TransferError("EPLB-T008", name=self.name)

    def check_usable(self) -> None:
        """Raise unless the communicator may be used.

        Raises
        ------
        TransferError
            Closed (EPLB-T008), made in another process (EPLB-T013), or suspended (EPLB-T025).
        PoisonedError
            Poisoned (EPLB-T004).
        """
        self.check_open()
        if self._poison is not None:
            error, where = self._poison
            remedy = "Call rebuild(timeout_s, ranks=...) on all survivors, or close(force=True)."
            raise PoisonedError("EPLB-T004", name=self.name, where=where, reason=error, detail=remedy) from error

    def check_between(self, call: str) -> None:
        """Raise when it is closed, or a rearrangement is open (EPLB-P004)."""
        self.check_open()
        if self.open is not None or self.held.decided:
            raise PlanError("EPLB-P004", problem=f"{call} before the open rearrangement was ended")

    # --- who is inside -----------------------------------------------------------------------------------------------

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Let one thread in at a time, not reentrantly, and put the report on every error that leaves."""
        with self._reporting(), self._calls.inside():
            yield

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Let one commit in at a time; it may run beside a call of another thread."""
        with self._reporting(), self._commits.inside():
            yield

    @contextmanager
    def closing(self, rank: int, timeout_s: float) -> Iterator[None]:
        """Make calls of other threads give up, wait for them, and refuse all use from then on.

        Raises
        ------
        PlanError
            A call does not return within the limit, or this thread is inside one (a signal handler): EPLB-P004.
        """
        self._leaving = error_for("EPLB-T007", rank=rank, where="close", reason="it closed its communicator")
        try:
            with self._calls.inside(timeout_s), self._commits.inside(timeout_s):
                yield
        finally:
            self._leaving = None
        self._closed = True

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except EplbError as error:
            error.report = self.report()
            raise

    # --- the report --------------------------------------------------------------------------------------------------

    def report(self) -> RearrangeReport:
        """Return what holds now."""
        held, counts = self.held, self.counts
        return RearrangeReport(
            committed_layers=tuple(sorted(held.committed)),
            physical_to_logical_map=np.maximum(held.map, -1),
            nbytes_received=counts.nbytes_received,
            nbytes_sent=counts.nbytes_sent,
            nbytes_local=counts.nbytes_local,
            nbytes_supplied=counts.nbytes_supplied,
            unmet=counts.unmet,
            seconds=counts.seconds,
            seconds_by_phase=dict(counts.by_phase),
            backend=self._backend,
            epoch=self.epoch,
            generation=self.generation,
            quarantined_nbytes=self.quarantined_nbytes,
            decided_layers=tuple(held.decided),
            layers_in_doubt=tuple(doubt.layer for doubt in held.doubts),
            staging=self._staging_now(),
        )

    def _staging_now(self) -> StagingStats:
        # Releasing queries events, which raises on a failed device; that must not hide the error being raised.
        with suppress(RuntimeError):
            self._staging = self._allocator.stats()
        spare, counted = self.nbytes_spare, self._staging
        return replace(counted, nbytes_in_use=counted.nbytes_in_use + spare, nbytes_peak=counted.nbytes_peak + spare)


class _OneUser:
    """A lock; a thread that does not get it, at once or within a limit, is told why."""

    def __init__(self, problem: str) -> None:
        self._problem = problem
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def inside(self, timeout_s: float | None = None) -> Iterator[None]:
        me = threading.get_ident()
        if self._owner == me:
            raise PlanError("EPLB-P004", problem="a call inside another call of this thread (a signal handler?)")
        if not self._lock.acquire(blocking=timeout_s is not None, timeout=-1 if timeout_s is None else timeout_s):
            raise PlanError("EPLB-P004", problem=self._problem)
        self._owner = me
        try:
            yield
        finally:
            self._owner = None
            self._lock.release()
