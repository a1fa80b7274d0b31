"""Weights on a device: landing on the host, copies on the caller's stream, and nobody early.

The device is the fake one of tests/support: its streams run behind, and the host cannot reach its memory.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import pytest
import torch

import eplb_core as eplb
from eplb_core.errors import StalledError
from eplb_core.hookspecs import hookimpl
from eplb_core.memory.streams import Streams
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks

SUPPORT = str(Path(__file__).parent / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)

import fake_device  # noqa: E402

ROW_NBYTES = [[2048, 8], [300_000, 8], [2048, 8]]


@pytest.fixture(autouse=True)
def _device():
    fake_device.require()
    yield
    fake_device.reset()


def config(**fields) -> eplb.EPLBConfig:
    return eplb.EPLBConfig(**{"communicator": "torch_gloo", "use_async": False, "timeout_s": 30, **fields})


def late_device(rank: Rank, staging_layers: int):
    fake_device.load()
    maps = shuffles(4, len(ROW_NBYTES), rank.world_size, 4, redundant=2)
    model = Model(rank.rank, 4, ROW_NBYTES, device="eplbdev")
    model.fill(maps[0])
    stream = torch.accelerator.current_stream()
    wrong = []
    with eplb.Communicator(config(staging_layers=staging_layers), model.weights, rank.control()) as comm:
        for old, new in itertools.pairwise(maps):
            fake_device.delay(stream, 0.005)  # every copy on the engine's stream begins late
            comm.rearrange(old, new)
            fake_device.delay(stream, 0.0)
            wrong += model.wrong_rows(new)
    return wrong


@pytest.mark.parametrize("staging_layers", [1, 2])
def test_device_weights_move_exactly_although_the_device_runs_behind(staging_layers: int) -> None:
    assert run_ranks(2, late_device, staging_layers, timeout_s=90) == [[], []]


class WhenTransfersStart:
    """Notes, at every transfer, whether the copies of the commits before it are done."""

    name = "when transfers start"

    def __init__(self) -> None:
        self.commits: list[torch.Event] = []
        self.transfers: list[tuple[int, list[bool]]] = []

    @hookimpl(wrapper=True)
    def transfer(self, plan):
        self.transfers.append((plan.layer, [event.query() for event in self.commits]))
        return (yield)

    @hookimpl
    def observe(self, event):
        if event.kind == "commit":
            done = torch.Event(device="eplbdev")
            done.record(torch.accelerator.current_stream())
            self.commits.append(done)


def slow_commits(rank: Rank, staging_layers: int):
    fake_device.load()
    old, new = shuffles(2, 3, rank.world_size, 4)
    model = Model(rank.rank, 4, [[2048]] * 3, device="eplbdev")
    model.fill(old)
    torch.accelerator.synchronize()
    watcher = WhenTransfersStart()
    with eplb.Communicator(
        config(staging_layers=staging_layers), model.weights, rank.control(), observers=[watcher]
    ) as comm:
        generation = comm.begin(old, new)
        fake_device.delay(torch.accelerator.current_stream(), 0.2)
        for layer in generation.layers:
            generation.stage(layer)
            generation.commit(layer)
        generation.end()
        fake_device.delay(torch.accelerator.current_stream(), 0.0)
    return watcher.transfers, model.wrong_rows(new)


@pytest.mark.parametrize("staging_layers", [1, 2])
def test_a_slot_is_leased_until_the_copies_of_its_commit_are_done_on_the_device(staging_layers: int) -> None:
    """Case 13 and I11: the commit is 200 ms late, and the layer that takes its slot waits."""
    for transfers, wrong in run_ranks(2, slow_commits, staging_layers, timeout_s=90):
        assert wrong == []
        for layer, commits in transfers:
            before = layer - staging_layers + 1  # commits out of the slot that this layer takes, and earlier ones
            assert all(commits[: max(0, before)]), (layer, commits)


def torn_reads(rank: Rank):
    """The next agree ballot goes out only when this rank's commits are done on the device."""
    fake_device.load()
    maps = shuffles(3, 2, rank.world_size, 4)
    model = Model(rank.rank, 4, [[2048]] * 2, device="eplbdev")
    model.fill(maps[0])
    stream = torch.accelerator.current_stream()
    with eplb.Communicator(config(), model.weights, rank.control()) as comm:
        if rank.rank == 1:
            fake_device.delay(stream, 0.05)
        comm.rearrange(maps[0], maps[1])
        started = time.monotonic()
        comm.rearrange(maps[1], maps[2])
        seconds = time.monotonic() - started
        fake_device.delay(stream, 0.0)
    return seconds, model.wrong_rows(maps[2])


def test_a_rank_whose_commit_still_runs_does_not_agree_to_be_read() -> None:
    for _, wrong in run_ranks(2, torn_reads, timeout_s=90):
        assert wrong == []


def test_an_event_that_never_happens_is_waited_for_and_not_passed() -> None:
    fake_device.load()
    streams = Streams(torch.device("eplbdev"), None, timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(StalledError, match="this rank's own stream"):
        streams.wait_for([fake_device.unrecorded_event()])
    assert 0.3 <= time.monotonic() - started < 2.0


def test_an_event_is_marked_on_the_callers_current_stream() -> None:
    fake_device.load()
    streams = Streams(torch.device("eplbdev"), None, timeout_s=5.0)
    other = torch.Stream(device="eplbdev")
    with fake_device.held(other):
        with other:
            late = streams.mark()
        early = streams.mark()
        streams.wait_for([early])
        assert not late.query()
    streams.wait_for([late])
    assert late.query()


def test_on_cpu_there_is_nothing_to_wait_for() -> None:
    streams = Streams(torch.device("cpu"), None, timeout_s=5.0)
    assert streams.mark() is None
    assert streams.side is None
    streams.wait_for([None])
