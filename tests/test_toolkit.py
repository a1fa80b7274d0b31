"""What authors of backends are given besides the contract: every example runs, and the parts hold what they promise."""

from __future__ import annotations

import doctest
import inspect
import itertools
import logging
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from eplb_core.backend import Cancelled, toolkit
from eplb_core.backend.toolkit import (
    Backoff,
    CancelWatch,
    Deadline,
    Lifecycle,
    Wait,
    check_member,
    first_line,
    name_ranks,
    rounds_of_pairs,
)
from eplb_core.errors import EplbError, MetadataError, PlanError, PoisonedError, StalledError, TransferError

OWN = [name for name in toolkit.__all__ if getattr(toolkit, name).__module__.startswith(toolkit.__name__)]
# A value in a batch, described by what makes it.
WITHOUT_EXAMPLE = {"RowMove"}


def context(cancelled=lambda: None, **fields):
    return SimpleNamespace(**{"rank": 0, "name": "default", "staging_layers": 2, "cancelled": cancelled, **fields})


@pytest.mark.parametrize("name", sorted(set(OWN) - WITHOUT_EXAMPLE))
def test_the_example_of_every_part_runs(name):
    part = getattr(toolkit, name)
    [example] = doctest.DocTestFinder(recurse=False).find(part, name, globs={name: part, **vars(toolkit)})
    said = []
    result = doctest.DocTestRunner().run(example, out=said.append)
    assert result.failed == 0, "".join(said)
    assert result.attempted > 0


@pytest.mark.parametrize("name", sorted(set(OWN) - WITHOUT_EXAMPLE))
def test_every_part_describes_its_parameters(name):
    described = inspect.getdoc(getattr(toolkit, name)).partition("Parameters\n----------\n")[2].partition("\n\n")[0]
    taken = list(inspect.signature(getattr(toolkit, name)).parameters)
    names = itertools.chain.from_iterable(
        line.partition(" : ")[0].split(", ") for line in described.splitlines() if line[:1].strip()
    )
    assert list(names) == taken


def test_the_table_of_the_module_names_every_part():
    missing = [name for name in toolkit.__all__ if f"`{name}`" not in toolkit.__doc__]
    # the errors stand for one another; a RowMove comes with what makes it
    assert missing == ["RowMove", "failed_error", "stalled_error"]


def test_using_it_imports_neither_torch_nor_numpy():
    code = "import sys, eplb_core.backend.toolkit; print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "set()"


# --- waits -----------------------------------------------------------------------------------------------------------


def test_pauses_grow_up_to_the_longest_and_never_past_what_is_left():
    backoff = Backoff(first_s=1e-5, longest_s=1e-4, factor=4)
    assert [backoff.pause() for _ in range(4)] == [1e-5, 4e-5, 1e-4, 1e-4]
    started = time.monotonic()
    assert Backoff(first_s=30).pause(at_most_s=0.01) == 0.01
    assert time.monotonic() - started < 5


def test_a_loop_that_spins_first_sleeps_only_then():
    backoff, started, slept = Backoff(first_s=1e-3, spin_s=0.05), time.monotonic(), []
    while not any(slept):
        slept.append(backoff.pause())
    assert time.monotonic() - started >= 0.05
    assert len(slept) > 10


def wait_for_ever(wait, waiting_for):
    while True:
        wait.pause(waiting_for)


def test_a_wait_ends_at_its_limit_and_names_whom_it_waited_for():
    wait = Wait(context(), 0.1, label="mine", where="layer 3, phase wait")
    with pytest.raises(StalledError, match=r"Stalled for 0.1 s in layer 3, phase wait over mine, waiting for ranks 1"):
        wait_for_ever(wait, [1, 2])
    assert 0.1 <= wait.deadline.elapsed_s < 2


def test_a_wait_says_once_and_half_way_whom_it_waits_for(caplog):
    wait = Wait(context(), 0.2, label="mine", where="layer 3, phase wait")
    with caplog.at_level(logging.WARNING, "eplb_core"), pytest.raises(StalledError):
        wait_for_ever(wait, "the unique id of rank 1")
    [record] = caplog.records
    assert "rank 0 has waited 0.1 s for the unique id of rank 1, in layer 3, phase wait over mine" in record.message


def test_a_wait_that_others_called_off_ends_at_once_with_their_reason():
    wait = Wait(context(lambda: Cancelled("rank 2 aborted layer 3")), 60.0, label="mine", where="phase connect")
    with pytest.raises(TransferError, match="state=cancelled rank 2 aborted layer 3") as caught:
        wait.pause([])
    assert (caught.value.code, caught.value.fields["state"]) == ("EPLB-T001", "cancelled")


# --- calls that block ------------------------------------------------------------------------------------------------


class Blocked:
    """A call that ends when it is severed, and not before."""

    def __init__(self):
        self.severed = threading.Event()
        self.times = 0

    def sever(self):
        self.times += 1
        self.severed.set()

    def ends_within(self, limit_s):
        return self.severed.wait(limit_s)


@pytest.fixture
def watched():
    watches = []

    def start(cancelled):
        call = Blocked()
        watches.append(CancelWatch(cancelled, call.sever))
        return call, watches[-1]

    yield start
    for watch in watches:
        watch.close()
        assert not watch._thread.is_alive()


def test_a_blocked_call_is_severed_once_when_it_is_called_off(watched):
    call, watch = watched(lambda: Cancelled("rank 1 is gone", peer_lost=True))
    for _ in range(2):
        with watch.during():
            assert call.ends_within(5)
    assert watch.told == Cancelled("rank 1 is gone", peer_lost=True)
    assert (watch.has_acted, watch.timed_out, call.times) == (True, False, 1)


