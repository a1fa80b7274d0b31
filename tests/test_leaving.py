"""How a communicator ends, and who may still use it: errors of the host, forks, second threads, failing closes."""

from __future__ import annotations

import os
import socket
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.errors import CommitError, ConfigError, EplbError, PlanError, StalledError, TransferError
from eplb_core.hookspecs import hookimpl
from eplb_core.memory.commit import CommitCopies
from eplb_core.memory.quarantine import kept
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks
from eplb_core.voting.liveness import Ring
from tests.support.backends import (
    BackendCase,
    case_config,
    case_options,
    device_group,
    every_backend,
    every_backend_under_faults,
)

ROW_NBYTES = [[4096, 24]] * 4


class HostError(Exception):
    """Raised by the host between two calls."""


def communicator(rank: Rank, backend: str, model: Model, **keywords) -> eplb.Communicator:
    config = case_config(backend, timeout_s=keywords.pop("timeout_s", 20))
    group = device_group(rank, backend)
    return eplb.Communicator(config, model.weights, rank.control(), group, options=case_options(), **keywords)


# --- the host fails between stage and commit --------------------------------------------------------------------------


def whose_host_fails(rank: Rank, backend: str, closes_by_itself: bool):
    maps = shuffles(2, len(ROW_NBYTES), rank.world_size, 4)
    model = Model(rank.rank, 4, ROW_NBYTES)
    model.fill(maps[0])
    comm = communicator(rank, backend, model)
    told = ""
    try:
        with comm:
            gen = comm.begin(maps[0], maps[1])
            for layer in gen.layers:
                gen.stage(layer)
                if rank.rank == 1 and layer == gen.layers[1]:
                    if closes_by_itself:
                        comm.close(force=True)
                        with pytest.raises(TransferError, match="EPLB-T008"):
                            gen.commit(layer)
                    raise HostError
                gen.commit(layer)
            gen.end()
    except HostError:
        told = "host"
    except EplbError as error:
        told = error.code
    return told, comm.report.committed_layers, model.wrong_rows(comm.report.physical_to_logical_map)


@pytest.mark.slow
@every_backend_under_faults
@pytest.mark.parametrize("closes_by_itself", [False, True])
def test_a_voted_layer_is_committed_by_the_rank_whose_host_fails_as_well(backend, closes_by_itself) -> None:
    first, failed, last = run_ranks(3, whose_host_fails, backend.name, closes_by_itself, env=backend.env)
    assert failed[0] == "host"
    assert first[0] == last[0] == "EPLB-T003"
    assert failed[1] == (0, 1)
    assert set(failed[1]) <= set(first[1])
    assert failed[2] == first[2] == last[2] == []


# --- a commit fails ---------------------------------------------------------------------------------------------------


def whose_commit_is_interrupted(rank: Rank, backend: str):
    """With the next layer's rows on their way: 16 MiB each, so that they are when the commit fails."""
    layers = [[4 << 20]] * 3
    maps = shuffles(2, len(layers), rank.world_size, 4)
    model = Model(rank.rank, 4, layers)
    model.fill(maps[0])
    comm = communicator(rank, backend, model)
    outcome = ""
    if rank.rank == 1:
        CommitCopies.run = interrupted
    try:
        with comm:
            comm.rearrange(maps[0], maps[1])
    except EplbError as error:
        outcome = type(error).__name__
        with pytest.raises(TransferError):  # closed; and a rank with invalid weights rebuilds nothing
            comm.rebuild(5)
    return outcome


def interrupted(self) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@every_backend_under_faults
def test_the_rank_whose_commit_fails_is_told_that_its_weights_are_invalid(backend: BackendCase) -> None:
    outcomes = run_ranks(2, whose_commit_is_interrupted, backend.name, env=backend.env)
    assert outcomes == ["PeerLostError", CommitError.__name__]


def invalid_then_rebuilt(rank: Rank):
    maps = shuffles(2, 1, 1, 4)
    model = Model(0, 4, [[64]])
    model.fill(maps[0])
    with communicator(rank, "torch_gloo", model) as comm:
        CommitCopies.run = interrupted
        with pytest.raises(CommitError):
            comm.rearrange(maps[0], maps[1])
        with pytest.raises(TransferError) as caught:
            comm.rebuild(5)
    return caught.value.code, str(caught.value)


def test_a_rank_with_invalid_weights_cannot_be_rebuilt() -> None:
    ((code, text),) = run_ranks(1, invalid_then_rebuilt)
    assert code == "EPLB-T009"
    assert "the weights of this rank are invalid" in text


