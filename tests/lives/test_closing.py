"""The end of a communicator: closed in the middle of something, forked, dropped; and what is kept or given back."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import eplb_core as eplb
from eplb_core.errors import EplbError
from eplb_core.hookspecs import hookimpl
from eplb_core.testing.faults import FaultInjector
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from tests.support.backends import BackendCase, case_config, case_options
from tests.support.lives import (
    AT_ONCE_S,
    LAYERS,
    NUM_ROWS,
    Life,
    all_refused,
    all_went_well,
    at,
    over_gloo_and_nixl,
    over_gloo_and_nixl_tcp,
    over_nixl,
    same_bytes_as_claimed,
    use_lingering_backend,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIMIT_S = 6.0
TIMEOUT_S = 2.0


# --- in the middle of a commit ----------------------------------------------------------------------------------------


class BetweenTheCopies(TorchFunctionMode):
    """Acts once, in the middle of a commit: when the first copy into these live weights is done."""

    def __init__(self, model: Model, act: Callable[[], None]) -> None:
        super().__init__()
        self.acted = False
        self._act = act
        self._live = {tensor.untyped_storage().data_ptr() for layer in model.weights for tensor in layer}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        written = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
        if not self.acted and "copy" in getattr(func, "__name__", ""):
            tensors = [each for each in written if isinstance(each, torch.Tensor)]
            if any(each.untyped_storage().data_ptr() in self._live for each in tensors):
                self.acted = True
                self._act()
        return result


def closed_between_the_copies(rank: Rank, call: str, closer: str, force: bool):
    """Every layer swaps rows within the ranks as well as between them, so half a commit is no placement at all."""
    old = np.arange(2 * NUM_ROWS)[None].repeat(2, axis=0)
    new = np.array([[1, 0, 4, 5, 2, 3, 7, 6]]).repeat(2, axis=0)
    life = Life(rank, "torch_gloo", old, layers=[[4096, 24]] * 2, timeout_s=TIMEOUT_S)
    life.connect()
    told: list[tuple[str, float]] = []
    threads: list[threading.Thread] = []

    def close() -> None:
        started = time.monotonic()
        try:
            life.comm.close(force=force)
            code = ""
        except EplbError as error:
            code = error.code
        except Exception as error:
            code = type(error).__name__
        told.append((code, time.monotonic() - started))

    def act() -> None:
        if closer == "signal handler":
            signal.raise_signal(signal.SIGUSR1)
        else:
            threads.append(threading.Thread(target=close))
            threads[0].start()
            threads[0].join(0.3)

    signal.signal(signal.SIGUSR1, lambda *_: close())
    between = BetweenTheCopies(life.model, act if rank.rank == 0 else lambda: None)
    if call == "rearrange":
        with between:
            life.rearrange("rearrange", new)
    else:
        gen = life.comm.begin(old, new)
        for layer in gen.layers:
            life.do(f"stage {layer}", gen.stage, layer)

        def commit() -> None:
            gen.commit(0)
            for thread in threads:  # which goes on to commit layer 1: rows are looked at when it has ended
                thread.join(30)

        with between:
            life.do("commit 0", commit)
        life.do("commit 1", gen.commit, 1)
        life.do("end", gen.end)
    for thread in threads:
        thread.join(30)
    return between.acted, told, life.end()


@pytest.mark.parametrize("force", [False, True], ids=["close", "close by force"])
@pytest.mark.parametrize("closer", ["signal handler", "thread"])
@pytest.mark.parametrize("call", ["commit", "rearrange"])
def test_closing_in_the_middle_of_a_commit_waits_or_is_refused(call: str, closer: str, force: bool) -> None:
    """Row 8."""
    results = run_ranks(2, closed_between_the_copies, call, closer, force)
    stories = [story for _, _, story in results]
    assert [acted for acted, _, _ in results] == [True, True]
    assert all(step.went_well or step.refused for story in stories for step in story), stories
    ((code, seconds),) = results[0][1]
    assert code == "" or code.startswith("EPLB-"), code
    same_bytes_as_claimed(*stories)
    assert seconds < TIMEOUT_S + 2
    assert results[1][1] == []


# --- forks ------------------------------------------------------------------------------------------------------------


def has_a_helper(rank: Rank, backend: str):
    """Rank 1 forks a helper, which lives on, and is killed in its next wait."""
    maps = shuffles(3, 3, 2, NUM_ROWS)
    observers = [FaultInjector("wait", "kill", generation=2)] if rank.rank == 1 else []
    life = Life(rank, backend, maps[0], timeout_s=6.0, observers=observers)
    life.connect()
    life.rearrange("first", maps[1])
    if rank.rank == 1:
        helper = os.fork()
        if helper == 0:
            signal.alarm(60)
            signal.pause()
            os._exit(0)
        rank.tell(helper)
    life.rearrange("one dies", maps[2])
    return life.end()


@over_gloo_and_nixl_tcp
def test_a_killed_rank_is_missed_at_once_although_a_helper_that_it_forked_lives_on(backend: BackendCase) -> None:
    """Row 9."""
    with Ranks(2, has_a_helper, backend.name, env=backend.env) as ranks:
        helper = ranks.hear(1, 30)
        try:
            outcome = ranks.join(40, without=(1,))[0]
        finally:
            os.kill(helper, signal.SIGKILL)
    assert outcome.error is None, outcome.error
    same_bytes_as_claimed(outcome.value)
    (dies,) = at("one dies", outcome.value)
    assert dies.kind == "PeerLostError", dies
    assert dies.seconds < AT_ONCE_S


def forks_and_exits(number: int, port: int, backend: str) -> None:
    """Be one of two ranks, as a program of its own; rank 0 forks a process that ends with sys.exit, as programs do."""
    torch.set_num_threads(1)
    maps = shuffles(4, 3, 2, NUM_ROWS)
    life = Life(Rank(number, 2, port, None), backend, maps[0], timeout_s=6.0)
    life.connect()
    life.rearrange("first", maps[1])
    child_ended = True
    if number == 0:
        child = os.fork()
        if child == 0:
            sys.exit(0)
        until = time.monotonic() + 10
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                child_ended = False
                break
            time.sleep(0.01)
    life.rearrange("second", maps[2])
    life.rearrange("third", maps[3])
    life.end()
    print(json.dumps([child_ended, [[step.name, step.code, step.wrong, step.text] for step in life.steps]]))


@pytest.mark.slow
@over_nixl
def test_a_forked_process_that_exits_leaves_its_parents_transport_as_it_is(backend: BackendCase) -> None:
    """Row 9: the interpreter of the child finalises what it inherited."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = "import sys; from tests.lives.test_closing import forks_and_exits as run; "
    program += "run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(number), str(store.port), backend.name],
            cwd=ROOT,
            env={**os.environ, **backend.env},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    for output in outputs:
        child_ended, steps = json.loads(output.strip().splitlines()[-1])
        assert child_ended
        for name, code, wrong, text in steps:
            assert (code, wrong) == ("", []), (name, text)