def test_a_blocked_call_is_severed_when_its_limit_runs_out(watched):
    call, watch = watched(lambda: None)
    with watch.during(Deadline(0.1)):
        assert call.ends_within(5)
    assert (watch.timed_out, watch.told, watch.failure) == (True, None, None)


def test_a_blocked_call_is_severed_when_looking_around_fails_and_the_failure_is_kept(watched):
    def lost():
        raise OSError("the store is not there")

    call, watch = watched(lost)
    with watch.during(Deadline(60)):
        assert call.ends_within(5)
    assert str(watch.failure) == "the store is not there"


def test_nobody_looks_while_nothing_blocks_and_a_watch_that_slept_looks_again(watched, monkeypatch):
    monkeypatch.setattr("eplb_core.backend.toolkit.watch._PARK_AFTER", 1)
    looks = threading.Semaphore(0)
    call, watch = watched(lambda: looks.release())
    until = time.monotonic() + 5
    while not watch._parked and time.monotonic() < until:
        time.sleep(0.01)
    assert watch._parked
    assert not looks.acquire(blocking=False)
    with watch.during():
        assert looks.acquire(timeout=5)
    assert not watch.is_watching
    assert not call.severed.is_set()


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peers_per_round", [1, 2, 3, 100])
@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2), (1, 4, 6, 7), tuple(range(9)), tuple(range(16))], ids=len)
def test_ranks_that_finish_each_round_before_the_next_meet_everyone_and_never_wait_in_a_circle(
    members, peers_per_round
):
    rounds = {
        rank: rounds_of_pairs(members, rank, set(members) - {rank}, peers_per_round=peers_per_round) for rank in members
    }
    for rank, own in rounds.items():
        assert sorted(itertools.chain.from_iterable(own)) == [member for member in members if member != rank]
        assert all(0 < len(peers) <= peers_per_round for peers in own)
    meets = {(rank, peer): number for rank, own in rounds.items() for number, peers in enumerate(own) for peer in peers}
    reached = dict.fromkeys(members, 0)
    while any(reached[rank] < len(rounds[rank]) for rank in members):
        # A round is over once each of its peers has come to the round in which it meets this rank.
        over = [
            rank
            for rank in members
            if reached[rank] < len(rounds[rank])
            and all(reached[peer] >= meets[peer, rank] for peer in rounds[rank][reached[rank]])
        ]
        assert over, f"nobody can go on at {reached}"
        for rank in over:
            reached[rank] += 1


def test_pairs_that_are_not_asked_for_leave_the_others_where_they_were():
    members = range(8)
    for one, other in itertools.combinations(members, 2):
        assert rounds_of_pairs(members, one, [other]) == [[other]]
        assert rounds_of_pairs(members, other, [one]) == [[one]]


@pytest.mark.parametrize("stranger", [0, 2, -1])
def test_metadata_of_this_rank_or_of_none_of_the_members_is_refused(stranger):
    with pytest.raises(MetadataError, match=f"from rank {stranger}: it is not another member"):
        check_member(stranger, context(members=(0, 1, 3)))


def test_ranks_and_errors_are_named_in_a_few_words():
    assert name_ranks({2, 1}) == "ranks 1 and 2"
    assert first_line(ValueError("one. two")) == "one"
    assert first_line(ValueError("[pair.cc:1] timed out waiting 5ms for recv")) == "timed out waiting 5ms for recv"
    assert first_line(ValueError("  \n ")) == "ValueError"
    assert first_line(ValueError("[only a place]")) == "ValueError"


# --- order of calls --------------------------------------------------------------------------------------------------


def test_calls_out_of_order_are_refused_and_say_what_is_missing():
    life, handle = Lifecycle(context(), "mine"), SimpleNamespace(slot=1)
    for call, problem in (
        (life.connecting, "mine is connected before it was given its buffers"),
        (lambda: life.starting(0), "a transfer over mine before it is connected"),
        (lambda: life.waiting(handle), "a wait over mine for a transfer that is not in flight"),
    ):
        with pytest.raises(PlanError, match=problem):
            call()
    life.registering()
    with pytest.raises(PlanError, match="mine was given its buffers before"):
        life.registering()
    life.connecting()
    life.connected()
    life.begin(handle)
    for slot in (1, 2, -1):
        with pytest.raises(PlanError, match=f"a transfer into slot {slot}, which is in use or not there"):
            life.starting(slot)
    life.end(handle)
    life.end(handle)
    life.starting(1)


def test_another_transfer_in_the_same_slot_is_not_the_one_in_flight():
    life, first, second = Lifecycle(context(), "mine"), SimpleNamespace(slot=0), SimpleNamespace(slot=0)
    life.begin(second)
    life.end(first)
    assert life.in_flight == {0: second}
    with pytest.raises(PlanError):
        life.waiting(first)


def test_after_a_failure_everything_is_refused_for_the_first_reason_and_after_close_because_it_is_closed():
    life = Lifecycle(context(), "mine")
    life.poison("layer 3, phase abort", "rank 1 gave up")
    life.poison("close", "the backend was closed")
    calls = (life.registering, life.connecting, lambda: life.starting(0), life.check_usable)
    for call in calls:
        with pytest.raises(PoisonedError, match="unusable since layer 3, phase abort: rank 1 gave up"):
            call()
    assert life.close()
    assert not life.close()
    for call in calls:
        with pytest.raises(EplbError) as caught:
            call()
        assert caught.value.code == "EPLB-T008"
