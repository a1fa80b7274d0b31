"""A rearrangement in the background that fails: what every rank's next steps say, and that serving goes on."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

from eplb_core.balancing.promise import Operation
from eplb_core.balancing.vote_store import VoteStore
from eplb_core.errors import EplbError
from eplb_core.testing.faults import FaultInjector
from eplb_core.testing.ranks import Ranks, run_ranks
from tests.balancing.serving import Serving

PHASES = ("agree", "transfer", "wait", "landed", "vote", "tally")


def injected(rank, *faults):
    # Nobody knows beforehand who tallies, so there every rank fails that does.
    mine = [fault for at, fault in faults if rank.rank == at or fault["phase"] == "tally"]
    return [FaultInjector(name=f"fault {number}", **fault) for number, fault in enumerate(mine)]


def told(error):
    report = error.report
    return {
        "kind": type(error).__name__,
        "code": error.code,
        "text": str(error),
        "committed": report.committed_layers,
        "decided": report.decided_layers,
        "map": report.physical_to_logical_map.tolist(),
    }


def serve_until_raised(serving, limit_s=60):
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        serving.forward()
        try:
            serving.step()
        except EplbError as error:
            serving.map = serving.lb.physical_to_logical_map
            assert not serving.model.wrong_rows(serving.map)
            return told(error)
    raise AssertionError(f"nothing was raised: {serving.lb.status}")


# --- on_failure="raise" -----------------------------------------------------------------------------------------------


def raises_and_goes_on(rank, backend, fault):
    serving = Serving(rank, communicator=backend, observers=injected(rank, (1, fault)), meets=False)
    error = serve_until_raised(serving)
    before = len(serving.commits)
    if not serving.comm.usable:  # a backend that could not stop its transfers
        serving.comm.rebuild(20)
        serving.lb.adopt(serving.comm, serving.map)
    serving.serve_until(lambda: len(serving.commits) >= before + 4)
    outcome = error, serving.lb.status.num_failures <= 1, [layer for _, layer in serving.commits[before:][:4]]
    serving.close()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("torch_gloo", marks=pytest.mark.soak), "nixl"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_failure_is_raised_once_on_every_rank_and_the_next_interval_tries_again(backend, phase):
    fault = {"phase": phase, "action": "raise"} | ({} if phase == "agree" else {"layer": 1})
    outcomes = run_ranks(3, raises_and_goes_on, backend, fault, timeout_s=120)
    for error, once, layers in outcomes:
        assert error["kind"] == "TransferError"
        assert "InjectedFault" in error["text"]
        assert error["committed"] == (() if phase == "agree" else (0,))
        assert error == outcomes[0][0]
        assert once
        assert layers == outcomes[0][2]


def test_a_failure_is_raised_with_a_report_that_says_what_holds():
    fault = {"phase": "wait", "action": "raise", "layer": 2}
    outcomes = run_ranks(2, raises_and_goes_on, "torch_gloo", fault, timeout_s=120)
    error = outcomes[0][0]
    assert error["committed"] == (0, 1)
    assert error["code"] == "EPLB-T007"
    assert outcomes[1][0] == error


# --- on_failure="keep" ------------------------------------------------------------------------------------------------


def keeps(rank, backend, fallback, faults):
    serving = Serving(
        rank,
        communicator=backend,
        fallback=fallback,
        on_failure="keep",
        observers=injected(rank, *((1, fault) for fault in faults)),
        meets=False,
        timeout_s=10,
    )
    until = time.monotonic() + 80
    while (serving.lb.status.num_rearrangements < 1 or serving.lb.status.num_failures < len(faults)) and (
        time.monotonic() < until
    ):
        serving.serve(1)
    status = serving.lb.status
    outcome = status.num_failures, status.num_rearrangements >= 1, status.backend, serving.commits[:6], status.phase
    serving.close()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_failure_is_kept_quiet_and_the_next_interval_tries_again(phase):
    outcomes = run_ranks(3, keeps, "torch_gloo", None, [{"phase": phase, "action": "raise"}], timeout_s=120)
    for failures, rearranged, backend, commits, _ in outcomes:
        assert (failures, rearranged, backend) == (1, True, "torch_gloo")
        assert commits == outcomes[0][3]


def test_two_failures_in_a_row_fail_over_to_the_fallback_while_serving():
    faults = [{"phase": "wait", "action": "raise", "generation": number} for number in (1, 2)]
    outcomes = run_ranks(2, keeps, "nixl", "torch_gloo", faults, timeout_s=120)
    for failures, rearranged, backend, commits, _ in outcomes:
        assert (failures, rearranged, backend) == (2, True, "torch_gloo")
        assert commits == outcomes[0][3]


# --- a rank that dies, or stops ---------------------------------------------------------------------------------------


def survives(rank, backend, fault):
    serving = Serving(
        rank, experts=6, communicator=backend, observers=injected(rank, (2, fault)), meets=False, timeout_s=4
    )
    error = serve_until_raised(serving)
    serving.comm.rebuild(20, ranks=(0, 1))
    held = serving.comm.report.physical_to_logical_map
    serving.lb.adopt(serving.comm, held)
    serving.map = held
    assert not serving.model.wrong_rows(held)
    serving.commits.clear()
    serving.number, after = 0, None
    while not (serving.commits or after):
        serving.forward()
        try:
            serving.step()
        except EplbError as lost:  # an expert that only the dead rank had
            after = lost.code
    outcome = error, held.tolist(), serving.commits, after
    serving.lb.close()
    serving.comm.close(force=True)
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch_gloo", "nixl"])
@pytest.mark.parametrize("phase", ["transfer", "landed", "vote", "commit"])
def test_survivors_of_a_killed_rank_raise_know_the_same_and_go_on_without_it(backend, phase):
    fault = {"phase": phase, "action": "kill", "layer": 1}
    with Ranks(3, survives, backend, fault) as ranks:
        first, second, killed = ranks.join(120)
    assert killed.killed
    assert first.error is None, first.error
    assert second.error is None, second.error
    assert first.value[0]["kind"] == second.value[0]["kind"] == "PeerLostError"
    assert first.value[1:] == second.value[1:]
    assert first.value[3] in (None, "EPLB-P002")


@pytest.mark.slow
def test_a_stopped_rank_is_found_by_the_limit():
    fault = {"phase": "wait", "action": "stop", "layer": 1}
    with Ranks(3, survives, "torch_gloo", fault) as ranks:
        outcomes = ranks.join(120, without=(2,))
        ranks.signal(2, signal.SIGKILL)
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.error
        assert outcome.value[0]["kind"] in ("StalledError", "PeerLostError")
    assert outcomes[0].value[1:] == outcomes[1].value[1:]


# --- a worker that hangs or dies while its promise is open ------------------------------------------------------------


class Grip:
    """Takes hold of a worker at one operation of the promise protocol."""

    def __init__(self, verb, topic, action, nth=1):
        self.release = threading.Event()
        self.engine = threading.get_ident()
        execute, grip = VoteStore.execute, self
        grip.left = nth

        def gripped(votes, operation: Operation):
            here = (operation.verb, operation.topic) == (verb, topic)
            here = here and (topic != "decision" or votes.vote.balloted)  # not before its own promise
            if here and threading.get_ident() != grip.engine:
                grip.left -= 1
                if grip.left == 0:
                    action(grip)
            return execute(votes, operation)

        VoteStore.execute = gripped


def hang(grip):
    grip.release.wait(60)


def die(grip):
    raise SystemExit("the worker is gone")


def settles(rank, verb, topic, action):
    serving = Serving(rank, communicator="torch_gloo", timeout_s=3)
    grip = Grip(verb, topic, action) if rank.rank == 1 else None
    errors, left = [], 8
    while left:
        serving.forward()
        try:
            serving.step()
        except EplbError as error:
            errors.append(error.code)
        left -= all_done(serving, bool(errors))  # all ranks go on as long as one does: they meet in every pass
    status, commits = serving.lb.status, list(serving.commits)
    if grip is not None:
        grip.release.set()
    serving.meet("close")
    serving.lb.close()
    wrong = serving.model.wrong_rows(serving.lb.physical_to_logical_map)
    serving.comm.close(force=True)
    return commits, status.num_engine_settled, wrong, errors


def all_done(serving, done):
    import torch

    count = torch.tensor([1.0 if done else 0.0])
    serving.group.allreduce([count]).wait()
    return count.item() == serving.rank.world_size


@pytest.mark.slow
@pytest.mark.parametrize("action", [hang, die], ids=["hangs", "dies"])
def test_an_engine_whose_worker_does_not_come_back_aborts_the_layer_itself(action):
    (first, second) = run_ranks(2, settles, "set", "promise", action, timeout_s=120)
    assert first[0] == second[0] == []  # commits
    assert second[1] == (action is hang)  # settled by the engine; a worker that dies does so itself
    assert first[2] == second[2] == []  # wrong rows
    assert first[3] == (["EPLB-T002"] if action is hang else ["EPLB-T007"])
    assert second[3] == ["EPLB-T022"]


@pytest.mark.slow
@pytest.mark.parametrize("action", [hang, die], ids=["hangs", "dies"])
def test_an_engine_whose_worker_does_not_come_back_obeys_what_stands(action):
    """The worker has counted its promise, and does not look at the decision any more."""
    (first, second) = run_ranks(2, settles, "read", "decision", action, timeout_s=120)
    assert first[0] == second[0]  # committed at the same steps
    assert first[2] == second[2] == []
    assert second[3][0] == "EPLB-T022"


# --- calling off, and the end -----------------------------------------------------------------------------------------


def invalidates(rank, at, reload):
    serving = Serving(rank, communicator="torch_gloo")
    serving.serve_until(lambda: serving.commits)
    serving.serve(at)
    before = serving.map
    if reload:
        new = before[:, ::-1].copy()
        serving.model.fill(new)
        serving.lb.invalidate(new)
        before = serving.map = new
    else:
        serving.lb.invalidate()
    serving.meet("invalidated")
    assert (serving.lb.physical_to_logical_map == before).all()
    count = len(serving.commits)
    serving.serve_until(lambda: len(serving.commits) >= count + 5)
    outcome = before.tolist(), serving.commits, serving.lb.status.num_failures
    serving.close()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("at", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak), 3])
def test_what_is_invalidated_is_dropped_on_every_rank_alike_and_the_next_interval_comes(at, reload):
    outcomes = run_ranks(3, invalidates, at, reload, timeout_s=120)
    for outcome in outcomes:
        assert outcome == outcomes[0]
        assert outcome[2] == 0


def closes(rank, steps):
    serving = Serving(rank, communicator="torch_gloo", timeout_s=10)
    serving.serve(steps)
    serving.meet("close")
    began = time.monotonic()
    serving.lb.close()
    took_s = time.monotonic() - began
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("eplb-load")]
    held = serving.lb.physical_to_logical_map
    wrong = serving.model.wrong_rows(held)
    serving.lb.close()
    if not serving.comm.usable:  # a transfer was broken off
        serving.comm.rebuild(20)
    serving.comm.rearrange(held, np.roll(held, 1, axis=1))  # the communicator is the host's again
    wrong += serving.model.wrong_rows(np.roll(held, 1, axis=1))
    serving.comm.close()
    return took_s, threads, wrong, held.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps", [0, 20, 23, *(pytest.param(steps, marks=pytest.mark.soak) for steps in (19, 21, 26, 40, 47))]
)
def test_closing_takes_what_is_decided_and_leaves_no_thread(steps):
    outcomes = run_ranks(3, closes, steps, timeout_s=120)
    for took_s, threads, wrong, held in outcomes:
        assert took_s < 20
        assert threads == []
        assert not wrong
        assert held == outcomes[0][3]
