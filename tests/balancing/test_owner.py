"""Whose a load balancer is: one for a communicator, and nothing of it outlives its host."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

import eplb_core as eplb
from eplb_core.errors import PoisonedError
from eplb_core.testing.ranks import run_ranks
from tests.balancing.serving import Serving


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("eplb-load-balancer")]


def builds_a_second_one(rank):
    serving = Serving(rank, communicator="torch_gloo")
    with pytest.raises(eplb.EplbError) as caught:
        eplb.LoadBalancer(serving.config, serving.comm, serving.map, serving.experts)
    serving.serve(25)
    serving.meet("close the first")
    serving.lb.close()
    again = eplb.LoadBalancer(serving.config, serving.comm, serving.lb.physical_to_logical_map, serving.experts)
    serving.meet("close the second")
    again.close()
    serving.comm.close(force=True)
    return caught.value.code, str(caught.value)


def test_a_communicator_belongs_to_one_load_balancer_until_it_is_closed():
    for code, text in run_ranks(2, builds_a_second_one):
        assert code == "EPLB-C015"
        assert "belongs to another LoadBalancer" in text


def adopts(rank, times):
    """What one leaves half done in an epoch, a load that one rank posted say, does not reach the next."""
    serving = Serving(rank, communicator="torch_gloo", step_interval=10, window_size=5)
    moved = []
    for _ in range(times):
        serving.serve(23)
        serving.meet(f"adopt {len(moved)}")
        held = serving.lb.physical_to_logical_map
        try:
            serving.lb.adopt(serving.comm, held)
        except PoisonedError:  # a transfer was under way, which gloo can only break off
            serving.comm.rebuild(20)
            serving.lb.adopt(serving.comm, held)
        before = len(serving.commits)
        serving.serve_until(lambda: len(serving.commits) >= before + 2)  # noqa: B023 - called at once
        moved.append(serving.commits[before : before + 2])
    serving.close()
    return moved


def test_a_communicator_may_be_adopted_again_and_again():
    first, second = run_ranks(2, adopts, 3)
    assert first == second


def drops_it(rank):
    serving = Serving(rank, communicator="torch_gloo")
    serving.serve(45)
    serving.meet("drop")
    (worker,) = workers()
    del serving.lb
    gc.collect()
    worker.join(20)
    ended = not worker.is_alive()
    serving.comm.close(force=True)
    return ended


def test_the_worker_of_one_that_was_dropped_ends():
    assert run_ranks(2, drops_it) == [True, True]


SERVING = """
import os, sys, time
import numpy as np, torch, torch.distributed as dist
import eplb_core as eplb

store = dist.TCPStore("127.0.0.1", 0, is_master=True)
config = eplb.EPLBConfig(communicator="torch_gloo", step_interval=2, window_size=1)
weights = [[torch.zeros(4, 8)]]
communicator = eplb.Communicator(config, weights, eplb.ControlPlane.from_store(store, rank=0, world_size=1))
balancer = eplb.LoadBalancer(config, communicator, [[0, 1, 2, 3]], 4)
for _ in range(5):
    balancer.record(0, np.ones(4))
    balancer.step()
"""


def serve(then):
    return subprocess.run([sys.executable, "-c", SERVING + then], capture_output=True, text=True, timeout=60)


def test_a_host_that_fails_without_closing_it_ends_with_its_own_error():
    ended = serve('raise ArithmeticError("the host fails")')
    assert ended.returncode == 1
    assert "the host fails" in ended.stderr


FORKING = """
for _ in range(5):  # at whatever the worker holds just then
    balancer.step()
    child = os.fork()
    if child == 0:
        try:
            balancer.step()
        except eplb.EplbError as error:
            balancer.close()
            sys.exit(0 if error.code == "EPLB-T013" else 3)
        sys.exit(4)
    ended, status = 0, 0
    until = time.monotonic() + 10
    while not ended and time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(1e-3)
    assert (ended, os.waitstatus_to_exitcode(status)) == (child, 0)
balancer.step()
balancer.close()
communicator.close()
print("served on")
"""


@pytest.mark.slow
def test_a_forked_child_is_refused_and_ends_and_its_parent_serves_on():
    ended = serve(FORKING)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "served on\n"


INTERRUPTED = """
def once(owner, name):
    method = getattr(owner, name)
    def interrupted(*arguments, **more):
        setattr(owner, name, method)
        raise KeyboardInterrupt
    setattr(owner, name, interrupted)

for owner, name in [(balancer._worker, "join"), (balancer._engine, "commit_all"), (balancer._core, "leave")]:
    once(owner, name)
    try:
        balancer.close()
        sys.exit(3)
    except KeyboardInterrupt:
        pass
balancer.close()
eplb.LoadBalancer(config, communicator, balancer.physical_to_logical_map, 4).close()
communicator.close()
print("closed")
"""


def test_a_close_that_was_interrupted_is_taken_up_again():
    ended = serve(INTERRUPTED)
    assert ended.stdout == "closed\n", ended.stderr
    assert ended.returncode == 0


LEAVING_INTERRUPTED = """
def interrupted(*arguments, **more):
    raise KeyboardInterrupt

balancer._core.watch.decide = interrupted
try:
    balancer.close()
except KeyboardInterrupt:
    print(communicator.usable, communicator.poisoned.code)
communicator.close(force=True)
"""


def test_a_communicator_is_to_be_rebuilt_when_bringing_the_members_together_was_interrupted():
    ended = serve(LEAVING_INTERRUPTED)
    assert ended.stdout == "False EPLB-T021\n", ended.stderr
