"""A step that an exception leaves in between counts once, and a worker that nobody expected to die works on."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from eplb_core.balancing.handover import Handover
from eplb_core.balancing.placing import Placing
from eplb_core.balancing.promise import PromiseBook
from eplb_core.communicator import Communicator
from eplb_core.errors import EplbError
from eplb_core.rearrange.rearrangement import Rearrangement
from eplb_core.testing.ranks import run_ranks
from tests.balancing.serving import Serving
from tests.balancing.test_failures import Grip, die


def once(owner, name, raises, when=lambda *_: True, after=False):
    """Have a method raise the first time that `when` holds, before it does anything or after all of it."""
    method, left = getattr(owner, name), [1]

    def interrupted(*arguments, **more):
        if after:
            method(*arguments, **more)
        if left and when(*arguments):
            left.clear()
            raise raises
        return None if after else method(*arguments, **more)

    setattr(owner, name, interrupted)


def while_rearranging(book, *_):
    return book.step == 22 and threading.current_thread() is threading.main_thread()


INTERRUPTED_AT = {
    "looking at promises": lambda: once(PromiseBook, "look", KeyboardInterrupt, while_rearranging),
    "entering": lambda: once(PromiseBook, "begin_step", KeyboardInterrupt, while_rearranging, after=True),
    "a commit": lambda: once(Rearrangement, "commit", KeyboardInterrupt),
    "after a commit": lambda: once(Rearrangement, "commit", KeyboardInterrupt, after=True),
    "nowhere": lambda: None,
}


def goes_on_after_an_interrupt(rank, where, in_callback):
    told, left = [], [in_callback]

    def on_commit(layer, old_row, new_row):
        assert (old_row != new_row).any()
        told.append((serving.number, layer))
        if left.pop() if left else False:
            raise KeyboardInterrupt

    serving = Serving(rank, communicator="torch_gloo", on_commit=on_commit)
    if rank.rank == 1:
        INTERRUPTED_AT[where]()
    else:
        left.clear()
    interrupts = 0
    while len(serving.commits) < 8:
        serving.forward()
        try:
            serving.step()
        except KeyboardInterrupt:
            interrupts += 1
            serving.step()  # the same step, taken up
    outcome = serving.commits, interrupts, told == serving.commits, serving.lb.status.step == serving.number
    serving.close()
    return outcome


@pytest.mark.parametrize("where", INTERRUPTED_AT)
def test_a_step_that_was_interrupted_is_taken_up_and_counts_once(where):
    first, second = run_ranks(2, goes_on_after_an_interrupt, where, where == "nowhere", timeout_s=120)
    assert (first[1], second[1]) == (0, 1)
    assert first[0] == second[0]
    assert first[2:] == second[2:] == (True, True)


def interrupted_in_place(rank):
    serving = Serving(rank, communicator="torch_gloo", use_async=False, layers=3, meets=False)
    if rank.rank == 1:
        once(Rearrangement, "_stage", KeyboardInterrupt, lambda _, number: number == 1)
    while True:
        serving.forward()
        try:
            serving.step()
        except (KeyboardInterrupt, EplbError) as left:
            held = serving.lb.physical_to_logical_map
            report = serving.comm.report.physical_to_logical_map
            outcome = type(left).__name__, (held == report).all(), serving.model.wrong_rows(held)
            serving.comm.close(force=True)
            return outcome


def test_a_step_that_was_interrupted_while_it_rearranged_leaves_the_map_that_holds():
    outcomes = run_ranks(2, interrupted_in_place, timeout_s=60)
    assert [outcome[0] for outcome in outcomes] == ["PeerLostError", "KeyboardInterrupt"]
    for _, holds, wrong in outcomes:
        assert holds
        assert not wrong


# --- a worker that dies of something that nobody expected -------------------------------------------------------------


def dies_and_works_on(rank, where):
    serving = Serving(rank, communicator="torch_gloo", on_failure="keep", timeout_s=10)
    if rank.rank == 1 and where == "its promise":
        Grip("set", "promise", die)
    elif rank.rank == 1 and where == "idle":
        once(Handover, "await_work", SystemExit("gone"), lambda handover: handover.snapshot is not None)
    elif rank.rank == 1:
        once(Placing, "run", SystemExit("gone"))
    failed_at, count = None, rank.device_group(topic="failures")
    while failed_at is None or len(serving.commits) < failed_at + 4:
        serving.serve(1)
        failures = torch.tensor([serving.lb.status.num_failures])
        count.allreduce([failures]).wait()
        failed_at = len(serving.commits) if failed_at is None and failures > 0 else failed_at
    status = serving.lb.status
    outcome = serving.commits, status.num_engine_settled, status.num_failures > 0, str(status.last_failure)
    serving.close()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("where", ["its promise", "idle", "its try"])
def test_a_worker_that_died_unexpectedly_tries_again_where_failures_are_kept(where):
    first, second = run_ranks(2, dies_and_works_on, where, timeout_s=120)
    assert first[0] == second[0]
    assert first[1] == second[1] == 0  # no engine waited out its limit
    assert second[2]
    assert "SystemExit" in second[3]


def comes_late(rank):
    """Rank 1's worker sleeps through the others' first attempts to rebuild."""
    serving = Serving(rank, communicator="torch_gloo", on_failure="keep", timeout_s=2, meets=False)
    if rank.rank == 0:
        once(Placing, "run", SystemExit("gone"))
    else:
        rebuild, left = Communicator.rebuild, [True]

        def late(communicator, *arguments, **more):
            time.sleep(5 if left.pop() else 0)
            left.append(False)
            return rebuild(communicator, *arguments, **more)

        Communicator.rebuild = late
    serving.serve_until(lambda: len(serving.commits) >= 4, limit=20_000)
    outcome = serving.lb.status.num_failures, serving.commits[:4], (left == [False] if rank.rank else None)
    serving.close()
    return outcome


@pytest.mark.slow
def test_members_try_to_rebuild_again_until_the_last_one_comes():
    first, second = run_ranks(2, comes_late, timeout_s=120)
    assert first[0] >= 1
    assert first[1] == second[1]
    assert second[2]  # it was late
