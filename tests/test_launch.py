"""Ranks as processes: they start together, are heard, end at a limit, and never outlive their launcher."""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from eplb_core.errors import BenchError, PlanError
from eplb_core.launch.messages import MessageReader, send_message
from eplb_core.launch.supervise import launch
from eplb_core.testing.ranks import Ranks, run_ranks


def meet(rank, payload):
    store = rank.store()
    store.set(f"here/{rank.rank}", str(os.getpid()))
    store.wait([f"here/{other}" for other in range(rank.world_size)])
    rank.tell(("met", rank.rank, rank.world_size, payload))


def first_is_done_first(rank):
    store = rank.store()
    if rank.rank == 0:
        store.set("first", str(os.getpid()))
        return
    ended, _, _ = select.select([os.pidfd_open(int(store.get("first")))], [], [], 20)
    rank.tell(("read", bool(ended), store.get("first") != b""))


def one_is_killed(rank):
    print("the last words", file=sys.stderr, flush=True)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def one_raises(rank):
    if rank.rank == 1:
        raise PlanError("EPLB-P003", what="maps")


def one_leaves(rank):
    if rank.rank == 0:
        sys.exit("went home")


def all_sleep(rank):
    rank.tell(os.getpid())
    time.sleep(3600)


def does_not_end(rank):
    threading.Thread(target=time.sleep, args=(3600,)).start()


def crashes_at_exit(rank):
    atexit.register(os.abort)


def prints(rank):
    print("to stdout", flush=True)
    os.write(1, b"to the descriptor")
    print("x" * 1_000_000, file=sys.stderr)
    rank.tell("y" * 1_000_000)


def is_stopped_within_a_note(rank):
    if rank.rank == 0:
        os.write(rank._pipe.fileno(), (1000).to_bytes(8, "big") + b"and no more")
        os.kill(os.getpid(), signal.SIGSTOP)


def has_settings(rank, name):
    return os.environ.get(name), sys.flags.optimize, threading.current_thread() is threading.main_thread()


def has_left_the_terminal(rank):
    return os.getsid(0) == os.getpid(), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def no_value_that_pickles(rank):
    return threading.Lock()


@contextmanager
def no_process_left():
    """Fail when processes are left that were not there before; what multiprocessing keeps for later may stay."""
    forkserver.ensure_running()
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def run(function, *args, num_ranks=2, limit_s=60.0, grace_s=20.0, ending_s=30.0):
    notes = []
    with no_process_left():
        failures = launch(
            function,
            *args,
            num_ranks=num_ranks,
            limit_s=limit_s,
            grace_s=grace_s,
            ending_s=ending_s,
            on_note=lambda *note: notes.append(note),
        )
    return notes, failures


def test_ranks_meet_at_a_store_of_their_own_and_report():
    notes, failures = run(meet, {"answer": 42}, num_ranks=3)
    assert failures == ()
    assert sorted(notes) == [(rank, ("met", rank, 3, {"answer": 42})) for rank in range(3)]


def test_the_store_outlives_every_rank():
    notes, failures = run(first_is_done_first)
    assert failures == ()
    assert notes == [(1, ("read", True, True))]


def test_a_killed_rank_is_named_first_and_the_others_are_ended_after_their_grace():
    started = time.monotonic()
    _, failures = run(one_is_killed, grace_s=1)
    assert time.monotonic() - started < 50
    assert [(failure.rank, failure.error) for failure in failures] == [(1, "Died"), (0, "Killed")]
    assert failures[0].message == "its process was ended by SIGKILL"
    assert "the last words" in failures[0].trace


def test_a_typed_error_keeps_its_class_code_and_text():
    _, (failure,) = run(one_raises)
    assert (failure.rank, failure.error, failure.code) == (1, "PlanError", "EPLB-P003")
    assert failure.message == "Ranks were given different maps. [EPLB-P003]"
    assert "raise PlanError" in failure.trace


def test_a_rank_that_exits_by_itself_has_failed():
    _, (failure,) = run(one_leaves)
    assert (failure.rank, failure.error, failure.message) == (0, "SystemExit", "went home")


def test_ranks_that_are_still_running_at_the_limit_are_killed():
    started = time.monotonic()
    _, failures = run(all_sleep, limit_s=6)
    assert time.monotonic() - started < 20
    assert [(failure.rank, failure.error) for failure in failures] == [(0, "Killed"), (1, "Killed")]
    assert failures[0].message == "it still ran after 6 s"


