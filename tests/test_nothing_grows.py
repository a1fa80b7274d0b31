"""Case 21 and I10: whatever the number of rearrangements, the process and the store stay as they are."""

from __future__ import annotations

import gc
import os
import threading
import time

import psutil
import pytest
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks
from tests.support.backends import BackendCase, case_config, case_options, device_group, every_backend_under_faults

ROW_NBYTES = [[4096, 24], [65_536, 8]]


def footprint(rank: Rank) -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "os threads": process.num_threads(),
        "python threads": threading.active_count(),
        "rss KiB": process.memory_info().rss >> 10,
        "store keys": rank.store().num_keys(),
    }


def many_rounds(rank: Rank, backend: str, rounds: int, warm_up: int):
    maps = shuffles(5, len(ROW_NBYTES), rank.world_size, 4, redundant=2)
    model = Model(rank.rank, 4, ROW_NBYTES)
    model.fill(maps[0])
    config, group = case_config(backend, timeout_s=30), device_group(rank, backend)
    with eplb.Communicator(config, model.weights, rank.control(), group, options=case_options()) as comm:
        held = maps[0]
        for number in range(rounds):
            if number == warm_up:
                before = footprint(rank)
            held = comm.rearrange(held, maps[(number + 1) % len(maps)]).physical_to_logical_map
        after = footprint(rank)
    return before, after, model.wrong_rows(held)


def check(backend: BackendCase, rounds: int, warm_up: int, rss_kib: int) -> None:
    for before, after, wrong in run_ranks(
        2, many_rounds, backend.name, rounds, warm_up, timeout_s=900, env=backend.env
    ):
        print(f"\n{backend.name} {backend.env or ''} after {warm_up} and after {rounds} rounds: {before} {after}")
        assert wrong == []
        # the footprint itself opens one connection to the store; ranks look at the keys at slightly different moments
        for what, slack in (("fds", 1), ("os threads", 0), ("python threads", 0), ("store keys", 8)):
            assert after[what] <= before[what] + slack, (what, before, after)
        assert after["rss KiB"] <= before["rss KiB"] + rss_kib


@every_backend_under_faults
def test_sixty_rearrangements_leave_nothing_behind(backend: BackendCase) -> None:
    check(backend, 60, 20, rss_kib=8 << 10)


@every_backend_under_faults
@pytest.mark.soak
@pytest.mark.timeout(1000)
def test_a_thousand_rearrangements_leave_nothing_behind(backend: BackendCase) -> None:
    check(backend, 1000, 100, rss_kib=16 << 10)


def many_lives(rank: Rank, backend: str, lives: int):
    maps = shuffles(2, len(ROW_NBYTES), rank.world_size, 4)
    model = Model(rank.rank, 4, ROW_NBYTES)
    model.fill(maps[0])
    config = case_config(backend, timeout_s=30)
    control, group = rank.control(), device_group(rank, backend)
    held, seen, meetings = 0, [], rank.store("meetings")

    def meet(number: int) -> None:
        """Nobody looks while another leaves, or begins its next life."""
        count = meetings.add("count", 1)
        while count < number * rank.world_size:
            time.sleep(1e-3)
            count = meetings.add("count", 0)

    for number in range(lives):
        with eplb.Communicator(config, model.weights, control, group, options=case_options()) as comm:
            comm.rearrange(maps[held], maps[1 - held])
        held = 1 - held
        meet(2 * number + 1)
        seen.append(footprint(rank))
        meet(2 * number + 2)
    return seen, model.wrong_rows(maps[held])


@every_backend_under_faults
@pytest.mark.slow
def test_twenty_communicators_one_after_another_leave_nothing_behind(backend: BackendCase) -> None:
    """Case 9."""
    for seen, wrong in run_ranks(2, many_lives, backend.name, 20, timeout_s=150, env=backend.env):
        assert wrong == []
        assert max(s["fds"] for s in seen[15:]) <= max(s["fds"] for s in seen[2:7])
        assert max(s["os threads"] for s in seen[15:]) <= max(s["os threads"] for s in seen[2:7])
        assert len({s["store keys"] for s in seen}) == 1


def hosted_lives(rank: Rank):
    dist.init_process_group("gloo", store=rank.store("world"), rank=rank.rank, world_size=rank.world_size)
    control = eplb.ControlPlane.from_process_group(dist.group.WORLD)
    maps = shuffles(2, len(ROW_NBYTES), rank.world_size, 4)
    model = Model(rank.rank, 4, ROW_NBYTES)
    model.fill(maps[0])
    counts = []
    for name in ("first", "second"):
        counts.append(control.connection().num_keys())
        config = case_config("torch_gloo", timeout_s=30)
        with eplb.Communicator(config, model.weights, control, name=name) as comm:
            comm.rearrange(maps[0], maps[1])
            comm.rearrange(maps[1], maps[0])
        if rank.rank == 0:  # which leaves last
            counts.append(control.connection().num_keys())
        dist.barrier()
    return counts


def test_the_rank_that_hosts_the_store_leaves_it_as_it_was() -> None:
    before, after, *others = run_ranks(2, hosted_lives)[0]
    assert before == after
    assert others == [before, before]
