"""Rearranging while the model serves: what every rank sees, step by step."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.testing.ranks import run_ranks
from tests.balancing.serving import Serving

BACKENDS = ("torch_gloo", "nixl")


def serves(rank, commits, steps, fields):
    """Serve until so many layers were committed, and at least so many steps."""
    serving = Serving(rank, **fields)
    serving.serve_until(lambda: len(serving.commits) >= commits and serving.number >= steps)
    outcome = serving.outcome()
    serving.close()
    return outcome | {"threads": [t.name for t in threading.enumerate() if t.name.startswith("eplb-load")]}


def assert_in_step(outcomes):
    """Every layer was committed at the same step on all ranks, and no engine talked with the store."""
    first = outcomes[0]
    for outcome in outcomes:
        assert outcome["commits"] == first["commits"]
        assert outcome["map"] == first["map"]
        assert outcome["store_calls"] == outcome["settled"] == outcome["failures"] == 0
        assert outcome["threads"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_move_at_the_same_step_on_all_ranks_and_no_byte_is_ever_wrong(backend):
    outcomes = run_ranks(3, serves, 12, 0, {"communicator": backend})
    assert_in_step(outcomes)
    assert outcomes[0]["offset"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_four_ranks_of_random_pace_stay_in_step_for_500_steps(backend):
    outcomes = run_ranks(4, serves, 20, 500, {"communicator": backend, "longest_s": 0.05}, timeout_s=150)
    assert_in_step(outcomes)
    waits = [(outcome["waits"], outcome["longest_wait_s"]) for outcome in outcomes]
    print(f"\n{backend}: {len(outcomes[0]['commits'])} commits, waits at promises {waits}")
    assert max(longest for _, longest in waits) < 5


def test_ranks_that_do_not_meet_in_their_passes_commit_at_the_same_step_all_the_same():
    outcomes = run_ranks(3, serves, 5, 0, {"communicator": "torch_gloo", "meets": False})
    assert_in_step(outcomes)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_landing_slot_is_enough(backend, slots):
    outcomes = run_ranks(2, serves, 9, 0, {"communicator": backend, "staging_layers": slots})
    assert_in_step(outcomes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_worker_all_layers_move_at_the_interval(backend):
    outcomes = run_ranks(2, serves, 9, 0, {"communicator": backend, "use_async": False})
    for outcome in outcomes:
        assert outcome["commits"] == outcomes[0]["commits"]
        assert {step % 20 for step, _ in outcome["commits"]} == {0}


def watches(rank, fields):
    """What the host's callback sees, and when."""
    seen = []

    def on_commit(layer, old_row, new_row):
        map_now = serving.lb.physical_to_logical_map
        assert (map_now[layer] == new_row).all()
        assert (old_row != new_row).any()
        assert not serving.model.wrong_rows(map_now)
        seen.append((serving.number, layer))

    serving = Serving(rank, on_commit=on_commit, **fields)
    serving.serve_until(lambda: len(serving.commits) >= 5)
    commits = list(serving.commits)
    serving.close()
    return seen[: len(commits)], commits


@pytest.mark.parametrize("use_async", [True, False])
def test_the_host_is_told_of_a_layer_once_its_weights_and_map_have_changed(use_async):
    for seen, commits in run_ranks(2, watches, {"communicator": "torch_gloo", "use_async": use_async}):
        assert seen == commits
        assert seen


def raises_in_callback(rank, fields):
    def on_commit(layer, old_row, new_row):
        raise ArithmeticError(f"layer {layer}")

    serving = Serving(rank, on_commit=on_commit, **fields)
    raised = []
    while len(raised) < 2:
        serving.forward()
        try:
            serving.step()
        except ArithmeticError as error:
            raised.append((serving.number, str(error)))
            serving.map = serving.lb.physical_to_logical_map
            assert not serving.model.wrong_rows(serving.map)
    serving.meet("close")
    with contextlib.suppress(ArithmeticError):
        serving.lb.close()
    serving.comm.close()
    return raised


@pytest.mark.parametrize("use_async", [True, False])
def test_what_the_callback_raises_leaves_that_very_step_after_the_layer_is_committed(use_async):
    outcomes = run_ranks(2, raises_in_callback, {"communicator": "torch_gloo", "use_async": use_async})
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0][1].startswith("layer ")


