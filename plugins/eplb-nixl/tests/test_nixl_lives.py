"""What a host does around a backend: forks, signals, weights taken away, retries after a failure, the end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eplb_core.backend import Buffers
from eplb_core.memory.staging import TorchStaging
from eplb_nixl.backend import NixlBackend
from eplb_nixl.options import NixlOptions


@pytest.mark.parametrize("mode", ["zero_copy", "staged"])
def test_after_a_generation_that_ranks_began_unequally_far_the_next_one_is_exact(run, mode):
    for said in run("given_up_on_one_rank", 2, options={"mode": mode}):
        assert all(said["drained"])
        assert said["wrong"] == 0
        assert said.line("wrong")["seconds"] < 5


def test_a_source_that_numbers_transfers_otherwise_is_refused_at_once_and_never_read(run):
    for number, said in enumerate(run("counted_differently", 2)):
        assert said["code"] == "EPLB-T001"
        assert said["text"].startswith("NIXL transfer failed with state=REFUSED reading layer 0 from rank")
        assert f"this rank's plan has transfer {(1 << 32) + number} in send buffer {number}" in said["text"]
        assert said.line("code")["seconds"] < 5
        assert said["untouched"] is True
        assert said["drained"] is True
        assert said["closed"] is True


@pytest.mark.parametrize("closes", [False, True], ids=["it exits", "it uses and closes what it inherited"])
def test_a_forked_child_ends_as_a_program_does_and_the_parents_agent_goes_on(run, closes):
    first, second = run("forked", 2, closes=closes)
    assert first["child"] == (7 if closes else 0)
    for said in (first, second):
        assert said["wrong"] == 0
        assert said["closed"] is True


@pytest.mark.parametrize("mode", ["zero_copy", "staged"])
def test_a_storage_that_the_host_freed_is_named_and_crashes_nobody(request, mode):
    for environment in ("team_by_default", "team_over_tcp"):
        team = request.getfixturevalue(environment)
        source, reader = team.run("memory_taken_away", 2, options={"mode": mode})
        assert source["code"] == "EPLB-M001"
        assert source["text"].startswith("Tensor layer 0 tensor 0 cannot be registered: the memory that was registered")
        assert reader["code"] in {"EPLB-T001", "EPLB-T002"}
        assert source["lives"]
        assert reader["lives"]


def test_a_backend_can_be_closed_while_it_connects(run):
    first, second = run("closed_while_connecting", 2)
    assert (first["closed"], second["closed"]) == (True, True)
    assert second.line("waiting")["seconds"] < 1


SIGNALS = """
import ctypes, os, signal, sys, threading

class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_ulong * 16), ("flags", ctypes.c_int)]
    _fields_ += [("restorer", ctypes.c_void_p)]

def dispositions():
    found = {}
    for number in map(int, signal.valid_signals()):
        action = Action()
        if ctypes.CDLL(None).sigaction(number, None, ctypes.byref(action)) == 0:
            found[number] = (action.handler, action.flags & ~0x04000000)  # SA_RESTORER comes with every set
    return found

heard = []
if "hangup" in sys.argv:
    signal.signal(signal.SIGHUP, lambda number, frame: heard.append(number))
before = dispositions()
from eplb_nixl.agent import Agent
from eplb_nixl.library import load_library

def live():
    agent = Agent(load_library(), "eplb-test-signals")
    agent.close()

live()
thread = threading.Thread(target=live)
thread.start()
thread.join()
after = dispositions()
assert before == after, [number for number in before if before[number] != after[number]]
if "hangup" in sys.argv:
    os.kill(os.getpid(), signal.SIGHUP)
    assert heard == [signal.SIGHUP]
print("unchanged")
"""


@pytest.mark.parametrize("errors", [None, "bt"], ids=["as UCX comes", "UCX told to handle errors"])
@pytest.mark.parametrize("host", ["hangup", "none"], ids=["a host that hears SIGHUP", "a host that set nothing"])
def test_no_signal_is_taken_from_the_host(host, errors):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    environment |= {"UCX_HANDLE_ERRORS": errors} if errors else {}
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS, host], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unchanged" in done.stdout


def test_a_host_that_was_not_asked_ends_on_sighup_as_ever():
    code = f"{SIGNALS}\nos.kill(os.getpid(), signal.SIGHUP)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGHUP, done.stdout + done.stderr


@pytest.mark.parametrize("mode", ["zero_copy", "staged"])
def test_close_itself_lets_go_of_weights_and_landing_memory_without_a_collection(mode):
    arrays = [np.zeros((4, 64), np.uint8), np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)]
    held = [weakref.ref(array) for array in arrays]
    rows, *landing = map(torch.from_numpy, arrays)
    del arrays
    context = SimpleNamespace(
        rank=0,
        world_size=2,
        members=(0, 1),
        epoch=1,
        name="released",
        device=torch.device("cpu"),
        stream=None,
        staging=TorchStaging(torch.device("cpu")),
        staging_layers=2,
        cancelled=lambda: None,
    )
    gc.collect()
    gc.disable()
    try:
        backend = NixlBackend(NixlOptions(mode=mode), context)
        backend.register_buffers(Buffers([[rows]], landing, None, rows.numel()))
        del rows, landing
        assert all(array() is not None for array in held)
        assert backend.close()
        assert [array() is None for array in held] == [True] * 3
    finally:
        gc.enable()