def test_a_ring_may_be_looked_at_after_it_was_closed() -> None:
    rings = [Ring("127.0.0.1", name="a", rank=rank, epoch=1, members=(0, 1)) for rank in (0, 1)]
    ports = [ring.port for ring in rings]
    threads = [
        threading.Thread(target=ring.connect, args=(("127.0.0.1", ports[1 - rank]), 5.0, lambda: None))
        for rank, ring in enumerate(rings)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rings[0].close(goodbye=False)
    assert rings[0].poll() is None
    with socket.socketpair()[0] as other:  # which gets the number of a closed connection
        assert other.fileno() >= 0
        assert rings[0].poll() is None
    assert rings[1].poll() == 0
    rings[1].close(goodbye=True)


def whose_backend_fails_to_close(rank: Rank):
    from eplb_gloo.backend import GlooBackend

    maps = shuffles(2, 1, 2, 4)
    model = Model(rank.rank, 4, [[64]])
    model.fill(maps[0])
    comm = communicator(rank, "torch_gloo", model)
    comm.rearrange(maps[0], maps[1])

    def fail(self, force=False):
        raise OSError("the driver is gone")

    GlooBackend.close = fail
    comm.close()
    comm.close()
    return kept()


def test_a_backend_that_fails_to_close_keeps_its_landing_memory_and_stops_nobody() -> None:
    assert run_ranks(2, whose_backend_fails_to_close) == [1, 1]


# --- whom a stall names -----------------------------------------------------------------------------------------------


def who_is_waited_for(rank: Rank, backend: str):
    """Rank 1 stalls before it sends; rank 0 waits for its rows, rank 2 needs none."""
    old, new = np.arange(6)[None], np.array([[2, 3, 2, 3, 4, 5]])
    model = Model(rank.rank, 2, [[4096]])
    model.fill(old)
    comm = communicator(rank, backend, model, timeout_s=2)
    gen = comm.begin(old, new)
    if rank.rank == 1:
        time.sleep(4)
    with pytest.raises(EplbError) as caught:
        gen.stage(0)
    comm.close(force=True)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.slow
@every_backend_under_faults
def test_a_stall_names_the_rank_that_stalls_and_none_that_waits_for_it(backend: BackendCase) -> None:
    stories = run_ranks(3, who_is_waited_for, backend.name, env=backend.env)
    assert len(set(stories)) == 1
    kind, text = stories[0]
    assert kind == StalledError.__name__
    waiting_for = text.partition("waiting for ")[2].partition("Seen by")[0]
    assert "rank 1" in waiting_for
    assert "rank 0" not in waiting_for
    assert "rank 2" not in waiting_for


# --- who may use it ---------------------------------------------------------------------------------------------------


def forked(rank: Rank, backend: str):
    maps = shuffles(3, 2, rank.world_size, 4)
    model = Model(rank.rank, 4, [[4096]] * 2)
    model.fill(maps[0])
    with communicator(rank, backend, model) as comm:
        comm.rearrange(maps[0], maps[1])
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            told = []
            for call in (lambda: comm.rearrange(maps[1], maps[2]), lambda: comm.rebuild(1), lambda: comm.connect(1)):
                try:
                    call()
                except EplbError as error:
                    told.append(error.code)
            comm.close()
            os.write(writer, ",".join(told).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        comm.rearrange(maps[1], maps[2])
        return told, model.wrong_rows(maps[2])


@pytest.mark.parametrize("backend", ["torch_gloo", "vmread"])
def test_a_forked_process_is_refused_and_does_its_parent_no_harm(backend: str) -> None:
    results = run_ranks(2, forked, backend)
    assert results == [("EPLB-T013,EPLB-T013,EPLB-T013", [])] * 2


class CallsFromAnotherThread:
    """Uses the communicator from a second thread while the first is inside a transfer."""

    name = "calls from another thread"

    def __init__(self) -> None:
        self.told: list[str] = []
        self.comm: eplb.Communicator | None = None

    @hookimpl(wrapper=True)
    def transfer(self, plan):
        thread = threading.Thread(target=self._call)
        thread.start()
        thread.join()
        return (yield)

    def _call(self) -> None:
        with pytest.raises(PlanError) as caught:
            self.comm.rearrange([[0]], [[0]])
        self.told.append(str(caught.value))


def used_by_two_threads(rank: Rank):
    maps = shuffles(2, 1, 2, 4)
    model = Model(rank.rank, 4, [[64]])
    model.fill(maps[0])
    observer = CallsFromAnotherThread()
    with communicator(rank, "torch_gloo", model, observers=[observer]) as comm:
        observer.comm = comm
        comm.rearrange(maps[0], maps[1])
    return observer.told, model.wrong_rows(maps[1])


def test_a_second_thread_is_refused_while_the_first_is_inside() -> None:
    for told, wrong in run_ranks(2, used_by_two_threads):
        assert wrong == []
        assert len(told) == 1
        assert "another thread is inside" in told[0]
        assert "EPLB-P004" in told[0]


# --- what it is given -------------------------------------------------------------------------------------------------


def control_plane(**fields) -> eplb.ControlPlane:
    return eplb.ControlPlane.from_store(**{"store": dist.HashStore(), "rank": 0, "world_size": 1} | fields)


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ({"config": None}, "EPLB-C010", "config= should be EPLBConfig, got NoneType"),
        ({"config": {"use_async": False}}, "EPLB-C010", "config= should be EPLBConfig, got dict"),
        ({"control": None}, "EPLB-C010", "control= should be ControlPlane, got NoneType"),
        ({"name": 5}, "EPLB-C010", "name= should be str, got int"),
        ({"observers": None}, "EPLB-C010", "observers= should be a sequence of observers, got NoneType"),
        ({"observers": "trace"}, "EPLB-C010", "observers= should be a sequence of observers, got str"),
        ({"observers": [object()]}, "EPLB-C010", "implements no hook"),
        ({"options": [1]}, "EPLB-C008", "expected a mapping or an options model, got list"),
        ({"options": "threads=2"}, "EPLB-C008", "expected a mapping or an options model, got str"),
        ({"options": {1: 2}}, "EPLB-C008", "1: Extra inputs are not permitted"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(what, code, said) -> None:
    given = {
        "config": eplb.EPLBConfig(use_async=False, communicator="torch_gloo"),
        "weights": [[torch.zeros(2, 8)]],
        "control": control_plane(),
    }
    with pytest.raises(ConfigError) as caught:
        eplb.Communicator(**given | what)
    assert caught.value.code == code
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: control_plane(store=None), "expected a torch.distributed.Store, got NoneType"),
        (lambda: control_plane(rank="0"), "rank='0' and world_size=1 should be integers"),
        (lambda: control_plane(world_size=1.5), "rank=0 and world_size=1.5 should be integers"),
        (lambda: control_plane(rank=1), "rank 1 does not fit world size 1"),
        (lambda: eplb.ControlPlane.from_process_group(None), "expected a torch.distributed.ProcessGroup, got NoneType"),
    ],
)
def test_a_control_plane_of_nothing_is_refused(make, said) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.code == "EPLB-C009"
    assert said in str(caught.value)


