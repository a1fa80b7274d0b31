"""Ranks as processes: they start together, are listened to, and never outlive their launch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager

import psutil
import pytest

from eplb_core.bench.launch import launch

TARGETS = """
    import os, signal, sys, time
    from eplb_core.errors import PlanError

    def meet(payload, rank, world_size, connect, emit):
        store = connect()
        store.set(f"here/{rank}", str(os.getpid()))
        store.wait([f"here/{other}" for other in range(world_size)])
        emit("met", {"rank": rank, "of": world_size, "payload": payload})

    def host_is_done_first(payload, rank, world_size, connect, emit):
        import psutil
        store = connect()
        if rank == 0:
            store.set("host", str(os.getpid()))
            return
        _, alive = psutil.wait_procs([psutil.Process(int(store.get("host")))], timeout=payload["patience_s"])
        emit("read", {"host is there": bool(alive), "again": store.get("host") != b""})

    def one_is_killed(payload, rank, world_size, connect, emit):
        emit("up", {})
        print("the last words", file=sys.stderr, flush=True)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    def one_raises(payload, rank, world_size, connect, emit):
        emit("up", {})
        if rank == 1:
            raise PlanError("EPLB-P003", what="maps")

    def one_leaves(payload, rank, world_size, connect, emit):
        emit("up", {})
        if rank == 0:
            sys.exit("went home")

    def all_sleep(payload, rank, world_size, connect, emit):
        emit("up", {})
        time.sleep(3600)

    def does_not_end(payload, rank, world_size, connect, emit):
        import threading
        threading.Thread(target=time.sleep, args=(3600,)).start()

    def crashes_at_exit(payload, rank, world_size, connect, emit):
        import atexit
        atexit.register(os.abort)

    def prints(payload, rank, world_size, connect, emit):
        print("to stdout", flush=True)
        os.write(1, b"to the descriptor")
        print("x" * 1_000_000, file=sys.stderr)
        emit("large", {"text": "y" * 1_000_000})
"""


@pytest.fixture
def targets(tmp_path, monkeypatch):
    (tmp_path / "launch_targets.py").write_text(textwrap.dedent(TARGETS))
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", paths)


@contextmanager
def no_process_left():
    """Fail when processes are left that were not there before; tests may keep ranks ready for later ones."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def run(function, *, payload=None, num_ranks=2, limit_s=60.0, grace_s=20.0, ending_s=30.0):
    events = []
    with no_process_left():
        failures = launch(
            f"launch_targets:{function}",
            payload or {"answer": 42},
            num_ranks,
            limit_s=limit_s,
            grace_s=grace_s,
            ending_s=ending_s,
            on_event=lambda *event: events.append(event),
        )
    return events, failures


def test_ranks_meet_at_a_store_of_their_own_and_report(targets):
    events, failures = run("meet", num_ranks=3)
    assert failures == ()
    assert sorted(events, key=lambda event: event[0]) == [
        (rank, "met", {"rank": rank, "of": 3, "payload": {"answer": 42}}) for rank in range(3)
    ]


def test_the_rank_that_hosts_the_store_leaves_last(targets):
    events, failures = run("host_is_done_first", payload={"patience_s": 3})
    assert failures == ()
    assert events == [(1, "read", {"host is there": True, "again": True})]


def test_a_killed_rank_is_named_first_and_the_others_are_ended_after_their_grace(targets):
    started = time.monotonic()
    _, failures = run("one_is_killed", grace_s=1)
    assert time.monotonic() - started < 50
    assert [(failure.rank, failure.error) for failure in failures] == [(1, "Died"), (0, "Killed")]
    assert failures[0].message == "its process was ended by SIGKILL"
    assert "the last words" in failures[0].trace


def test_a_typed_error_keeps_its_class_code_and_text(targets):
    _, (failure,) = run("one_raises")
    assert (failure.rank, failure.error, failure.code) == (1, "PlanError", "EPLB-P003")
    assert failure.message == "Ranks were given different maps. [EPLB-P003]"
    assert "raise PlanError" in failure.trace


def test_a_rank_that_exits_by_itself_has_failed(targets):
    _, (failure,) = run("one_leaves")
    assert (failure.rank, failure.error, failure.message) == (0, "SystemExit", "went home")


def test_ranks_that_are_still_running_at_the_limit_are_killed(targets):
    started = time.monotonic()
    _, failures = run("all_sleep", limit_s=6)
    assert time.monotonic() - started < 20
    assert [(failure.rank, failure.error) for failure in failures] == [(0, "Killed"), (1, "Killed")]
    assert failures[0].message == "it still ran after 6 s"


def test_a_process_that_does_not_end_after_its_work_is_a_failure(targets):
    _, (failure,) = run("does_not_end", num_ranks=1, ending_s=2)
    assert failure.message == "it had done its work, but its process did not end"


def test_a_process_that_crashes_after_its_work_is_a_failure(targets):
    _, (failure,) = run("crashes_at_exit", num_ranks=1)
    assert failure.message == "it had done its work, then its process was ended by SIGABRT"


def test_whatever_ranks_print_neither_blocks_nor_spoils_their_reports(targets, capfd):
    events, failures = run("prints", num_ranks=1)
    assert failures == ()
    assert [(kind, len(data["text"])) for _, kind, data in events] == [("large", 1_000_000)]
    assert capfd.readouterr().out == ""


def test_an_interrupt_ends_all_ranks(targets):
    def interrupt(rank, kind, data):
        raise KeyboardInterrupt

    with no_process_left(), pytest.raises(KeyboardInterrupt):
        launch("launch_targets:all_sleep", {}, 2, limit_s=60, on_event=interrupt)


def test_ranks_end_when_their_launcher_is_killed(targets):
    script = (
        "from eplb_core.bench.launch import launch\n"
        "launch('launch_targets:all_sleep', {}, 2, limit_s=60, on_event=lambda *event: print(event, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout.readline()
        assert launcher.stdout.readline()
        ranks = psutil.Process(launcher.pid).children()
        launcher.kill()
    assert len(ranks) == 2
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert alive == []
