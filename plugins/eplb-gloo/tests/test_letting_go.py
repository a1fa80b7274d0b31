"""A wait that gloo never ends is left to a thread: its caller returns, its memory is kept, its process ends as ever."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from eplb_core.backend import Cancelled
from eplb_core.errors import EplbError, StalledError, TransferError
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from eplb_gloo.waiter import Waiter, ended, left_behind

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from members import Case, Member, descriptors, threads  # noqa: E402
from partly import DIRECTIONS, Survivor, peer_that_dies  # noqa: E402

SWAP = Case(((300 << 10,), (64,)), num_rows=2, new_map=((2, 3, 0, 1),) * 2)

both_directions = pytest.mark.parametrize("direction", list(DIRECTIONS))


# --- a peer dies in the middle of a message -------------------------------------------------------------------------


@both_directions
def test_a_wait_for_a_message_cut_off_midway_ends_as_soon_as_the_core_knows_of_the_death(direction):
    seconds, error, drained, closed, again, count, same = _survive(direction, 60.0, True)
    assert seconds < 1
    assert isinstance(error, TransferError)
    assert error.fields["state"] == "cancelled"
    assert "rank 1 is gone" in str(error)
    assert (drained, closed, again) == (False, False, False)  # so the core keeps the landing memory
    assert count == 1
    assert same  # nothing is written any more all the same


@both_directions
def test_a_wait_for_a_message_cut_off_midway_ends_at_its_limit_and_names_the_peer(direction):
    seconds, error, drained, closed, again, count, same = _survive(direction, 0.7, False)
    assert 0.6 < seconds < 2
    assert isinstance(error, StalledError)
    assert error.fields["waiting_for"] == {"in": "rank 1", "out": "rank 1 to take what was sent"}[direction]
    assert (drained, closed, again) == (False, False, False)
    assert count == 1
    assert same


def _survive(direction: str, limit_s: float, is_told: bool):
    with Ranks(2, _survivor_or_not, direction, limit_s, is_told) as ranks:
        outcome = ranks.join(60, without=(1,))[0]
    assert outcome.error is None
    return outcome.value


def _survivor_or_not(rank: Rank, direction: str, limit_s: float, is_told: bool):
    if rank.rank == 1:
        return peer_that_dies(rank, direction)
    member = Survivor(rank, direction, is_told)
    plan, handle = member.start_until_the_peer_dies()
    started = time.monotonic()
    with pytest.raises(EplbError) as caught:
        member.backend.wait(handle, limit_s)
    seconds = time.monotonic() - started
    drained = member.backend.abort(handle, "the wait failed")
    closed = member.backend.close(force=True)
    before = member.landing.slots[plan.slot].clone()
    again = member.backend.close(force=True)
    same = torch.equal(before, member.landing.slots[plan.slot])
    return seconds, caught.value, drained, closed, again, left_behind(), same


@pytest.mark.slow
@pytest.mark.parametrize(("direction", "ending"), [("in", "closed"), ("out", "unclosed"), ("in", "dropped")])
def test_a_process_with_a_thread_left_inside_gloo_ends_at_once_and_cleanly(direction, ending):
    seconds, status, text = _run_to_its_end("stuck", direction, ending)
    assert status == 0, text
    assert seconds < 20  # torch itself takes its time to go; the wait had sixty
    assert "terminate" not in text


@pytest.mark.slow
def test_a_forked_child_that_ends_leaves_the_connections_of_its_parent_whole():
    _, status, text = _run_to_its_end("fork", "in", "closed")
    assert status == 0, text
    assert "moved after the fork" in text


def _run_to_its_end(mode: str, direction: str, ending: str) -> tuple[float, int, str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(Path(__file__).with_name("real_processes.py")), mode, direction, ending]
    peer = subprocess.Popen([*command, "1", str(store.port)])
    try:
        done = subprocess.run([*command, "0", str(store.port)], capture_output=True, text=True, timeout=90, check=False)
        ended_at = time.time()
    finally:
        peer.kill()
        peer.wait()
    last = [line for line in done.stdout.splitlines() if line.startswith("last word at ")]
    assert last, done.stdout + done.stderr
    return ended_at - float(last[0].split()[-1]), done.returncode, done.stdout + done.stderr


# --- connecting -----------------------------------------------------------------------------------------------------


def test_connecting_ends_when_it_is_called_off_although_gloo_is_inside_it():
    with Ranks(2, _dies_while_gloo_connects) as ranks:
        seconds, error, closed = ranks.join(30, without=(1,))[0].value
    assert seconds < 1
    assert error.fields["state"] == "cancelled"
    assert "phase connect" in str(error)
    assert closed is True  # nothing was ever posted


def _dies_while_gloo_connects(rank: Rank):
    import os
    import signal

    from eplb_gloo import connect

    store = rank.store("talk")

    def die(*args):
        store.set("dying", b"1")
        os.kill(os.getpid(), signal.SIGKILL)

    if rank.rank == 1:
        connect._make_group = die
    member = Member(rank, SWAP, lambda: Cancelled("rank 1 is gone") if store.check(["dying"]) else None)
    local = member.backend.register_buffers(member.buffers)
    started = time.monotonic()
    with pytest.raises(EplbError) as caught:
        member.backend.exchange_metadata(local, [])
    return time.monotonic() - started, caught.value, member.backend.close(force=True)


# --- a backend that is dropped without a close ----------------------------------------------------------------------


def test_a_backend_dropped_with_messages_outstanding_is_gone_at_once_and_its_peers_see_it():
    (is_gone, grown), (seconds, error) = run_ranks(2, _drop_in_flight)
    assert is_gone
    assert max(grown) <= 0
    assert seconds < 1
    assert "Connection closed by peer" in str(error)


def _drop_in_flight(rank: Rank):
    before = descriptors(), threads()
    member = Member(rank, SWAP)
    opened = descriptors()  # the store's
    member.connect()
    _, handle = member.start(rank.rank)  # each waits for a layer that the other does not send
    member.meet("started")
    if rank.rank == 1:
        started = time.monotonic()
        with pytest.raises(EplbError) as caught:
            member.backend.wait(handle, 30.0)
        return time.monotonic() - started, caught.value
    gc.disable()
    backend = weakref.ref(member.backend)
    del member.backend, handle
    is_gone = backend() is None  # without the collector: it is in no cycle
    grown = descriptors() - opened, threads() - before[1]
    return is_gone, grown


def test_a_backend_dropped_while_idle_is_gone_at_once():
    for is_gone, grown in run_ranks(2, _drop_idle):
        assert is_gone
        assert max(grown) <= 0


def _drop_idle(rank: Rank):
    member = Member(rank, SWAP)
    before = descriptors(), threads()
    member.connect()
    member.rounds(3)
    member.meet("used")
    gc.disable()
    backend = weakref.ref(member.backend)
    del member.backend
    return backend() is None, (descriptors() - before[0], threads() - before[1])


# --- the thread alone -----------------------------------------------------------------------------------------------


def test_calls_are_made_in_order_and_what_they_raise_is_theirs():
    waiter, made = Waiter(), []
    futures = [waiter.submit(lambda number=number: made.append(number)) for number in range(5)]
    failed = waiter.submit(lambda: 1 // 0)
    assert ended(failed, 5.0)
    assert made == list(range(5))
    assert all(future.done() for future in futures)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert waiter.close(5.0) is True


def test_an_idle_thread_keeps_nothing_of_the_calls_that_it_made():
    class Large:
        pass

    waiter, large = Waiter(), Large()
    gone = weakref.ref(large)
    future = waiter.submit(lambda kept=large: kept)
    assert ended(future, 5.0)
    del future, large
    until = time.monotonic() + 5.0
    while gone() is not None and time.monotonic() < until:  # it may not be past the call yet
        time.sleep(1e-3)
    assert gone() is None
    waiter.close(5.0)


def test_a_thread_that_does_not_come_out_is_counted_until_it_does_and_what_it_needs_is_kept(caplog):
    class Needed:
        pass

    before, waiter, way_out, needed = left_behind(), Waiter(), threading.Event(), Needed()
    alive = weakref.ref(needed)
    future = waiter.submit(way_out.wait)
    assert not ended(future, 0.01)
    assert waiter.close(0.01, keep=needed) is False
    assert waiter.close(0.01, keep=needed) is False
    assert left_behind() == before + 1
    assert len(caplog.records) == 1
    del needed
    gc.collect()
    assert alive() is not None
    way_out.set()
    assert waiter.close(5.0) is True
    assert left_behind() == before
