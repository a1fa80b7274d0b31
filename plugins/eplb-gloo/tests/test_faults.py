"""A peer that dies, stops, or calls a layer off ends every wait in time, with an error that says why."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from eplb_core.backend import Cancelled
from eplb_core.errors import EplbError, PlanError, PoisonedError, StalledError, TransferError
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from eplb_gloo.waiter import left_behind

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from members import UNTOUCHED, Case, Member  # noqa: E402

EACH_WITH_EACH = Case(((4096, 300 << 10), (64,)), world_size=3, new_map=((0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11),) * 2)
"""Every rank receives from both others. gloo sends nothing before the other end has posted its receive."""

SWAP = Case(((300 << 10,), (64,)), num_rows=2, new_map=((2, 3, 0, 1),) * 2)
"""Two ranks swap what they hold."""


def seconds_of(call, *args) -> tuple[float, object]:
    started = time.monotonic()
    try:
        outcome = call(*args)
    except EplbError as error:
        outcome = error
    return time.monotonic() - started, outcome


def wait_with_a_peer_that_never_sends(rank: Rank, timeout_s: float) -> tuple[float, object, bool, float, object]:
    member = Member(rank, EACH_WITH_EACH)
    member.connect()
    member.meet("connected")
    rank.tell("connected")
    if rank.rank == 1:
        time.sleep(60)
    _, handle = member.start(0)
    rank.tell("waiting")
    seconds, error = seconds_of(member.backend.wait, handle, timeout_s)
    drained = member.backend.abort(handle, "the wait failed")
    close_s, closed = seconds_of(member.backend.close, True)
    return seconds, error, drained, close_s, closed


def test_a_killed_peer_ends_the_waits_of_all_others_at_once():
    with Ranks(3, wait_with_a_peer_that_never_sends, 30.0) as ranks:
        for rank in range(3):
            ranks.hear(rank)
        for rank in (0, 2):
            ranks.hear(rank)
        ranks.signal(1, signal.SIGKILL)
        outcomes = ranks.join(20)
    for rank in (0, 2):
        seconds, error, drained, close_s, closed = outcomes[rank].value
        assert seconds < 3
        assert isinstance(error, TransferError)
        assert error.code == "EPLB-T001"
        # closed, or reset where the killed one had not read all that was sent to it
        ends = "closed by peer|reset by peer|Broken pipe"
        assert re.match(rf"torch_gloo transfer failed with state=.*({ends})", str(error))
        assert "rank 1" in str(error) or "rank 2" in str(error) or "rank 0" in str(error)
        assert "layer 0, phase wait" in str(error)
        assert drained is False
        assert close_s < 1
        assert closed is True


def test_a_stopped_peer_is_named_when_the_limit_runs_out():
    with Ranks(3, wait_with_a_peer_that_never_sends, 2.0) as ranks:
        ranks.hear(1)
        ranks.signal(1, signal.SIGSTOP)
        outcomes = ranks.join(20, without=(1,))
    for rank in (0, 2):
        seconds, error, drained, close_s, closed = outcomes[rank].value
        assert seconds < 3.5
        assert drained is False
        assert close_s < 1
        assert closed is True
        if not isinstance(
            error, StalledError
        ):  # the other survivor's limit ran out first, which closed its connections
            assert "Connection closed by peer" in str(error)
    errors = [outcomes[rank].value[1] for rank in (0, 2)]
    stalled = [error for error in errors if isinstance(error, StalledError)]
    assert stalled
    for error in stalled:
        assert error.code == "EPLB-T002"
        assert error.fields["waiting_for"] == "rank 1"
        assert error.fields["where"] == "layer 0, phase wait over torch_gloo"
        assert 1.9 < error.fields["seconds"] < 3.5


def test_an_abort_wakes_the_waits_of_the_peers():
    outcomes = run_ranks(3, _abort_while_others_wait)
    for seconds, error in (outcomes[0], outcomes[2]):
        assert seconds < 1
        assert error.code == "EPLB-T001"
        assert "Connection closed by peer" in str(error)


def _abort_while_others_wait(rank: Rank) -> object:
    member = Member(rank, EACH_WITH_EACH)
    member.connect()
    if rank.rank != 1:
        _, handle = member.start(0)
        member.meet("started")
        member.meet("waiting", (0, 2))
        aborted = time.time()
        _, error = seconds_of(member.backend.wait, handle, 30.0)
        return time.time() - aborted, error
    member.meet("started")
    _, handle = member.start(1)  # whose messages match none of the others': in flight for good
    assert member.backend.abort(handle, "called off") is False
    return None


def test_nothing_goes_over_a_backend_after_an_abort_with_messages_outstanding():
    before, after = run_ranks(2, _use_after_abort)[0]
    assert before is False
    assert len(after) == 4
    for error in after:
        assert isinstance(error, PoisonedError)
        assert "called off" in str(error)
        assert "under test" in str(error)


def _use_after_abort(rank: Rank) -> object:
    member = Member(rank, SWAP)
    member.connect()
    if rank.rank == 1:
        member.meet("done")
        return None
    _, handle = member.start(0)
    drained = member.backend.abort(handle, "called off")
    errors = [
        seconds_of(member.backend.transfer, member.plan(0))[1],
        seconds_of(member.backend.wait, handle, 1.0)[1],
        seconds_of(member.backend.exchange_metadata, None, [])[1],
        seconds_of(member.backend.register_buffers, member.buffers)[1],
    ]
    assert member.backend.abort(handle, "again") is False
    member.meet("done")
    return drained, errors


def test_an_abort_of_complete_messages_costs_nothing():
    assert all(run_ranks(2, _abort_when_complete))


def _abort_when_complete(rank: Rank) -> bool:
    member = Member(rank, Case(((4096, 300 << 10), (64,))))
    member.connect()
    for layer in (0, 1):
        plan, handle = member.start(layer)
        member.meet(f"posted {layer}")
        time.sleep(0.3)  # nothing tells from outside that gloo is done; a few hundred KiB take a millisecond
        assert member.backend.abort(handle, "changed my mind") is True
        member.check(plan)
    return member.rounds(3) > 0


def test_a_wait_that_was_completed_is_drained():
    assert run_ranks(2, _abort_after_wait) == [True, True]


def _abort_after_wait(rank: Rank) -> bool:
    member = Member(rank, Case(((4096,),)))
    member.connect()
    started = member.start(0)
    member.finish(started)
    return member.backend.abort(started[1], "too late")


def test_a_wait_ends_when_the_layer_is_called_off_elsewhere_although_its_peers_are_well():
    seconds, error, drained = run_ranks(2, _cancelled_while_waiting)[0]
    assert 0.4 < seconds < 1.5
    assert error.code == "EPLB-T001"
    assert error.fields["state"] == "cancelled"
    assert "rank 7 aborted layer 0" in str(error)
    assert drained is False


def _cancelled_while_waiting(rank: Rank) -> object:
    until = time.monotonic() + 3600
    member = Member(rank, SWAP, lambda: Cancelled("rank 7 aborted layer 0") if time.monotonic() > until else None)
    member.connect()
    if rank.rank == 1:
        member.meet("done")
        return None
    _, handle = member.start(0)
    time.sleep(2.5)  # long enough for the watch to have parked
    until = time.monotonic() + 0.5
    seconds, error = seconds_of(member.backend.wait, handle, 30.0)
    drained = member.backend.abort(handle, "called off")
    member.meet("done")
    return seconds, error, drained


def test_what_asking_for_cancellation_raises_ends_the_wait():
    seconds, error = run_ranks(2, _asking_fails)[0]
    assert seconds < 1.5
    assert error.code == "EPLB-T005"


def _asking_fails(rank: Rank) -> object:
    from eplb_core.errors import error_for

    broken = False

    def cancelled() -> Cancelled | None:
        if broken:
            raise error_for("EPLB-T005", where="a test", problem="it is not there", layers="none")
        return None

    member = Member(rank, SWAP, cancelled)
    member.connect()
    if rank.rank == 1:
        member.meet("done")
        return None
    _, handle = member.start(0)
    broken = True
    outcome = seconds_of(member.backend.wait, handle, 30.0)
    member.meet("done")
    return outcome


def test_members_that_do_not_come_to_connect_are_named():
    seconds, error = run_ranks(4, _connect_without_some, 1.0)[0]
    assert seconds < 2.5
    assert isinstance(error, StalledError)
    assert error.fields["waiting_for"] == "ranks 1 and 3"
    assert error.fields["where"] == "phase connect over torch_gloo"


def _connect_without_some(rank: Rank, timeout_s: float) -> object:
    if rank.rank in (1, 3):
        return None
    member = Member(rank, Case(((64,),), world_size=4, timeout_s=timeout_s))
    local = member.backend.register_buffers(member.buffers)
    return seconds_of(member.backend.exchange_metadata, local, [])


def test_connecting_ends_when_it_is_called_off():
    seconds, error = run_ranks(2, _connect_cancelled)[0]
    assert seconds < 1.5
    assert error.fields["state"] == "cancelled"
    assert "rank 1 is gone" in str(error)


def _connect_cancelled(rank: Rank) -> object:
    if rank.rank == 1:
        return None
    until = time.monotonic() + 0.5
    gone = Cancelled("rank 1 is gone", peer_lost=True)
    member = Member(rank, Case(((64,),)), lambda: gone if time.monotonic() > until else None)
    local = member.backend.register_buffers(member.buffers)
    return seconds_of(member.backend.exchange_metadata, local, [])


@pytest.mark.parametrize(("mine", "theirs"), [(16, 32), (32, 16)])
def test_ranks_with_different_plans_run_into_their_limit_and_neither_dies(mine, theirs):
    # gloo itself would take 16 bytes for 32 and leave the tail, and would abort the process on 32 for 16
    outcomes = run_ranks(2, _different_sizes, mine, theirs)
    stalled = [error for error, _ in outcomes if isinstance(error, StalledError)]
    assert stalled
    assert all(error.code in ("EPLB-T001", "EPLB-T002") for error, _ in outcomes)
    assert [untouched for _, untouched in outcomes] == [True, True]


def _different_sizes(rank: Rank, mine: int, theirs: int) -> object:
    # Both register rows of 32 bytes, as the core would have made sure; then one has a plan of a smaller layer.
    member = Member(rank, Case(((32,), (16,)), new_map=((4, 5, 6, 7, 0, 1, 2, 3),) * 2))
    member.connect()
    layer = 0 if (mine if rank.rank == 0 else theirs) == 32 else 1
    plan = member.plan(layer)
    member.landing.slots[plan.slot].fill_(UNTOUCHED)
    handle = member.backend.transfer(plan)
    member.meet("posted")
    _, error = seconds_of(member.backend.wait, handle, 0.5)
    member.backend.abort(handle, "sizes differ")
    member.meet("aborted")
    member.backend.close(force=True)
    return error, bool((member.landing.slots[plan.slot] == UNTOUCHED).all())


def test_a_peer_that_dies_before_the_transfer_makes_the_wait_fail_not_the_transfer():
    # the core aborts handles; what was posted before the failure must have one
    with Ranks(2, _transfer_to_the_dead) as ranks:
        ranks.hear(0)
        ranks.hear(1)
        ranks.signal(1, signal.SIGKILL)
        ranks.tell(0, "dead")
        kind, error, drained = ranks.join(20)[0].value
    assert kind == "GlooTransfer"
    assert error.code == "EPLB-T001"
    assert "Connection closed by peer" in str(error)
    assert drained is False


def _transfer_to_the_dead(rank: Rank) -> object:
    member = Member(rank, SWAP)
    member.connect()
    rank.tell("connected")
    rank.listen()
    time.sleep(0.5)
    _, handle = member.start(0)
    _, error = seconds_of(member.backend.wait, handle, 10.0)
    return type(handle).__name__, error, member.backend.abort(handle, "dead")


@pytest.mark.slow
def test_memory_of_an_undrained_transfer_is_not_written_after_close():
    for closed, is_left, same in run_ranks(2, _write_after_close):
        assert closed is not is_left
        assert same


def _write_after_close(rank: Rank) -> tuple[bool, bool, bool]:
    member = Member(rank, Case(((64 << 20,),), num_rows=1, new_map=((1, 0),)))  # so long that it is cut off midway
    member.connect()
    plan, handle = member.start(0)
    if rank.rank == 1:
        seconds_of(member.backend.wait, handle, 1.0)
    member.backend.abort(handle, "called off")
    closed = member.backend.close(force=True)
    before = member.landing.slots[plan.slot].clone()
    member.meet("closed")
    time.sleep(0.3)
    return closed, left_behind() == 1, torch.equal(before, member.landing.slots[plan.slot])


def test_a_close_from_another_thread_ends_a_wait():
    seconds, error = run_ranks(2, _close_while_waiting)[0]
    assert seconds < 2
    assert isinstance(error, TransferError)


def _close_while_waiting(rank: Rank) -> object:
    import threading

    member = Member(rank, SWAP)
    member.connect()
    if rank.rank == 1:
        member.meet("done")
        return None
    _, handle = member.start(0)
    closer = threading.Timer(0.5, member.backend.close, (True,))
    closer.start()
    outcome = seconds_of(member.backend.wait, handle, 30.0)
    closer.join(10)
    member.meet("done")
    return outcome


def test_calls_out_of_order_are_refused():
    errors = run_ranks(1, _out_of_order)[0]
    assert [type(error) for error in errors] == [PlanError] * 4
    assert [error.code for error in errors] == ["EPLB-P004"] * 4


def _out_of_order(rank: Rank) -> list[object]:
    member = Member(rank, Case(((64,),), world_size=1, new_map=((1, 0, 2, 3),)))
    errors = [
        seconds_of(member.backend.exchange_metadata, None, [])[1],
        seconds_of(member.backend.transfer, member.plan(0))[1],
        seconds_of(member.backend.wait, "no handle", 1.0)[1],
    ]
    member.backend.register_buffers(member.buffers)
    return [*errors, seconds_of(member.backend.register_buffers, member.buffers)[1]]


def test_a_slot_in_use_and_a_slot_that_is_not_there_are_refused():
    assert run_ranks(2, _wrong_slots)[0] == ["EPLB-P004", "EPLB-P004"]


def _wrong_slots(rank: Rank) -> object:
    from dataclasses import replace

    member = Member(rank, SWAP)
    member.connect()
    if rank.rank == 1:
        member.meet("done")
        return None
    _, handle = member.start(0)
    codes = [seconds_of(member.backend.transfer, replace(member.plan(0), slot=slot))[1].code for slot in (0, 2)]
    member.backend.abort(handle, "done")
    member.meet("done")
    return codes
