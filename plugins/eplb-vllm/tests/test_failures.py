"""A rearrangement that fails under the real ``EplbState``: nothing is wrong, all ranks agree, and it goes on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import on_cpu  # noqa: E402

if not on_cpu.is_there():
    pytest.skip(on_cpu.SKIP, allow_module_level=True)

import faults  # noqa: E402

import engine as engines  # noqa: E402
from eplb_core.testing import FaultInjector  # noqa: E402

LIMIT_S = 1.5
OURS = {"communicator": "nixl", "timeout_s": LIMIT_S}


@pytest.fixture(scope="module", autouse=True)
def vllm():
    on_cpu.stand_in_for_an_accelerator()
    import eplb_vllm

    eplb_vllm.register()


def result(engine, **more):
    return {
        "wrong": engine.wrong,
        "maps": engine.maps,
        "changed": engine.changed(),
        "lives": engine.worker_lives(),
        **more,
    }


def check(ranks):
    assert [rank["wrong"] for rank in ranks] == [0] * len(ranks)
    assert all(rank["maps"] == ranks[0]["maps"] for rank in ranks), "ranks have different maps"
    assert all(rank["lives"] for rank in ranks), "vLLM's worker thread is dead"


def fail_once(rank, world, port, core, use_async, phase, action, delay_s=0.0):
    fault = None
    if rank == 1:
        fault = FaultInjector(phase, action, generation=2, layer=None if phase == "agree" else 1, delay_s=delay_s)
    config = engines.configuration(core, use_async=use_async)
    with engines.groups(rank, world, port, config), faults.injected(fault):
        engine = engines.Engine(config, rank, world)
        engine.start()
        longest = faults.serve(engine, 40)
        if use_async:  # the cycle is over on every rank before it is looked at what came after it
            longest = max(longest, faults.serve(engine, 60, pause_s=3 * LIMIT_S / 60))
        before = engine.changed()
        faults.serve(engine, 60)
        stats = engine.communicator().stats.snapshot()
        acted = fault.acted if fault is not None else None
        return result(engine, acted=acted, before=before, longest=longest, aborts=stats.aborts)


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("phase", ["agree", "transfer", "wait", "landed", "vote"])
def test_a_failure_in_any_phase_costs_one_rearrangement_and_nothing_else(phase, use_async):
    ranks = on_cpu.run(2, fail_once, 2, on_cpu.free_port(), OURS, use_async, phase, "raise")
    check(ranks)
    assert ranks[1]["acted"]
    assert all(rank["changed"] > rank["before"] > 0 for rank in ranks), "it did not go on"


@pytest.mark.parametrize("phase", ["agree", "transfer", "vote"])
def test_a_late_rank_costs_one_rearrangement_and_keeps_no_forward_waiting(phase):
    core = {**OURS, "communicator": "torch_gloo"}
    ranks = on_cpu.run(2, fail_once, 2, on_cpu.free_port(), core, True, phase, "delay", 2 * LIMIT_S)
    check(ranks)
    assert all(rank["changed"] > rank["before"] > 0 for rank in ranks), "it did not go on"
    assert max(rank["longest"] for rank in ranks) < LIMIT_S / 2


def stopped(rank, world, port, pids):
    config = engines.configuration(OURS, use_async=True)
    with engines.groups(rank, world, port, config):
        engine = engines.Engine(config, rank, world)
        engine.start()
        faults.serve(engine, 20)
        pids[rank] = os.getpid()
        if rank == 0:
            while not pids[1]:
                time.sleep(0.01)
            waker = threading.Timer(2 * LIMIT_S, os.kill, (pids[1], signal.SIGCONT))
            waker.start()
            os.kill(pids[1], signal.SIGSTOP)
        faults.serve(engine, 40)
        faults.serve(engine, 60, pause_s=2 * LIMIT_S / 60)
        before = engine.changed()
        faults.serve(engine, 60)
        return result(engine, before=before)


def test_a_process_that_is_stopped_for_longer_than_the_limit_comes_back_to_the_same_map():
    import multiprocessing

    ranks = on_cpu.run(2, stopped, 2, on_cpu.free_port(), multiprocessing.Array("i", 2))
    check(ranks)
    assert all(rank["changed"] > rank["before"] > 0 for rank in ranks), "it did not go on"


def fail_often(rank, world, port):
    phases = ("transfer", "wait", "landed", "vote", "agree", "transfer")
    mine = [
        FaultInjector(
            phase, "delay" if number == 5 else "raise", number + 1, None, delay_s=2 * LIMIT_S, name=str(number)
        )
        for number, phase in enumerate(phases)
        if number % world == rank
    ]
    config = engines.configuration(OURS, use_async=True, step_interval=3)
    with engines.groups(rank, world, port, config), faults.injected(*mine):
        engine = engines.Engine(config, rank, world, layers=5, redundant=6)
        engine.start()
        faults.serve(engine, 150)
        faults.serve(engine, 60, pause_s=3 * LIMIT_S / 60)
        before = engine.changed()
        faults.serve(engine, 60)
        return result(engine, before=before, acted=sum(fault.acted for fault in mine))


def test_failures_one_after_another_where_the_next_rearrangement_starts_in_the_same_step():
    ranks = on_cpu.run(3, fail_often, 3, on_cpu.free_port())
    check(ranks)
    assert sum(rank["acted"] for rank in ranks) >= 4
    assert all(rank["changed"] > rank["before"] > 0 for rank in ranks), "it did not go on"


def stop_the_engine(rank, world, port):
    config = engines.configuration({**OURS, "on_failure": "raise"}, use_async=True)
    fault = FaultInjector("transfer", "raise", generation=1) if rank == 1 else None
    with engines.groups(rank, world, port, config), faults.injected(fault):
        engine = engines.Engine(config, rank, world)
        engine.start()
        try:
            faults.serve(engine, 400)
        except Exception as error:
            return str(error), engine.wrong
    return None, engine.wrong


def test_on_failure_raise_stops_the_engine_on_every_rank_with_the_reason():
    for said, wrong in on_cpu.run(2, stop_the_engine, 2, on_cpu.free_port()):
        assert "injected in transfer" in said
        assert wrong == 0


def lose_its_own(rank, world, port):
    """Fail once in vLLM's own transfer, without the key."""
    config = engines.configuration(None, use_async=True)
    with engines.groups(rank, world, port, config):
        engine = engines.Engine(config, rank, world)
        engine.start()
        if rank == 1:
            faults.fail_its_own(engine.communicator(), at=5)
        faults.serve(engine, 60)
        before = engine.changed()
        faults.serve(engine, 100)
        return result(engine, before=before, name=type(engine.communicator()).__name__)


def test_beside_it_vllm_alone_never_rearranges_again_after_a_failure():
    ranks = on_cpu.run(2, lose_its_own, 2, on_cpu.free_port())
    assert {rank["name"] for rank in ranks} == {"TorchDistGlooStagedEplbCommunicator"}
    assert not ranks[1]["lives"]
    assert ranks[0]["changed"] == ranks[0]["before"]