# --- memory that may still be written ---------------------------------------------------------------------------------


class LandingMemory:
    """Weak references to the landing memory of every epoch, as the backend is given it."""

    name = "landing memory"

    def __init__(self) -> None:
        self.epochs: list[list[weakref.ref]] = []

    @hookimpl(wrapper=True)
    def register_buffers(self, buffers):
        self.epochs.append([weakref.ref(slot.untyped_storage()) for slot in buffers.landing])
        return (yield)

    def alive(self, epoch: int) -> list[bool]:
        return [slot() is not None for slot in self.epochs[epoch]]


def with_a_transfer_in_flight(life: Life, old, new) -> None:
    """Leave a generation open: layer 0 staged, layer 1 on its way."""
    gen = life.comm.begin(old, new)
    life.do("stage 0", gen.stage, 0)


def rebuilds_over_the_hosts_landing(rank: Rank):
    use_lingering_backend()
    maps = shuffles(3, 3, 2, NUM_ROWS)

    def landing():
        return [[torch.empty(NUM_ROWS, nbytes, dtype=torch.uint8) for nbytes in LAYERS[0]] for _ in range(2)]

    life = Life(rank, "lingering", maps[0], landing=landing())
    life.rearrange("first", maps[1])
    with_a_transfer_in_flight(life, maps[1], maps[2])
    life.do("over the old landing", life.comm.rebuild, LIMIT_S)
    life.do("with a new one", life.comm.rebuild, LIMIT_S, landing=landing())
    life.rearrange("go on", maps[0])
    return life.end()


def test_landing_memory_of_the_hosts_that_may_still_be_written_is_not_used_again() -> None:
    """Row 11: what the backend's close says is not overruled because a generation was open."""
    stories = run_ranks(2, rebuilds_over_the_hosts_landing)
    refused = at("over the old landing", *stories)
    assert {step.code for step in refused} == {"EPLB-T009"}, refused
    all_went_well(at("with a new one", *stories))
    all_went_well(at("go on", *stories))
    same_bytes_as_claimed(*stories)


