"""Accounts of staging memory: blocks handed out, released blocks that wait for a device event, and their bytes."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from eplb_core.backend.memory import StagingBlock
from eplb_core.errors import TransferError
from eplb_core.report import StagingStats


@runtime_checkable
class _Event(Protocol):
    def query(self) -> bool: ...


@dataclass(eq=False)
class _Lease:
    """Owner of a block; it shows that one allocator handed the block out, once."""

    leases: BlockAccounts
    nbytes: int
    nbytes_rounding: int
    released: bool = False


@dataclass(frozen=True, eq=False)
class _Guarded:
    """Released memory, and the event before which it must not be reused."""

    memory: object
    nbytes: int
    event: _Event


_orphans: list[_Guarded] = []
"""Memory still guarded when its allocator was dropped: a copy in flight does not know that."""
_orphans_lock = threading.Lock()


class BlockAccounts:
    """The accounts of one allocator. Memory is kept by reference, and goes back to its pool when that is dropped.

    Any thread may call any method.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the worker and the engine's thread both release
        self._nbytes_in_use = 0
        self._nbytes_peak = 0
        self._nbytes_rounding = 0
        self._guarded: list[_Guarded] = []
        weakref.finalize(self, _adopt, self._guarded).atexit = False

    def grant(self, data: Any, nbytes_taken: int | None = None) -> StagingBlock:
        """Hand a block out.

        Parameters
        ----------
        data : torch.Tensor
            uint8 ``[nbytes]``; keeps its memory alive.
        nbytes_taken : int or None
            Bytes that the allocator's pool took for it, rounding included; None means `nbytes`.

        Returns
        -------
        StagingBlock
        """
        nbytes = len(data) if nbytes_taken is None else nbytes_taken
        rounding = nbytes - len(data)
        with self._lock:
            self._nbytes_in_use += nbytes
            self._nbytes_rounding += rounding
            self._nbytes_peak = max(self._nbytes_peak, self._nbytes_in_use)
        return StagingBlock(data, _Lease(self, nbytes, rounding))

    def take_back(self, block: StagingBlock, event: object | None = None) -> None:
        """Take a block back, and drop its memory as soon as `event` has completed.

        Parameters
        ----------
        block : StagingBlock
            A block that `grant` returned and that was not taken back before.
        event : object or None
            A recorded device event: anything whose ``query()`` says whether it has completed.

        Raises
        ------
        TransferError
            EPLB-T010: another allocator's block, one released before, or an event that cannot be asked.
        """
        lease = block.owner
        if not isinstance(lease, _Lease) or lease.leases is not self:
            raise TransferError("EPLB-T010", problem="a block was released that this allocator did not hand out")
        if event is not None and not isinstance(event, _Event):
            raise TransferError("EPLB-T010", problem=f"a {type(event).__name__} is not an event: it has no query()")
        with self._lock:
            if lease.released:
                raise TransferError("EPLB-T010", problem=f"a block of {len(block.data)} bytes was released twice")
            lease.released = True
            self._nbytes_in_use -= lease.nbytes
            self._nbytes_rounding -= lease.nbytes_rounding
            if event is not None:
                self._guarded.append(_Guarded(block.data, lease.nbytes, event))
        with suppress(RuntimeError):  # a failed device: the block is kept, and the next allocation or count raises
            self.let_go()

    def let_go(self) -> None:
        """Drop memory whose event has completed; if a failed device raises, nothing is dropped."""
        with self._lock:
            self._guarded[:] = [each for each in self._guarded if not each.event.query()]
        with _orphans_lock:
            _orphans[:] = [each for each in _orphans if not _is_over(each.event)]

    def stats(self, nbytes_cached: int = 0) -> StagingStats:
        """Return the byte counts; `nbytes_cached` are those in the allocator's pool that wait for no event."""
        self.let_go()
        with self._lock:
            return StagingStats(
                nbytes_in_use=self._nbytes_in_use,
                nbytes_peak=self._nbytes_peak,
                nbytes_pool=nbytes_cached + sum(each.nbytes for each in self._guarded),
                nbytes_rounding=self._nbytes_rounding,
            )


def _adopt(guarded: list[_Guarded]) -> None:
    with _orphans_lock:
        _orphans.extend(guarded)


def _is_over(event: _Event) -> bool:
    try:
        return event.query()
    except RuntimeError:  # the device failed: whether it completed is unknown
        return False
