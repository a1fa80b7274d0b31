"""Why a backend's loops are called off: a text for people, and facts of a type for decisions."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from eplb_core.backend import Cancelled
from eplb_core.control.store import StoreClient
from eplb_core.errors import error_for
from eplb_core.voting.diagnosis import Diagnosis
from eplb_core.voting.liveness import Ring
from eplb_core.voting.members import Members
from eplb_core.wire.envelope import MessageScope

WHERE = "layer 3, phase transfer"


def watch_of(store, rank: int, members=(0, 1, 2)) -> tuple[Members, Diagnosis]:
    scope = MessageScope("test", rank, 1, 0)
    client = StoreClient(store, "test", 5.0)
    everyone = Members(client, scope, members=members, namespace="life", timeout_s=5.0)
    return everyone, Diagnosis(everyone)


def aborted_with(error) -> Cancelled | None:
    """Rank 0 aborts a layer; return what rank 2's backend is then told."""
    store = dist.HashStore()
    watch_of(store, 0)[0].vote("layer/3", WHERE).abort(error)
    members, watch = watch_of(store, 2)
    watch.attend(members.vote("layer/3", WHERE))
    return watch.cancelled()


def test_nothing_is_called_off_while_no_decision_stands():
    members, watch = watch_of(dist.HashStore(), 0)
    assert watch.cancelled() is None
    watch.attend(members.vote("layer/3", WHERE))
    assert watch.cancelled() is None


def test_an_abort_says_who_and_why_and_that_nobody_is_lost():
    told = aborted_with(error_for("EPLB-T007", rank=0, where=WHERE, reason="rank 1 is gone, says a text"))
    assert told is not None
    assert str(told) == told.reason
    assert told.reason.startswith("rank 0 aborted layer 3, phase transfer: ")
    assert (told.peer_lost, told.store_lost) == (False, False)


def test_an_abort_because_of_a_death_counts_as_a_death_for_those_who_did_not_see_it():
    told = aborted_with(error_for("EPLB-T003", rank=1, where=WHERE))
    assert told is not None
    assert (told.peer_lost, told.store_lost) == (True, False)


def test_a_neighbour_that_ends_without_a_goodbye_is_a_lost_peer():
    here, there = (Ring("127.0.0.1", name="test", rank=rank, epoch=1, members=(0, 1)) for rank in (0, 1))
    ports = here.port, there.port
    joining = threading.Thread(target=there.connect, args=(("127.0.0.1", ports[0]), 5.0, lambda: None))
    joining.start()
    here.connect(("127.0.0.1", ports[1]), 5.0, lambda: None)
    joining.join()
    members, watch = watch_of(dist.HashStore(), 0, (0, 1))
    members.ring = here
    assert watch.cancelled() is None
    there.close(goodbye=False)
    told, until = None, time.monotonic() + 5
    while told is None and time.monotonic() < until:
        told = watch.cancelled()
    here.close(goodbye=True)
    assert told == Cancelled("rank 1 is gone", peer_lost=True)


def test_a_store_whose_host_went_is_a_lost_store():
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members, watch = watch_of(dist.TCPStore("127.0.0.1", host.port), 1)
    watch.attend(members.vote("layer/3", WHERE))
    assert watch.cancelled() is None
    del host
    told, until = None, time.monotonic() + 5
    while told is None and time.monotonic() < until:
        told = watch.cancelled()
    assert told is not None
    assert (told.peer_lost, told.store_lost) == (False, True)
    assert told.reason.startswith("the store is lost: ")


def test_what_was_told_cannot_be_changed():
    with pytest.raises(AttributeError):
        Cancelled("it is over").reason = "it is not"  # type: ignore[misc]
