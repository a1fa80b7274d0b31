"""The store's host dies: who hosts the next one, and where, is known beforehand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.errors import ConfigError
from eplb_core.testing.ranks import Rank, run_ranks
from tests.support.addresses import free_range
from tests.support.backends import BackendCase
from tests.support.lives import over_gloo_and_nixl

SCRIPT = Path(__file__).parents[2] / "examples" / "lost_store" / "lost_store.py"


@over_gloo_and_nixl
@pytest.mark.slow
def test_survivors_go_on_over_a_new_store_with_all_experts(backend: BackendCase) -> None:
    command = [sys.executable, str(SCRIPT), "--backend", backend.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exit codes [-9, 0, 0]" in done.stdout
    said = re.findall(r"rank \d: right bytes, 0 experts unmet, (\d+) bytes from the source", done.stdout)
    assert len(said) == 2
    assert sum(map(int, said)) == 4 * 4000  # one row of expert 5 in each of four layers


def makes_a_new_store(rank: Rank, ports):
    dist.init_process_group("gloo", store=rank.store("world"), rank=rank.rank, world_size=rank.world_size)
    control = eplb.ControlPlane.from_process_group(dist.group.WORLD, ports=ports, standby=True)
    refused = []
    with pytest.raises(ConfigError) as caught:
        control.renewed([rank.rank + 1, 9], timeout_s=1)
    refused.append(str(caught.value))
    if rank.rank == 0:
        dist.barrier()
        return refused, None, None
    second = control.renewed([1, 2, 3], timeout_s=10)
    third = second.renewed([2, 3], timeout_s=10) if rank.rank > 1 else None
    hosts = [plane.hosts_store for plane in (second, third) if plane is not None]
    if third is not None:
        client = third.client("test", 5)
        client.set(str(rank.rank), b"1")
        while not client.exists("2", "3"):
            pass
    dist.barrier()
    return refused, hosts, (third or second).private


@pytest.mark.parametrize("limited", [False, True], ids=["any port", "a range"])
def test_the_lowest_rank_that_is_left_hosts_the_next_store_time_after_time(limited: bool) -> None:
    ports = free_range(9) if limited else None
    outcomes = run_ranks(4, makes_a_new_store, ports)
    assert [hosts for _, hosts, _ in outcomes] == [None, [True], [False, True], [False, False]]
    assert all("must be ranks of the group" in text for refused, _, _ in outcomes for text in refused)


def has_no_port(rank: Rank):
    control = rank.control()
    with pytest.raises(ConfigError) as unknown:
        control.renewed([0, 1])
    low, _ = free_range(2) if rank.rank == 0 else (0, 0)
    if rank.rank == 0:
        rank.store("notes").set("port", str(low))
    port = int(rank.store("notes").get("port"))
    late = ""
    if rank.rank == 1:
        with pytest.raises(ConfigError) as caught:
            control.renewed([0, 1], 0.5, host="127.0.0.1", port=port)
        late = str(caught.value)
    rank.store("notes").add("tried", 1)
    while int(rank.store("notes").add("tried", 0)) < 2:
        pass
    new = control.renewed([0, 1], 10, host="127.0.0.1", port=port)
    client = new.client("test", 5)
    client.set(str(rank.rank), b"1")
    while not client.exists("0", "1"):
        pass
    rank.store("notes").add("met", 1)
    while int(rank.store("notes").add("met", 0)) < 2:
        pass
    return str(unknown.value), late


def test_over_a_store_of_the_hosts_own_the_address_is_given() -> None:
    outcomes = run_ranks(2, has_no_port)
    for number, (unknown, late) in enumerate(outcomes):
        assert "nobody knows where rank 0 hosts the store" in unknown
        if number == 1:
            assert "rank 0 hosts no store at 127.0.0.1:" in late
