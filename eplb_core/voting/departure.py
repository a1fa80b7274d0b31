"""Leaving an epoch: with a goodbye, which lets the store's host leave too, or at once, so that neighbours notice."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from eplb_core.backend.toolkit import Deadline
from eplb_core.control.store import StoreGone
from eplb_core.voting.members import Members
from eplb_core.voting.roll import post_key
from eplb_core.voting.store_keys import tidy_up

logger = logging.getLogger("eplb_core")


def say_goodbye(members: Members, *, tidies: bool = False) -> None:
    """Say goodbye to the ring, and to the store if it answers; tidy up first if asked."""
    if members.ring is not None:
        members.ring.poll()
    with suppress(StoreGone):
        if not (tidies and tidy_up(members.client, members.namespace, members.members)):
            for rank in members.dead:
                members.client.set(members.key(f"dead/{rank}"), b"1")
            members.client.set(members.key(f"bye/{members.rank}"), b"1")
    if members.ring is not None:
        members.ring.close(goodbye=True)


def vanish(members: Members) -> None:
    """Leave the ring without a goodbye; the neighbours then take this rank for dead at once."""
    with suppress(StoreGone):
        members.client.set(members.key(f"bye/{members.rank}"), b"1")  # the store's host need not wait for it
    if members.ring is not None:
        members.ring.close(goodbye=False)


def await_goodbyes(members: Members, timeout_s: float) -> None:
    """Stay, at most `timeout_s`, until every other member said goodbye or is known dead: the store lives here."""
    client = members.client
    deadline, pause_s = Deadline(timeout_s), 1e-3
    waiting = {rank for rank in members.members if rank != members.rank} - set(members.dead)
    while waiting and not deadline.over:
        waiting = {
            rank
            for rank in waiting
            if not any(client.exists(members.key(f"{word}/{rank}")) for word in ("bye", "dead"))
        }
        if waiting:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)
    if waiting:
        logger.warning(
            "%s: rank %d hosts the store and closes it although rank(s) %s said no goodbye within %.0f s",
            members.name,
            members.rank,
            sorted(waiting),
            timeout_s,
        )


def take_post_back(members: Members) -> None:
    """Delete this rank's post, so that another process may become this rank."""
    with suppress(StoreGone):
        members.client.delete(post_key(members.rank))