def test_a_process_that_does_not_end_after_its_work_is_a_failure():
    _, (failure,) = run(does_not_end, num_ranks=1, ending_s=2)
    assert failure.message == "it had done its work, but its process did not end"


def test_a_process_that_crashes_after_its_work_is_a_failure():
    _, (failure,) = run(crashes_at_exit, num_ranks=1)
    assert failure.message == "it had done its work, then its process was ended by SIGABRT"


def test_whatever_ranks_print_neither_blocks_nor_spoils_their_reports(capfd):
    notes, failures = run(prints, num_ranks=1)
    assert failures == ()
    assert [len(text) for _, text in notes] == [1_000_000]
    assert capfd.readouterr().out == ""


def test_a_rank_that_is_stopped_in_the_middle_of_a_note_holds_up_no_limit():
    started = time.monotonic()
    notes, failures = run(is_stopped_within_a_note, limit_s=6)
    assert time.monotonic() - started < 20
    assert notes == []
    assert [(failure.rank, failure.error) for failure in failures] == [(0, "Killed")]


def test_an_interrupt_ends_all_ranks():
    def interrupt(rank, note):
        raise KeyboardInterrupt

    with no_process_left(), pytest.raises(KeyboardInterrupt):
        launch(all_sleep, num_ranks=2, limit_s=60, on_note=interrupt)


def test_ranks_end_when_their_launcher_is_killed():
    script = """
from eplb_core.launch.processes import Processes
from tests.test_launch import all_sleep
ranks = Processes(2, all_sleep, ())
for rank in range(2):
    ((_, _, pid),) = ranks.receive({rank}, 60)
    print(pid, flush=True)
ranks.receive(ranks.open, 600)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as launcher:
        ranks = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
        launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert alive == []


def test_a_rank_that_cannot_be_started_ends_those_before_it(monkeypatch):
    starts = []
    start = mp.get_context("forkserver").Process.start

    def start_one(process):
        starts.append(process)
        if len(starts) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        start(process)

    monkeypatch.setattr(mp.get_context("forkserver").Process, "start", start_one)
    with no_process_left(), pytest.raises(BenchError, match=r"rank 1 could not be started: .*unavailable") as caught:
        launch(all_sleep, num_ranks=3, limit_s=60, on_note=lambda *note: None)
    assert caught.value.code == "EPLB-B002"
    assert len(starts) == 2


def test_each_rank_has_the_settings_of_its_launch_and_the_flags_of_its_launcher():
    values = run_ranks(2, has_settings, "EPLB_TEST_SETTING", env={"EPLB_TEST_SETTING": "7"})
    assert values == [("7", sys.flags.optimize, True)] * 2


def test_the_settings_of_one_launch_are_not_those_of_the_next(monkeypatch):
    monkeypatch.setenv("EPLB_TEST_SETTING", "here")
    assert run_ranks(1, has_settings, "EPLB_TEST_SETTING")[0][0] == "here"
    monkeypatch.delenv("EPLB_TEST_SETTING")
    assert run_ranks(1, has_settings, "EPLB_TEST_SETTING")[0][0] is None


def test_an_interrupt_of_the_terminal_is_for_the_launcher_and_a_rank_can_still_be_interrupted():
    assert run_ranks(2, has_left_the_terminal) == [(True, False)] * 2
    with Ranks(1, all_sleep) as ranks:
        ranks.hear(0)
        ranks.signal(0, signal.SIGINT)
        assert "KeyboardInterrupt" in ranks.join(30)[0].error


def test_a_value_that_does_not_pickle_is_a_failure_of_its_rank():
    with pytest.raises(AssertionError, match="cannot pickle '_thread"):
        run_ranks(1, no_value_that_pickles)


def test_a_function_that_ranks_cannot_import_is_a_failure_that_says_so(monkeypatch):
    monkeypatch.setattr(pickle, "dumps", lambda call: b"cnowhere\nnothing\n.")
    with no_process_left():
        (failure,) = launch(meet, num_ranks=1, limit_s=60, on_note=lambda *note: None)
    assert (failure.error, failure.message) == ("ModuleNotFoundError", "No module named 'nowhere'")


def test_a_message_is_put_together_from_whatever_pieces_arrive():
    reading, writing = os.pipe()
    try:
        for message in ("one", {"two": 2}):
            send_message(writing, message)
        data = os.read(reading, 1000)
    finally:
        os.close(reading)
        os.close(writing)
    for size in range(1, len(data) + 1):
        reader = MessageReader()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert [message for piece in pieces for message in reader.take(piece)] == ["one", {"two": 2}]
