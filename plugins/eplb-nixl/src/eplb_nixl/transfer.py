"""One layer's READs of this rank: posted as their sources can be read, polled until done, given back on every path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eplb_core.backend import Cancelled, toolkit
from eplb_core.errors import TransferError
from eplb_nixl.agent import Agent
from eplb_nixl.announcements import MisannouncedError
from eplb_nixl.hooks import LABEL
from eplb_nixl.library import NixlError

UNPOSTED = "UNPOSTED"
PROCEEDING = "PROC"
DONE = "DONE"
FAILED = "ERR"
REFUSED = "REFUSED"
"""Ours: never posted, because its source means other rows by it."""


@dataclass(eq=False)
class Read:
    """One READ from one source.

    Parameters
    ----------
    peer : int
        The source.
    handle : object
        NIXL's request; None once released.
    rows : slice
        Its rows in the plan's receives.
    ready : callable or None
        Has the source announced that it can be read? None for a zero-copy source, which always can.
    state : str
        `UNPOSTED`, then NIXL's, or `REFUSED`.
    words : str
        Text of a failure, usually NIXL's own.
    """

    peer: int
    handle: Any
    rows: slice
    ready: Callable[[], bool] | None
    state: str = UNPOSTED
    words: str = ""


@dataclass(eq=False)
class LayerTransfer(toolkit.LayerTransfer):
    """The handle of one `transfer`.

    Parameters
    ----------
    plan : TransferPlan
        What was asked.
    reads : list of Read
        One per source.
    announce_to : list of int
        Destinations that have not been told yet that their rows can be read (staged sources only).
    filled : object or None
        Event after which they can.
    unannounced : str
        NIXL's words, when a destination could not be told.
    drained : bool or None
        None while READs may be in flight; then whether all of them are known to be over.
    """

    reads: list[Read] = field(default_factory=list)
    announce_to: list[int] = field(default_factory=list)
    filled: object | None = None
    unannounced: str = ""
    drained: bool | None = None

    @property
    def is_complete(self) -> bool:
        """True once every row has landed and every destination has been told of its rows."""
        return not self.announce_to and all(read.state == DONE for read in self.reads)

    @property
    def in_flight(self) -> bool:
        """True while a READ was posted and is not over."""
        return any(read.state == PROCEEDING for read in self.reads)

    @property
    def failed(self) -> Read | None:
        """A READ that ended in another state than DONE, or may not be posted, if any."""
        return next((read for read in self.reads if read.state not in {UNPOSTED, PROCEEDING, DONE}), None)

    @property
    def pending(self) -> list[int]:
        """Peers that are waited for."""
        return sorted({read.peer for read in self.reads if read.state != DONE} | set(self.announce_to))

    def keys(self, read: Read) -> str:
        """Name the (layer, tensor) that a READ was for."""
        tensors = np.unique(self.plan.receives.tensor[read.rows]).tolist()
        return ", ".join(f"({self.plan.layer}, {tensor})" for tensor in tensors)


def post_ready(agent: Agent, transfer: LayerTransfer, cancelled: Callable[[], Cancelled | None]) -> None:
    """Post every READ whose source can be read; a failure is kept in its `Read`.

    Over shared memory a post copies before it returns, so cancellation is looked at before each.
    """
    for read in transfer.reads:
        try:
            is_ready = read.state == UNPOSTED and (read.ready is None or read.ready())
        except MisannouncedError as error:
            read.state, read.words = REFUSED, str(error)
            continue
        if is_ready and cancelled() is None:
            _observe(read, agent.post)


def poll(agent: Agent, transfer: LayerTransfer) -> None:
    """Look at every READ in flight; a failure is kept in its `Read`."""
    for read in transfer.reads:
        if read.state == PROCEEDING:
            _observe(read, agent.state)


def give_back(agent: Agent, transfer: LayerTransfer) -> None:
    """Release every request that is over, and settle whether all that was posted is known to be.

    A request that failed is over but does not count as drained: NIXL reports the first error, while other parts of it
    may still be under way. One in flight is kept: releasing it would not stop its writes, and would make progress,
    which after a peer's death may abort this process (see `eplb_nixl.guard`).
    """
    if transfer.drained is not None:
        return
    transfer.drained = all(read.state in {UNPOSTED, REFUSED, DONE} for read in transfer.reads)
    for read in transfer.reads:
        if read.state == PROCEEDING:
            continue
        handle, read.handle = read.handle, None
        try:
            agent.release(handle)
        except NixlError as error:
            transfer.drained = False
            read.words = read.words or str(error)


def raise_failure(transfer: LayerTransfer, rank: int) -> None:
    """Raise what a transfer failed of on this rank, if it did.

    Raises
    ------
    TransferError
        EPLB-T001.
    """
    read, layer = transfer.failed, transfer.plan.layer
    if read is not None:
        what = f"reading layer {layer} from rank {read.peer}, keys {transfer.keys(read)}, on rank {rank}"
        detail = f"{what}: {read.words or 'NIXL gives no text'}"
        raise TransferError("EPLB-T001", label=LABEL, state=read.state, detail=detail)
    if transfer.unannounced:
        what = f"telling rank {transfer.announce_to[-1]} that layer {layer} can be read"
        raise TransferError("EPLB-T001", label=LABEL, state=FAILED, detail=f"{what}: {transfer.unannounced}")


def _observe(read: Read, act: Callable[[Any], str]) -> None:
    try:
        read.state = act(read.handle)
    except NixlError as error:
        read.state, read.words = FAILED, str(error)
