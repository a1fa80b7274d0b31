"""NCCL fails, hangs or is torn down on one rank: typed errors within the limit everywhere, and the next one works.

Real bindings over the stub library; the ranks run the core as hosts do.
"""

from __future__ import annotations

import os
import re
import time
from importlib.util import find_spec

import pytest

import eplb_core as eplb
from eplb_core.errors import EplbError
from eplb_core.hookspecs import hookimpl
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from tests.support import stub_nccl
from tests.support.backends import backend_cases

LAYERS = [[4096, 24]] * 4
FAULTY = 1

pytestmark = pytest.mark.skipif(
    stub_nccl.compiler() is None or find_spec("nccl") is None, reason="needs nccl4py and a C compiler"
)
# Collecting the cases puts the test plugin on the path that ranks inherit.
ENV = next((case.values[0].env for case in backend_cases() if case.id == "pynccl"), {})


def communicator(rank: Rank, weights, *, timeout_s: float = 20.0, binding: str = "nccl4py", **keywords):
    config = eplb.EPLBConfig(communicator="pynccl_cpu", use_async=False, timeout_s=timeout_s)
    return eplb.Communicator(config, weights, rank.control(), options={"binding": binding}, **keywords)


class StubFault:
    """Tells this rank's stub to fail from the transfer of layer 1 of the second rearrangement on."""

    name = "stub fault"

    def __init__(self, kind: str) -> None:
        self.kind = kind.encode()

    @hookimpl(wrapper=True)
    def transfer(self, plan):
        if (plan.generation, plan.layer) == (2, 1):
            stub_nccl.load().stub_fault(self.kind)
        return (yield)


def through_a_fault(rank: Rank, kind: str, timeout_s: float, binding: str):
    stub = stub_nccl.load()
    maps = shuffles(3, len(LAYERS), rank.world_size, 4, redundant=2)
    model = Model(rank.rank, 4, LAYERS)
    model.fill(maps[0])
    observers = [StubFault(kind)] if rank.rank == FAULTY else []
    comm = communicator(rank, model.weights, timeout_s=timeout_s, binding=binding, observers=observers)
    comm.rearrange(maps[0], maps[1])
    started_s = time.monotonic()
    with pytest.raises(EplbError) as caught:
        comm.rearrange(maps[1], maps[2])
    seconds = time.monotonic() - started_s
    report = caught.value.report
    mixed = model.wrong_rows(report.physical_to_logical_map)
    depth, open_comms = stub.stub_group_depth(), stub.stub_num_comms()
    stub.stub_fault(b"")
    with pytest.raises(EplbError) as refused:
        comm.rearrange(maps[1], maps[2])
    held = comm.rebuild(20).physical_to_logical_map
    comm.rearrange(held, maps[0])
    after = model.wrong_rows(maps[0])
    comm.close()
    return {
        "text": str(caught.value),
        "code": caught.value.code,
        "seconds": seconds,
        "committed": report.committed_layers,
        "mixed": mixed,
        "depth": depth,
        "open after the abort": open_comms,
        "refused": refused.value.code,
        "after": after,
        "open at the end": stub.stub_num_comms(),
    }