def drops_dummies(rank):
    serving = Serving(rank, communicator="torch_gloo", step_interval=10)
    for _ in range(30):
        serving.forward()
        serving.lb.step(is_dummy=rank.rank == 1)
    serving.meet("placed")
    status = serving.lb.status
    serving.close()
    return status.step


def test_dummy_steps_count_as_steps():
    assert run_ranks(2, drops_dummies) == [30, 30]


def stays_even(rank):
    serving = Serving(rank, communicator="torch_gloo", use_async=False, step_interval=10)
    for _ in range(35):
        for layer in range(4):
            serving.lb.record(layer, np.full(serving.map.shape[1], 7))
        serving.group.allreduce([torch.zeros(1)]).wait()
        serving.step()
    placement = serving.lb.status.placement
    outcome = serving.commits, placement.num_moved_layers, placement.balancedness_before
    serving.close()
    return outcome


def test_nothing_moves_when_nothing_is_gained():
    assert run_ranks(2, stays_even) == [([], 0, 1.0)] * 2


def logs_balancedness(rank, use_async):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("eplb_core")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    serving = Serving(
        rank, communicator="torch_gloo", use_async=use_async, log_balancedness=True, log_balancedness_interval=7
    )
    serving.serve_until(lambda: len(serving.commits) >= 5)
    serving.serve(40)
    serving.close()
    said = [line for line in lines if "balancedness" in line and "step" in line and "default: step" in line]
    return [int(line.split("step ")[1].split(":")[0]) for line in said]


@pytest.mark.parametrize("use_async", [True, False])
def test_balancedness_is_logged_at_its_interval_by_one_rank_from_the_load_that_is_known(use_async):
    first, second = run_ranks(2, logs_balancedness, use_async)
    assert second == []
    assert len(first) >= 5
    assert {step % 7 for step in first} == {0}
    assert min(first) >= 20  # nothing is known before the first interval


def records_nonsense(rank):
    serving = Serving(rank, communicator="torch_gloo")
    slots = serving.map.shape[1]
    bad = [(0, np.ones(slots - 1)), (99, np.ones(slots)), (-1, np.ones(slots)), (0, np.ones(slots, complex)), (0, "x")]
    refused = []
    for _ in range(20):  # in steps whose load counts, and in those before
        for layer, counts in bad:
            try:
                serving.lb.record(layer, counts)
            except eplb.EplbError as error:
                refused.append(error.code)
        serving.forward()
        serving.step()
    serving.close()
    return refused


def test_what_are_no_counts_is_refused_in_every_step_whether_its_load_counts_or_not():
    assert run_ranks(2, records_nonsense) == [["EPLB-P010"] * 100] * 2


def steps_within_a_step(rank):
    refused = []

    def on_commit(layer, old_row, new_row):
        with pytest.raises(eplb.EplbError) as caught:
            serving.lb.step()
        refused.append(caught.value.code)

    serving = Serving(rank, communicator="torch_gloo", on_commit=on_commit)
    serving.serve_until(lambda: len(serving.commits) >= 3)
    while_serving = set(refused)
    serving.close()
    return while_serving


def test_a_step_within_a_step_is_refused():
    assert run_ranks(2, steps_within_a_step) == [{"EPLB-P004"}] * 2


def moves_slowly(rank, gbps):
    serving = Serving(rank, communicator="torch_gloo", nbytes=(1 << 20,), max_bandwidth_gbps=gbps, timeout_s=30)
    serving.serve_until(lambda: serving.commits)
    began = time.monotonic()
    serving.serve_until(lambda: len(serving.commits) >= 4)
    seconds = time.monotonic() - began
    serving.close()
    return seconds


def test_bandwidth_is_limited_between_layers():
    """The four layers of the first rearrangement, up to 3 MiB each: 24 Mbit a layer at 40 Mbit/s."""
    assert min(run_ranks(2, moves_slowly, 0.04)) > 3 * 0.2
    assert max(run_ranks(2, moves_slowly, None)) < 3 * 0.2


def idles(rank, seconds):
    serving = Serving(rank, communicator="torch_gloo", timeout_s=1)
    serving.serve_until(lambda: serving.commits)  # the first layers are committed, others are on their way
    time.sleep(seconds)
    serving.serve_until(lambda: len(serving.commits) >= 8)
    outcome = serving.outcome()
    serving.close()
    return outcome | {"threads": []}


def test_engines_that_all_idle_for_longer_than_any_limit_go_on_where_they_were():
    assert_in_step(run_ranks(2, idles, 4.0))
