"""When NIXL is left alone: decided from what `Cancelled` says by type, never from its text."""

from __future__ import annotations

import pytest

from eplb_core.backend import Cancelled
from eplb_nixl.guard import Guard


@pytest.mark.parametrize(
    ("told", "may"),
    [
        (None, True),
        (Cancelled("rank 2 aborted layer 0: rank 1 is gone, it thinks"), True),
        (Cancelled("its process ended", peer_lost=True), False),
        (Cancelled("nobody answers", store_lost=True), False),
    ],
    ids=["nothing happened", "an abort whose text speaks of a death", "a death", "the store's host is not there"],
)
def test_progress_is_made_until_a_peer_is_lost_or_the_store_with_the_rank_that_hosts_it(told, may):
    assert Guard(lambda: told).may_progress() is may


def test_a_death_is_never_forgotten():
    told = [Cancelled("its process ended", peer_lost=True), None]
    watch = Guard(lambda: told.pop(0))
    assert not watch.may_progress()
    assert not watch.may_progress()