def closes_with_a_transfer_in_flight(rank: Rank, force: bool):
    use_lingering_backend()
    maps = shuffles(3, 3, 2, NUM_ROWS)
    memory = LandingMemory()
    life = Life(rank, "lingering", maps[0], observers=[memory])
    with_a_transfer_in_flight(life, maps[0], maps[1])
    life.do("close", life.comm.close, force=force)
    steps = life.steps
    del life
    gc.collect()
    return memory.alive(0), steps


@pytest.mark.parametrize("force", [False, True], ids=["close", "close by force"])
def test_landing_memory_that_may_still_be_written_outlives_the_communicator(force: bool) -> None:
    """Row 11."""
    results = run_ranks(2, closes_with_a_transfer_in_flight, force)
    all_went_well(at("close", *(story for _, story in results)))
    assert [alive for alive, _ in results] == [[True, True]] * 2
    same_bytes_as_claimed(*(story for _, story in results))


def quarantined_then_dropped(rank: Rank, in_order: bool):
    """Layer 0 is refused while layer 1 is on its way; the rebuild quarantines; then the communicator is dropped."""
    use_lingering_backend()
    maps = shuffles(3, 3, 2, NUM_ROWS)
    memory = LandingMemory()
    faults = [FaultInjector("vote", "raise", generation=1, layer=0)] if rank.rank == 1 else []
    life = Life(rank, "lingering", maps[0], observers=[memory, *faults])
    life.rearrange("refused", maps[1])
    life.do("rebuild", life.comm.rebuild, LIMIT_S)
    quarantined = life.comm.report.quarantined_nbytes
    life.rearrange("go on", maps[2])
    steps = life.steps
    if in_order:
        life.do("close", life.comm.close)
    del life
    gc.collect()
    return quarantined, memory.alive(0), steps


@pytest.mark.parametrize("in_order", [True, False], ids=["closed", "only dropped"])
def test_quarantined_memory_outlives_the_communicator(in_order: bool) -> None:
    """Row 11, and I11: until the process ends."""
    results = run_ranks(2, quarantined_then_dropped, in_order)
    stories = [story for _, _, story in results]
    same_bytes_as_claimed(*stories)
    all_refused(at("refused", *stories))
    all_went_well(at("go on", *stories))
    for quarantined, alive, _ in results:
        assert quarantined > 0
        assert alive == [True, True]


# --- nothing is left --------------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def rebuilds_often(rank: Rank, backend: str, warm_up: int, rounds: int):
    """Count open files, without a collection in between, and keys, while nobody does anything."""
    maps = shuffles(2, 3, 2, NUM_ROWS)
    counting = rank.store()
    life = Life(rank, backend, maps[0], timeout_s=20.0)
    life.rearrange("first", maps[1])
    seen = []
    gc.collect()
    gc.disable()
    for number in range(1, rounds + 1):
        life.do("rebuild", life.comm.rebuild, 20.0)
        if number in (warm_up, rounds):
            rank.tell("counting")
            rank.listen()
            seen.append((descriptors(), counting.num_keys()))
            rank.tell("counted")
            rank.listen()
    gc.enable()
    life.rearrange("last", maps[0])
    return seen, [*life.end()[-3:], *(step for step in life.steps if not step.went_well)]


def check_that_rebuilds_leave_nothing(backend: BackendCase, warm_up: int, rounds: int) -> None:
    with Ranks(2, rebuilds_often, backend.name, warm_up, rounds, env=backend.env) as ranks:
        for note in ("counting", "counted") * 2:
            assert [ranks.hear(number, 120) for number in range(2)] == [note] * 2
            for number in range(2):
                ranks.tell(number, "go on")
        results = ranks.values(60)
    for seen, story in results:
        print(f"\n{backend.name}: descriptors and keys after {warm_up} and after {rounds} rebuilds: {seen}")
        same_bytes_as_claimed(story)
        assert all(step.went_well for step in story), story
        (fds_before, keys_before), (fds_after, keys_after) = seen
        assert fds_after <= fds_before + 2, seen
        assert keys_after <= keys_before, seen


@pytest.mark.slow
def test_a_hundred_and_twenty_rebuilds_leave_no_open_file_and_no_key() -> None:
    """Row 20."""
    check_that_rebuilds_leave_nothing(BackendCase("torch_gloo"), 20, 120)


@pytest.mark.slow
@over_nixl
def test_thirty_rebuilds_leave_no_open_file_and_no_key_beside_nixl(backend: BackendCase) -> None:
    """Row 20."""
    check_that_rebuilds_leave_nothing(backend, 10, 30)