FAILURES = {
    "fail-send": "unhandled system error",
    "fail-recv": "unhandled system error",
    "fail-group": "unhandled system error",
    "async": "remote process exited or there was a network error",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_of_nccl_on_one_rank_is_the_same_typed_error_on_all_and_the_next_epoch_works(kind: str) -> None:
    stories = run_ranks(3, through_a_fault, kind, 20.0, "nccl4py", env=ENV)
    assert len({story["text"] for story in stories}) == 1
    for story in stories:
        assert story["code"] == "EPLB-T001"
        assert story["text"].startswith("pynccl transfer failed with state=")
        assert FAILURES[kind] in story["text"] or "RemoteError (6)" in story["text"]
        assert story["seconds"] < 3
        assert story["mixed"] == story["after"] == []
        assert (story["depth"], story["open after the abort"], story["open at the end"]) == (0, 0, 0)
        assert story["refused"] == "EPLB-T004"


def test_a_hang_of_nccl_ends_at_the_limit_on_all_ranks_and_the_next_epoch_works() -> None:
    stories = run_ranks(3, through_a_fault, "hang", 1.5, "nccl4py", env=ENV)
    assert len({story["text"] for story in stories}) == 1
    for story in stories:
        assert story["code"] == "EPLB-T002"
        # Two layers are in flight: layer 0 is stuck where the fault comes before its own operations are done. Who runs
        # out of time first is a rank that waits for NCCL, or one that has its rows and waits for the others' ballots.
        stalled = r"Stalled for 1\.\d s in layer [01], phase (wait over pynccl|vote), waiting for rank"
        assert re.match(stalled, story["text"])
        assert 1.4 < story["seconds"] < 1.5 + 2
        assert story["mixed"] == story["after"] == []
        assert (story["depth"], story["open after the abort"], story["open at the end"]) == (0, 0, 0)


@pytest.mark.skipif(find_spec("cupy") is None, reason="needs CuPy")
@pytest.mark.parametrize("kind", ["fail-group", "async"])
def test_the_second_adapter_ends_the_same_way(kind: str) -> None:
    stories = run_ranks(3, through_a_fault, kind, 20.0, "cupy", env=ENV)
    assert len({story["text"] for story in stories}) == 1
    for story in stories:
        assert story["code"] == "EPLB-T001"
        assert story["mixed"] == story["after"] == []
        assert (story["depth"], story["open after the abort"], story["open at the end"]) == (0, 0, 0)


def whose_abort_hangs(rank: Rank):
    stub = stub_nccl.load()
    maps = shuffles(3, len(LAYERS), rank.world_size, 4)
    model = Model(rank.rank, 4, LAYERS)
    model.fill(maps[0])
    comm = communicator(rank, model.weights)
    comm.rearrange(maps[0], maps[1])
    if rank.rank == FAULTY:
        stub.stub_fault(b"abort-hang")
    else:
        comm._lives.epoch.backend._stream.mark = _raise
    started_s = time.monotonic()
    with pytest.raises(EplbError) as caught:
        comm.rearrange(maps[1], maps[2])
    seconds = time.monotonic() - started_s
    held = comm.rebuild(20)
    comm.close(force=True)
    return str(caught.value), seconds, held.quarantined_nbytes, model.wrong_rows(held.physical_to_logical_map)


def _raise():
    raise RuntimeError("an illegal memory access was encountered")


def test_an_abort_from_which_nccl_does_not_return_is_left_alone_and_its_landing_memory_quarantined() -> None:
    """Rank 0's device fails; the abort that follows on rank 1 takes longer than it may."""
    results = run_ranks(2, whose_abort_hangs, env=ENV)
    for text, seconds, _, wrong in results:
        assert text.startswith("pynccl transfer failed with state=the device failed: an illegal memory access")
        assert seconds < 4
        assert wrong == []
    assert results[FAULTY][2] > 0


def connecting_with_a_fault(rank: Rank, kind: str, timeout_s: float, binding: str):
    stub = stub_nccl.load()
    maps = shuffles(2, len(LAYERS), rank.world_size, 4)
    model = Model(rank.rank, 4, LAYERS)
    model.fill(maps[0])
    if rank.rank == FAULTY:
        stub.stub_fault(kind.encode())
    comm = communicator(rank, model.weights, timeout_s=timeout_s, binding=binding)
    started_s = time.monotonic()
    with pytest.raises(EplbError) as caught:
        comm.rearrange(*maps)
    seconds = time.monotonic() - started_s
    stub.stub_fault(b"")
    comm.rebuild(20)
    comm.rearrange(*maps)
    comm.close()
    return caught.value.code, str(caught.value), seconds, model.wrong_rows(maps[1]), stub.stub_num_comms()


def test_a_member_that_fails_to_connect_is_no_hang_for_the_others() -> None:
    results = run_ranks(3, connecting_with_a_fault, "init-fail", 20.0, "nccl4py", env=ENV)
    assert {code for code, *_ in results} == {"EPLB-T001"}
    assert len({text for _, text, *_ in results}) == 1
    for _, _, seconds, wrong, open_comms in results:
        assert seconds < 3
        assert (wrong, open_comms) == ([], 0)


def test_a_member_that_hangs_while_it_connects_is_named_within_the_limit() -> None:
    results = run_ranks(3, connecting_with_a_fault, "init-hang", 1.5, "nccl4py", env=ENV)
    for code, text, seconds, wrong, open_comms in results:
        assert code == "EPLB-T002"
        assert "phase connect over pynccl, waiting for rank" in text
        assert seconds < 1.5 + 2
        assert (wrong, open_comms) == ([], 0)


def test_no_unique_id_is_an_error_of_the_lowest_rank_that_all_learn() -> None:
    results = run_ranks(2, without_an_id, env=ENV)
    assert results[0][0] == "EPLB-T001"
    assert results[1][0] == "EPLB-M006"
    assert all("unhandled system error" in text for _, text in results)


def without_an_id(rank: Rank):
    if rank.rank == 0:
        stub_nccl.load().stub_fault(b"no-id")
    model = Model(rank.rank, 4, LAYERS)
    with pytest.raises(EplbError) as caught:
        communicator(rank, model.weights).connect()
    return caught.value.code, str(caught.value)


def with_another_id_published(rank: Rank):
    from eplb_pynccl import backend, metadata

    if rank.rank == 0:
        other = metadata.pack(bytes(16), bytes(range(128)))
        backend.publish = lambda store, _payload: metadata.publish(store, other)
    model = Model(rank.rank, 4, LAYERS)
    comm = communicator(rank, model.weights)
    with pytest.raises(EplbError) as caught:
        comm.connect()
    comm.close(force=True)
    return caught.value.code, str(caught.value)


def test_a_unique_id_that_is_not_the_one_in_the_metadata_is_refused() -> None:
    results = run_ranks(2, with_another_id_published, env=ENV)
    assert {code for code, _ in results} == {"EPLB-M005"}
    assert all("the unique id in its metadata is not the one it published" in text for _, text in results)


def with_versions(rank: Rank):
    stub_nccl.load().stub_version(22807 + 100 * rank.rank)
    model = Model(rank.rank, 4, LAYERS)
    comm = communicator(rank, model.weights)
    with pytest.raises(EplbError) as caught:
        comm.connect()
    comm.close(force=True)
    return caught.value.code, str(caught.value)


def test_two_releases_of_nccl_are_refused_before_they_meet() -> None:
    for code, text in run_ranks(2, with_versions, env=ENV):
        assert code == "EPLB-M004"
        assert "2.28.7" in text
        assert "2.29.7" in text


def how_it_ends(rank: Rank, force: bool):
    stub = stub_nccl.load()
    maps = shuffles(2, len(LAYERS), rank.world_size, 4)
    model = Model(rank.rank, 4, LAYERS)
    model.fill(maps[0])
    comm = communicator(rank, model.weights)
    comm.rearrange(*maps)
    started_s = time.monotonic()
    comm.close(force=force)
    seconds = time.monotonic() - started_s
    return stub.stub_num_comms(), stub.stub_num_destroyed(), stub.stub_num_aborted(), seconds < 2


@pytest.mark.parametrize("force", [False, True])
def test_a_communicator_is_destroyed_in_peace_and_aborted_by_force(force: bool) -> None:
    assert run_ranks(2, how_it_ends, force, env=ENV) == [(0, 0, 1, True) if force else (0, 1, 0, True)] * 2


class Groups:
    """Counts the operations of each NCCL group this rank launches."""

    def __init__(self, backend) -> None:
        self.sizes: list[int] = []
        connection = backend._connection
        launch = connection._launch

        def counted(batch) -> None:
            self.sizes.append(len(batch.operations))
            launch(batch)

        connection._launch = counted


def in_batches(rank: Rank, limit: int, binding: str):
    maps = shuffles(2, 1, rank.world_size, 150)
    model = Model(rank.rank, 150, [[64, 16]])
    model.fill(maps[0])
    config = eplb.EPLBConfig(communicator="pynccl_cpu", use_async=False, timeout_s=20, max_ops_per_batch=limit)
    with eplb.Communicator(config, model.weights, rank.control(), options={"binding": binding}) as comm:
        comm.connect()
        groups = Groups(comm._lives.epoch.backend)
        comm.rearrange(*maps)
    return groups.sizes, model.wrong_rows(maps[1])


@pytest.mark.parametrize("binding", ["nccl4py", "cupy"])
def test_a_large_layer_is_cut_into_groups_of_at_most_max_ops_per_batch(binding: str) -> None:
    """Case 8."""
    if find_spec("nccl" if binding == "nccl4py" else "cupy") is None:
        pytest.skip(f"{binding} is not installed")
    for sizes, wrong in run_ranks(2, in_batches, 32, binding, env=ENV):
        assert wrong == []
        assert max(sizes) == 32
        assert sum(sizes) > 200


def descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def one_after_another(rank: Rank):
    maps = shuffles(2, len(LAYERS), rank.world_size, 4)
    model = Model(rank.rank, 4, LAYERS)
    model.fill(maps[0])
    comm = communicator(rank, model.weights)
    comm.connect()
    before = descriptors_and_threads()
    comm.close()
    with communicator(rank, model.weights, name="second") as second:
        second.rearrange(*maps)
        during = descriptors_and_threads()
    return before, during, descriptors_and_threads(), model.wrong_rows(maps[1])


def test_a_closed_communicator_leaves_no_thread_and_no_descriptor_behind() -> None:
    with Ranks(2, one_after_another, env=ENV) as ranks:
        for before, during, after, wrong in ranks.values(60):
            assert wrong == []
            assert during[1] <= before[1]
            assert after[1] < during[1]
            assert after[0] < during[0]