# --- whose map is wrong -----------------------------------------------------------------------------------------------


class Explodes:
    """A map of the host's own kind."""

    def __array__(self, *args, **keywords):
        raise HostError("host code blew up")


def one_map_is_wrong(rank: Rank, how: str):
    maps = shuffles(2, 1, 2, 4)
    model = Model(rank.rank, 4, [[64]])
    model.fill(maps[0])
    wrong = {"shape": [[0, 1]], "host": Explodes()}[how] if rank.rank == 1 else maps[1]
    with communicator(rank, "torch_gloo", model) as comm:
        with pytest.raises(PlanError) as caught:
            comm.rearrange(maps[0], wrong)
        comm.rearrange(maps[0], maps[1])  # nothing was moved, and nothing is broken
    return str(caught.value)


@pytest.mark.parametrize(("how", "said"), [("shape", "has shape (1, 2)"), ("host", "HostError: host code blew up")])
def test_every_rank_is_told_whose_map_is_wrong(how, said) -> None:
    first, second = run_ranks(2, one_map_is_wrong, how)
    assert first == second
    assert said in first
    assert "Found by rank 1." in first


# --- nothing to move --------------------------------------------------------------------------------------------------


def without_a_byte(rank: Rank, backend: str):
    old, new = np.arange(4)[None], np.arange(4)[None, ::-1].copy()
    weights = [[torch.zeros(2, 0), torch.zeros(2, 3, 0, dtype=torch.uint8)]]
    group = device_group(rank, backend)
    with eplb.Communicator(case_config(backend), weights, rank.control(), group, options=case_options()) as comm:
        return comm.rearrange(old, new).nbytes_received


@every_backend
def test_tensors_without_a_byte_are_moved_like_others(backend: BackendCase) -> None:
    assert run_ranks(2, without_a_byte, backend.name, env=backend.env) == [0, 0]