def drops_its_tensors(rank: Rank, backend: str, force: bool):
    """Sleep or reload: the host closes the communicator, which it may go on holding, and drops its weights."""
    maps = shuffles(2, 3, 2, NUM_ROWS)
    memory = LandingMemory()
    model = Model(rank.rank, NUM_ROWS, LAYERS)
    model.fill(maps[0])
    weights = [weakref.ref(tensor.untyped_storage()) for layer in model.weights for tensor in layer]
    comm = eplb.Communicator(
        case_config(backend, timeout_s=20.0),
        model.weights,
        rank.control(),
        options=case_options(),
        observers=[memory],
    )
    gc.collect()
    gc.disable()
    gen = comm.begin(maps[0], maps[1])
    for layer in gen.layers:
        gen.stage(layer)
        gen.commit(layer)
    gen.end()
    comm.rebuild(20.0)
    comm.rearrange(maps[1], maps[0])
    wrong = model.wrong_rows(maps[0])
    comm.close(force=force)
    del model
    held = [tensor() is not None for tensor in weights], [memory.alive(epoch) for epoch in range(2)]
    return wrong, *held, comm.report.committed_layers, gen.layers  # both of which the host still has


@over_gloo_and_nixl
@pytest.mark.parametrize("force", [False, True], ids=["close", "close by force"])
def test_close_itself_gives_the_memory_back(backend: BackendCase, force: bool) -> None:
    """Row 20: no collection is needed, nor is the communicator dropped."""
    for wrong, weights, landing, *_ in run_ranks(2, drops_its_tensors, backend.name, force, env=backend.env):
        assert wrong == []
        assert weights == [False] * len(weights)
        assert not any(alive for epoch in landing for alive in epoch), landing


def hangup_handler() -> int:
    """Return what the system itself would call on SIGHUP: the first field of its struct sigaction."""
    current = (ctypes.c_uint64 * 32)()
    assert ctypes.CDLL(None).sigaction(signal.SIGHUP, None, ctypes.byref(current)) == 0
    return int(current[0])


def hangs_up(rank: Rank, backend: str, disposition: str):
    maps = shuffles(2, 3, 2, NUM_ROWS)
    heard: list[int] = []
    handler = {"handler": lambda number, _: heard.append(number), "ignore": signal.SIG_IGN, "default": signal.SIG_DFL}
    signal.signal(signal.SIGHUP, handler[disposition])
    before = hangup_handler()
    life = Life(rank, backend, maps[0])
    seen = [hangup_handler()]
    life.rearrange("first", maps[1])
    seen.append(hangup_handler())
    if disposition != "default" and seen[-1] == before:  # UCX would go on and write down all it does
        os.kill(os.getpid(), signal.SIGHUP)
    life.end()
    seen.append(hangup_handler())
    return [each == before for each in seen], len(heard), life.steps


@over_nixl
@pytest.mark.parametrize("disposition", ["handler", "ignore", "default"])
def test_what_the_host_does_on_sighup_is_left_alone(backend: BackendCase, disposition: str) -> None:
    """Row 20: UCX would take the signal for itself."""
    for unchanged, heard, story in run_ranks(2, hangs_up, backend.name, disposition, env=backend.env):
        assert unchanged == [True, True, True]
        assert heard == (1 if disposition == "handler" else 0)
        same_bytes_as_claimed(story)
        assert all(step.went_well for step in story)


WIDE, NARROW = 8 << 20, 4096


def counts_its_spare_rows(rank: Rank, backend: str):
    """The host gives the landing memory, so what is in use beside it is spare rows; every layer swaps within ranks."""
    old = np.arange(2 * NUM_ROWS)[None]
    new = np.array([[1, 0, 4, 5, 2, 3, 7, 6]])
    layers = [[WIDE, NARROW, NARROW, NARROW]]
    landing = [[torch.empty(NUM_ROWS, nbytes, dtype=torch.uint8) for nbytes in layers[0]] for _ in range(2)]
    life = Life(rank, backend, old, layers=layers, landing=landing)
    life.rearrange("swap", new)
    staging = life.comm.report.staging
    return staging.nbytes_in_use, life.end()


@pytest.mark.parametrize("backend", over_nixl.args[1][:1])
def test_spare_rows_are_counted_and_are_no_wider_than_their_tensors(backend: BackendCase) -> None:
    """Row 20."""
    for in_use, story in run_ranks(2, counts_its_spare_rows, backend.name, env=backend.env):
        same_bytes_as_claimed(story)
        all_went_well(at("swap", story))
        assert WIDE + 3 * NARROW <= in_use < 2 * WIDE
