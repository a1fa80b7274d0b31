"""What holds on this rank: the placement, what was committed, and whether the communicator may be used."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eplb_core.errors import CommitError, EplbError, PlanError, PoisonedError, TransferError
from eplb_core.report import RearrangeReport, StagingStats

if TYPE_CHECKING:
    import torch

    from eplb_core.backend import StagingAllocator
    from eplb_core.rearrange.rearrangement import Generation, StagedLayer
    from eplb_core.weights.layout import Layout

logger = logging.getLogger("eplb_core")

_PHASES = ("agree", "connect", "transfer", "wait", "vote", "commit")


class Ledger:
    """The books of one communicator, over all its epochs.

    Parameters
    ----------
    name : str
        Of the communicator.
    backend : str
        Name of its backend.
    layout : Layout
        What is registered.
    allocator : StagingAllocator
        Whose bytes the report shows.
    """

    def __init__(self, name: str, backend: str, layout: Layout, allocator: StagingAllocator) -> None:
        self._name = name
        self._backend = backend
        self._layout = layout
        self._allocator = allocator
        self._staging = StagingStats(0, 0, 0)
        self._views: dict[int, list[list[torch.Tensor]]] = {}
        self._sequence = 0
        self._new_map: npt.NDArray[np.int64] | None = None
        self._poison: tuple[EplbError, str] | None = None
        self._closed = False
        self._pid = os.getpid()
        self._user = threading.RLock()
        self.invalid: CommitError | None = None
        """Why the weights of this rank hold no placement at all; nothing heals that."""
        self.map: npt.NDArray[np.int64] = np.empty((layout.num_layers, 0), dtype=np.int64)
        self.epoch = 0
        self.generation = 0
        self.committed: list[int] = []
        self.history: dict[int, list[int]] = {}
        self.slot_events: dict[int, Any] = {}
        self.doubtful: list[StagedLayer] = []
        self.undrained = False
        self.quarantined_nbytes = 0
        self.open: Generation | None = None
        self._reset_counts()

    # --- a generation's life -----------------------------------------------------------------------------------------

    def entered(self, epoch: int, generation: int) -> None:
        """A generation begins: its number rises at entry, whatever comes of it."""
        self.epoch, self.generation = epoch, generation
        self.committed = []
        self._new_map = None
        self._reset_counts()

    def assume(self, old: npt.NDArray[np.int64]) -> None:
        """Take the host's word for what holds, until a first generation is agreed."""
        if self.map.shape != old.shape:
            self.map = old.copy()

    def agreed(self, generation: Generation, old: npt.NDArray[np.int64], new: npt.NDArray[np.int64]) -> None:
        """All ranks agreed; layers that move nothing are on the new placement from here on."""
        self.open = generation
        self._new_map = new
        self.map = old.copy()
        still = np.ones(len(new), dtype=bool)
        still[list(generation.layers)] = False
        self.map[still] = new[still]
        # A rank that lags is at most one generation behind, for agree needs all.
        self.history = {number: done for number, done in self.history.items() if number >= self.generation - 1}
        self.history[self.generation] = self.committed

    def decided(self, layer: int) -> None:
        """A layer's decision is commit."""
        if self._new_map is None:
            raise TransferError("EPLB-T007", rank="this", where=f"layer {layer}", reason="no generation is open")
        self.committed.append(layer)
        self.map[layer] = self._new_map[layer]

    def ended(self, generation: Generation) -> None:
        """A generation is over, whole or abandoned."""
        if self.open is generation:
            self.open = None
        self._seconds = time.perf_counter() - self._began

    def take_slot_events(self, slot: int | None = None) -> list[Any]:
        """Return, once, the events after the last commit's copies out of a slot, or out of all."""
        slots = list(self.slot_events) if slot is None else [slot]
        return [self.slot_events.pop(number, None) for number in slots]

    def next_sequence(self) -> int:
        """Count transfers of an epoch; every rank starts the same ones."""
        self._sequence += 1
        return self._sequence

    def new_epoch(self, epoch: int) -> None:
        """Connections are new: what was poisoned is usable again."""
        self.epoch, self.generation, self._sequence = epoch, 0, 0
        self._poison = None
        self.undrained = False
        self.doubtful = []
        self.open = None
        self.slot_events = {}
        self.history = {}

    # --- may it be used? ---------------------------------------------------------------------------------------------

    def poison(
        self,
        error: EplbError,
        where: str,
        *,
        undrained: bool = False,
        doubtful: list[StagedLayer] | None = None,
    ) -> None:
        """Refuse all use from now on, until a rebuild; the first reason stays."""
        if self._poison is None:
            self._poison = (error, where)
            logger.error("%s: unusable until rebuild: %s", self._name, error)
        self.undrained = self.undrained or undrained
        if doubtful:
            self.doubtful = doubtful

    @property
    def poisoned(self) -> bool:
        """Is all use refused?"""
        return self._poison is not None

    def close(self) -> None:
        """Refuse all use for good."""
        self._closed = True

    @property
    def closed(self) -> bool:
        """Was it closed?"""
        return self._closed

    @property
    def forked(self) -> bool:
        """Is this another process than the one that made it?"""
        return os.getpid() != self._pid

    def check_open(self) -> None:
        """Raise when it was closed (EPLB-T008), or made in another process (EPLB-T013)."""
        if self.forked:
            raise TransferError("EPLB-T013", name=self._name, pid=self._pid)
        if self._closed:
            raise TransferError("EPLB-T008", name=self._name)

    def check_usable(self) -> None:
        """Raise the reason why it may not be used.

        Raises
        ------
        TransferError
            Closed (EPLB-T008), or made in another process (EPLB-T013).
        PoisonedError
            Poisoned (EPLB-T004).
        """
        self.check_open()
        if self._poison is not None:
            error, where = self._poison
            remedy = "Call rebuild(timeout_s, ranks=...) on all survivors, or close(force=True)."
            raise PoisonedError("EPLB-T004", name=self._name, where=where, reason=error, detail=remedy) from error

    # --- counts ------------------------------------------------------------------------------------------------------

    def row_views(self, layer: int) -> list[list[torch.Tensor]]:
        """Return the live rows of a layer, ``[num_tensors][num_local_physical_experts]``, made once."""
        views = self._views.get(layer)
        if views is None:
            views = self._views[layer] = [list(tensor.unbind(0)) for tensor in self._layout.rows[layer]]
        return views

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a step to its phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._by_phase[name] += time.perf_counter() - started

    def count_bytes(self, received: int, sent: int, local: int) -> None:
        """Add the bytes of a layer."""
        self._nbytes[0] += received
        self._nbytes[1] += sent
        self._nbytes[2] += local

    def note(self, text: str) -> None:
        """Log something that an error in flight would hide."""
        logger.warning("%s: %s", self._name, text)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Put the report on every error that leaves; refuse a second thread while one is inside."""
        if not self._user.acquire(blocking=False):
            raise PlanError("EPLB-P004", problem="a call while another thread is inside one")
        try:
            yield
        except EplbError as error:
            error.report = self.report()
            raise
        finally:
            self._user.release()

    def report(self) -> RearrangeReport:
        """Return what holds now."""
        received, sent, local = self._nbytes
        return RearrangeReport(
            committed_layers=tuple(self.committed),
            physical_to_logical_map=self.map.copy(),
            nbytes_received=received,
            nbytes_sent=sent,
            nbytes_local=local,
            seconds=self._seconds or time.perf_counter() - self._began,
            seconds_by_phase=dict(self._by_phase),
            backend=self._backend,
            epoch=self.epoch,
            generation=self.generation,
            quarantined_nbytes=self.quarantined_nbytes,
            layers_in_doubt=tuple(staged.number for staged in self.doubtful),
            staging=self._staging_now(),
        )

    def _staging_now(self) -> StagingStats:
        # Releasing asks events, which a failed device answers with an error: it must not hide the one in flight.
        with suppress(RuntimeError):
            self._staging = self._allocator.stats()
        return self._staging

    def _reset_counts(self) -> None:
        self._began = time.perf_counter()
        self._seconds = 0.0
        self._by_phase = dict.fromkeys(_PHASES, 0.0)
        self._nbytes = [0, 0, 0]
