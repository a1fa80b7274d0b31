"""torch_nccl over groups of every kind that can be had without a GPU: what it refuses, batches, failures, the end."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.backend.toolkit import Deadline, RowMove
from eplb_core.errors import ConfigError, EplbError
from eplb_core.hookspecs import hookimpl
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks
from eplb_nccl.backend import TorchNcclBackend
from eplb_nccl.group import DeviceGroup
from eplb_nccl.options import TorchNcclOptions

for folder in (Path(__file__).parent, Path(__file__).parents[3] / "tests" / "support"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # ranks inherit it

import fake_device  # noqa: E402
from polled_group import PolledGroup  # noqa: E402

LAYERS = [[2048, 24]] * 4


def communicator(rank: Rank, weights, group, *, timeout_s: float = 20.0, world_size=None, place=None, **keywords):
    config = eplb.EPLBConfig(
        communicator="torch_nccl", use_async=False, timeout_s=timeout_s, **keywords.pop("fields", {})
    )
    control = eplb.ControlPlane.from_store(
        rank.store(keywords.pop("namespace", "")),
        rank=rank.rank if place is None else place,
        world_size=rank.world_size if world_size is None else world_size,
    )
    return eplb.Communicator(config, weights, control, device_group=group, **keywords)


def filled(rank: Rank, mapping, layers=None, num_rows: int = 4) -> Model:
    model = Model(rank.rank, num_rows, layers or LAYERS)
    model.fill(mapping)
    return model


# --- what it says of itself -------------------------------------------------------------------------------------------


def test_it_is_declared_unsafe_for_async_batched_and_taken_only_when_named():
    info = eplb.discover().backends["torch_nccl"]
    assert (info.async_safe, info.async_reason) == (False, "NCCL multi-stream conflicts")
    assert (info.device_types, info.auto_priority, info.batched) == (("*",), None, True)
    assert info.available is not None
    assert info.available() is None
    choice = eplb.select(eplb.EPLBConfig(use_async=False), device_type="cpu")
    assert choice.name != "torch_nccl"


def test_declaring_it_imports_neither_torch_nor_the_backend():
    code = (
        "import sys, eplb_nccl.hooks\n"
        "eplb_nccl.hooks.eplb_register_backends().available()\n"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'eplb_nccl.backend') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_the_probe_names_torch_and_its_nccl():
    facts = TorchNcclBackend.probe(TorchNcclOptions())
    assert facts["torch"] == torch.__version__
    assert facts["nccl"]


# --- the group it is given --------------------------------------------------------------------------------------------


def with_a_wrong_group(rank: Rank, which: str):
    whole = rank.device_group()
    if which == "none":
        group = None
    elif which == "of one rank":
        group = rank.device_group([rank.rank], f"alone/{rank.rank}")
    elif which == "in another order":
        store = rank.store("reversed")
        group = dist.ProcessGroup(store, 1 - rank.rank, 2)
        gloo = dist.ProcessGroupGloo(store, 1 - rank.rank, 2)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    elif which == "a bare backend":
        group = whole._get_backend(torch.device("cpu"))
    else:
        group = whole
        fake_device.load()
    device = "eplbdev" if which == "without the device" else "cpu"
    weights = [[torch.zeros(4, 16, dtype=torch.uint8, device=device)]]
    with pytest.raises(ConfigError) as caught:
        communicator(rank, weights, group)
    return caught.value.code, caught.value.fields["problem"]


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("none", "torch_nccl moves weights over the host's group: pass device_group="),
        ("of one rank", "is rank 0 of 1, where the members [0, 1] make it rank"),
        ("in another order", "of 2, where the members [0, 1] make it rank"),
        ("a bare backend", "to be a torch.distributed.ProcessGroup, not a ProcessGroupGloo"),
        ("without the device", "was given a device_group that cannot move eplbdev tensors"),
    ],
)
def test_a_group_that_is_not_the_members_is_refused_with_what_is_wrong(which: str, said: str) -> None:
    if which == "without the device":
        fake_device.require()
    for code, problem in run_ranks(2, with_a_wrong_group, which):
        assert code == "EPLB-C010"
        assert said in problem


def with_crossed_groups(rank: Rank):
    """Two communicators of two ranks; the groups of the right size and place hold one process of each."""
    pair, place = divmod(rank.rank, 2)
    mates = {0: [0, 3], 3: [0, 3], 2: [1, 2], 1: [1, 2]}[rank.rank]
    store = rank.store(f"crossed/{mates}")
    group = dist.ProcessGroup(store, place, 2)
    gloo = dist.ProcessGroupGloo(store, place, 2)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    maps = shuffles(2, 1, 2, 4)
    model = Model(place, 4, [[64]])
    model.fill(maps[0])
    comm = communicator(rank, model.weights, group, world_size=2, place=place, namespace=f"pair {pair}")
    with pytest.raises(EplbError) as caught:
        comm.rearrange(*maps)
    comm.close(force=True)
    return caught.value.code, str(caught.value), model.wrong_rows(maps[0])


def test_a_group_of_other_processes_is_found_out_before_a_weight_moves() -> None:
    for code, text, wrong in run_ranks(4, with_crossed_groups):
        assert code == "EPLB-M005"
        assert "is not the process that is rank" in text
        assert wrong == []


def over_a_registered_group(rank: Rank):
    dist.init_process_group("gloo", store=rank.store("world"), rank=rank.rank, world_size=rank.world_size)
    group = dist.new_group([1, 3])
    wrong = None
    if rank.rank in (1, 3):
        place = (rank.rank - 1) // 2
        maps = shuffles(3, len(LAYERS), 2, 4)
        model = Model(place, 4, LAYERS)
        model.fill(maps[0])
        with communicator(rank, model.weights, group, world_size=2, place=place) as comm:
            assert comm._lives.epoch.backend._group._registered
            comm.rearrange(maps[0], maps[1])
            comm.rearrange(maps[1], maps[2])
        wrong = model.wrong_rows(maps[2])
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def test_a_registered_subgroup_is_used_by_its_own_ranks() -> None:
    assert run_ranks(4, over_a_registered_group) == [None, [], None, []]


# --- batches ----------------------------------------------------------------------------------------------------------


def in_batches(rank: Rank, migration_batching: bool):
    maps = shuffles(2, 1, rank.world_size, 100)
    model = filled(rank, maps[0], [[64, 16]], num_rows=100)
    fields = {"max_ops_per_batch": 32, "enable_migration_batching": migration_batching}
    with communicator(rank, model.weights, rank.device_group(), fields=fields) as comm:
        comm.connect()
        group, seen = comm._lives.epoch.backend._group, []
        post = group.post

        def noted(operations, tag):
            seen.append([(operation.peer, operation.is_send) for operation in operations])
            return post(operations, tag)

        group.post = noted
        comm.rearrange(*maps)
    return seen, model.wrong_rows(maps[1])


@pytest.mark.parametrize("migration_batching", [False, True])
def test_a_large_layer_is_cut_so_that_a_send_and_its_receive_share_a_batch(migration_batching: bool) -> None:
    """Case 8: 300 moves in batches of at most 32."""
    results = run_ranks(3, in_batches, migration_batching)
    assert all(wrong == [] for _, wrong in results)
    batches = [seen for seen, _ in results]
    assert sum(len(operations) for seen in batches for operations in seen) > 600
    for seen in batches:
        assert max(len(operations) for operations in seen) == 32
        if migration_batching:
            assert all(len({peer for peer, _ in operations}) == 1 for operations in seen)
    if not migration_batching:
        return
    # one peer per batch: the batches of a pair follow one another alike on both ends
    for a, b in ((0, 1), (0, 2), (1, 2)):
        ours = [
            [is_send for peer, is_send in operations].count(True) for operations in batches[a] if operations[0][0] == b
        ]
        theirs = [
            [is_send for peer, is_send in operations].count(False) for operations in batches[b] if operations[0][0] == a
        ]
        assert ours == theirs


# --- failures ---------------------------------------------------------------------------------------------------------


class Silent:
    """Posts nothing from the second rearrangement on, as a rank whose GPU is stuck."""

    name = "silent"

    def __init__(self, comm_of) -> None:
        self.comm_of = comm_of

    @hookimpl(wrapper=True)
    def transfer(self, plan):
        if plan.generation == 2:
            group = self.comm_of()._lives.epoch.backend._group
            group.post = lambda operations, tag: []
        return (yield)


def beside_a_silent_rank(rank: Rank, polled: bool):
    maps = shuffles(3, len(LAYERS), rank.world_size, 4)
    model = filled(rank, maps[0])
    group = PolledGroup(rank.device_group()) if polled else rank.device_group()
    held: list = []
    observers = [Silent(lambda: held[0])] if rank.rank == 1 else []
    # the silent one is done at once and waits for the others' ballots: they are to find it out, not the other way round
    comm = communicator(rank, model.weights, group, timeout_s=5.0 if rank.rank == 1 else 1.5, observers=observers)
    held.append(comm)
    comm.rearrange(maps[0], maps[1])
    started_s = time.monotonic()
    with pytest.raises(EplbError) as caught:
        comm.rearrange(maps[1], maps[2])
    seconds = time.monotonic() - started_s
    placement = caught.value.report.physical_to_logical_map
    mixed = model.wrong_rows(placement)
    comm.close(force=True)
    # the next communicator: refused over the severed group, good over a new one
    severed = None
    if rank.rank != 1:
        with pytest.raises(ConfigError) as caught_again:
            communicator(rank, model.weights, group, name="severed")
        severed = caught_again.value.fields["problem"]
    new = rank.device_group(topic="new")
    with communicator(rank, model.weights, new, name="next") as following:
        following.rearrange(placement, maps[0])
    return str(caught.value), caught.value.code, seconds, mixed, severed, model.wrong_rows(maps[0])


@pytest.mark.parametrize("polled", [False, True], ids=["gloo", "polled"])
def test_a_rank_that_posts_nothing_is_found_at_the_limit_and_the_next_communicator_works(polled: bool) -> None:
    results = run_ranks(3, beside_a_silent_rank, polled)
    assert len({text for text, *_ in results}) == 1
    for rank, (text, code, seconds, mixed, severed, wrong) in enumerate(results):
        assert code == "EPLB-T002", text
        assert "phase wait over torch_nccl, waiting for rank" in text
        assert "1" in text.split("waiting for")[1]
        assert seconds < 1.5 + 2
        assert (mixed, wrong) == ([], [])
        assert rank == 1 or "pass a new group" in severed


def two_on_one_group(rank: Rank):
    maps = shuffles(3, len(LAYERS), rank.world_size, 4)
    models = [filled(rank, maps[0]) for _ in range(2)]
    group = rank.device_group()
    held: list = []
    observers = [Silent(lambda: held[0])] if rank.rank == 1 else []
    first = communicator(rank, models[0].weights, group, timeout_s=1.0, name="first", observers=observers)
    held.append(first)
    second = communicator(rank, models[1].weights, group, timeout_s=5.0, name="second")
    first.rearrange(maps[0], maps[1])
    second.rearrange(maps[0], maps[1])
    with pytest.raises(EplbError):
        first.rearrange(maps[1], maps[2])
    started_s = time.monotonic()
    with pytest.raises(EplbError) as caught:
        second.rearrange(maps[1], maps[2])
    seconds = time.monotonic() - started_s
    wrong = models[1].wrong_rows(caught.value.report.physical_to_logical_map)
    first.close(force=True)
    second.close(force=True)
    return caught.value.code, str(caught.value), seconds, wrong


def test_a_second_communicator_on_a_severed_group_says_so_instead_of_hanging() -> None:
    results = run_ranks(2, two_on_one_group)
    for code, text, seconds, wrong in results:
        # the rank that severed the group knows; the one that had nothing outstanding sees a closed connection
        assert code in ("EPLB-T001", "EPLB-T004")
        assert re.search("another communicator closed the connections|Connection closed by peer", text)
        assert seconds < 3
        assert wrong == []


# --- groups whose work is polled: the way NCCL is used ----------------------------------------------------------------


def over_a_polled_group(rank: Rank):
    maps = shuffles(4, len(LAYERS), rank.world_size, 6, redundant=2)
    model = filled(rank, maps[0], num_rows=6)
    group = PolledGroup(rank.device_group())
    with communicator(rank, model.weights, group, fields={"max_ops_per_batch": 5}) as comm:
        for old, new in itertools.pairwise(maps):
            comm.rearrange(old, new)
    return model.wrong_rows(maps[-1]), max(group.groups), group.open, group.aborted


def test_batches_are_coalesced_and_polled_where_the_group_can() -> None:
    for wrong, largest, still_open, aborted in run_ranks(3, over_a_polled_group):
        assert wrong == []
        assert largest == 5
        assert not still_open
        assert not aborted


def whose_batch_is_refused(rank: Rank):
    maps = shuffles(3, len(LAYERS), rank.world_size, 4)
    model = filled(rank, maps[0])
    group = PolledGroup(rank.device_group())
    comm = communicator(rank, model.weights, group)
    comm.rearrange(maps[0], maps[1])
    if rank.rank == 1:
        group.fail_at = 1
    started_s = time.monotonic()
    with pytest.raises(EplbError) as caught:
        comm.rearrange(maps[1], maps[2])
    seconds = time.monotonic() - started_s
    mixed = model.wrong_rows(caught.value.report.physical_to_logical_map)
    comm.close(force=True)
    return caught.value.code, str(caught.value), seconds, mixed, group.open, group.aborted


def test_an_error_in_a_batch_closes_it_and_is_the_same_typed_error_on_all_ranks() -> None:
    results = run_ranks(3, whose_batch_is_refused)
    assert len({text for _, text, *_ in results}) == 1
    for code, text, seconds, mixed, still_open, aborted in results:
        assert code == "EPLB-T001"
        assert text.startswith("torch_nccl transfer failed with state=")
        assert seconds < 3
        assert mixed == []
        assert not still_open
        assert aborted


def whose_batch_is_empty(rank: Rank):
    dist.init_process_group("gloo", store=rank.store("world"), rank=rank.rank, world_size=2)
    link = DeviceGroup(dist.group.WORLD, device=torch.device("cpu"), members=[0, 1], rank=rank.rank)
    nothing = link.post([], 7)  # torch's own batch_isend_irecv raises
    buffer = torch.full((8,), rank.rank, dtype=torch.uint8)
    posted = link.post([RowMove(1 - rank.rank, rank.rank == 0, buffer)], 7)
    failure = link.finish(posted, Deadline(10), lambda: None)
    dist.barrier()
    dist.destroy_process_group()
    return nothing, failure, buffer.tolist()


def test_an_empty_batch_is_skipped() -> None:
    assert run_ranks(2, whose_batch_is_empty) == [([], None, [0] * 8)] * 2


def whose_work_fails(rank: Rank):
    link = DeviceGroup(PolledGroup(rank.device_group()), device=torch.device("cpu"), members=[0, 1], rank=rank.rank)
    if rank.rank == 1:
        link.sever()
        return None
    posted = link.post([RowMove(1, False, torch.zeros(8, dtype=torch.uint8))], 7)
    while not posted[0].work.is_completed():
        time.sleep(0.001)
    link._error = iter([None, "REMOTE_ERROR"]).__next__  # torch notices a little later than the work ends
    return tuple(link.finish(posted, Deadline(10), lambda: None))


def test_work_that_failed_is_not_taken_for_complete() -> None:
    assert run_ranks(2, whose_work_fails)[0] == ("REMOTE_ERROR", (1,), False, True)


def how_long_close_takes(rank: Rank):
    maps = shuffles(2, len(LAYERS), rank.world_size, 4)
    model = filled(rank, maps[0])
    group = rank.device_group()
    comm = communicator(rank, model.weights, group)
    comm.rearrange(*maps)
    started_s = time.monotonic()
    comm.close()
    seconds = time.monotonic() - started_s
    total = torch.ones(1)
    group.allreduce([total]).wait()  # the group is the host's, and as good as before
    return seconds, total.item()


def test_a_group_is_left_to_the_host_as_it_was() -> None:
    for seconds, total in run_ranks(2, how_long_close_takes):
        assert seconds < 2
        assert total == 2
