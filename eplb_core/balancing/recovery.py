"""After a failed rearrangement: what the members tell each other before they meet anew, and with which backend."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eplb_core.backend.toolkit import Deadline
from eplb_core.control.store import StoreGone
from eplb_core.errors import CommitError, EplbError, PeerLostError, StoreLostError

if TYPE_CHECKING:
    from eplb_core.balancing.core_access import CoreAccess

logger = logging.getLogger("eplb_core")

FAILURES_BEFORE_FALLBACK = 2

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class Told:
    """What a rank tells the others of its epoch when it failed.

    Parameters
    ----------
    failures : int
        In a row, with the backend in use.
    step : int
        Its engine's.
    """

    failures: int
    step: int


def why_not_alone(core: CoreAccess, error: EplbError) -> str | None:
    """Say why the members cannot mend a failure by themselves, or None."""
    if isinstance(error, CommitError):
        return "this rank's weights are invalid"
    if isinstance(error, StoreLostError):
        return "the store is lost: rebuild(control=...) with a new one"
    if isinstance(error, PeerLostError) or core.dead:
        return "a member is gone: rebuild(ranks=...) among the others"
    if error.code == "EPLB-T009":
        return "this rank cannot take part in a rebuild"
    return None


def fails_over(core: CoreAccess, failures: int) -> bool:
    """Is it time to take the fallback backend? The same answer on all ranks, which count the same failures."""
    return failures >= FAILURES_BEFORE_FALLBACK and core.config.fallback not in (None, core.communicator.backend)


class Exchange:
    """What the members of an epoch that failed tell each other; it outlives their connections.

    The posts have one key a rank and stay: ranks come at different times, and unequally often. Whoever waits in vain
    goes on with what is there; ranks that then choose different backends do not come together, and try again.

    Parameters
    ----------
    core : CoreAccess
        The communicator, in the epoch that failed.
    """

    def __init__(self, core: CoreAccess) -> None:
        self._core = core
        self._members = core.members
        self._keys = {rank: core.key(f"failed/{rank}") for rank in self._members.members}
        self._members.client.own.add(self._keys[self._members.rank])  # deleted with what else this rank leaves there

    def tell(self, mine: Told, stopping: Callable[[], bool]) -> Told:
        """Post what this rank knows and read what the others do; return the most of each."""
        members, keys = self._members, self._keys
        client, deadline, pause_s = self._core.open_client(self._core.timeout_s), Deadline(self._core.timeout_s), 1e-3
        try:
            client.set(keys[members.rank], members.seal("failed", json.dumps([mine.failures, mine.step]).encode()))
            while not (client.exists(*keys.values()) or deadline.over or stopping()):
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, 0.02)
            told = [mine]
            for rank, key in keys.items():
                value = client.read(key)
                if value is not None:
                    failures, step = json.loads(members.open(value, "failed", rank=rank))
                    told.append(Told(int(failures), int(step)))
        finally:
            client.close()
        return Told(max(one.failures for one in told), max(one.step for one in told))


def rebuild(core: CoreAccess, mine: Told, stopping: Callable[[], bool]) -> Told:
    """Bring the members together again, with the fallback backend when the one in use failed too often.

    Parameters
    ----------
    core : CoreAccess
        The communicator: its epoch failed, and nothing of it is still to be committed here.
    mine : Told
        What this rank knows.
    stopping : callable
        Tells whether to give up.

    Returns
    -------
    Told
        The most that any rank knows.

    Raises
    ------
    EplbError
        The members cannot mend this by themselves, or this rank stops.

    Notes
    -----
    A member that is stopped, or slow, may come back: attempts go on, each with its limit, while the engine serves with
    the placement that holds, until they succeed or the host closes the load balancer.
    """
    communicator, exchange, pause_s = core.communicator, Exchange(core), _FIRST_PAUSE_S
    while True:
        try:
            told = exchange.tell(mine, stopping)
        except (StoreGone, EplbError) as gone:
            logger.warning("%s: the ranks could not talk before they rebuild: %s", communicator.name, gone)
            told = mine
        if fails_over(core, told.failures):
            logger.warning(
                "%s: FAILOVER from %s to %s after %d failures in a row; serving goes on.",
                communicator.name,
                communicator.backend,
                core.config.fallback,
                told.failures,
            )
            core.take_backend(str(core.config.fallback))
        try:
            communicator.rebuild(core.timeout_s)
        except EplbError as error:
            reason = why_not_alone(core, error)
            if reason is not None or stopping():
                raise
            logger.warning("%s: the rebuild did not succeed, and is tried again: %s", communicator.name, error)
            _rest(pause_s, stopping)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            continue
        core.note_epoch()
        return told


def _rest(seconds: float, stopping: Callable[[], bool]) -> None:
    """Do not fill the log where an attempt fails at once."""
    deadline = Deadline(seconds)
    while not (deadline.over or stopping()):
        time.sleep(min(0.05, seconds))
