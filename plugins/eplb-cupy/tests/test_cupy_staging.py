"""Backends staging through CuPy: device weights over torch_gloo, staged nixl, memory that comes back when it may."""

from __future__ import annotations

import gc
import itertools
import logging

import fake_device
import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.errors import ConfigError
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks
from eplb_cupy.pinned import CupyPinned
from tests.support import pinned_on_host

CPU = torch.device("cpu")
LAYERS = [[300_000, 2048, 8], [2048, 64, 8], [300_000, 2048, 8]]
ROWS = 4


@pytest.fixture(autouse=True)
def _memory(pool):
    """Skip where CuPy has no host memory to give."""


def communicator(rank: Rank, weights, backend: str = "torch_gloo", options=None, **fields) -> eplb.Communicator:
    config = {"communicator": backend, "staging": "cupy_pinned", "use_async": False, "timeout_s": 30, **fields}
    return eplb.Communicator(eplb.EPLBConfig(**config), weights, rank.control(), options=options)


def moves(rank: Rank, device: str, backend: str = "torch_gloo", options=None, staging_layers: int = 2, layers=LAYERS):
    """Rearrange; return the wrong rows, whether all staging was CuPy's, its counts, and what was left after close."""
    pool = pinned_on_host.install()
    if device != "cpu":
        fake_device.load()
    maps = shuffles(3, len(layers), rank.world_size, ROWS, redundant=2)
    model = Model(rank.rank, ROWS, layers, device=device)
    model.fill(maps[0])
    before = dict(pinned_on_host.held), pool.n_free_blocks()
    wrong = []
    with communicator(rank, model.weights, backend, options, staging_layers=staging_layers) as comm:
        for old, new in itertools.pairwise(maps):
            comm.rearrange(old, new)
            wrong += model.wrong_rows(new)
        landing = [slot.untyped_storage().data_ptr() for slot in comm._lives.epoch.landing.slots]
        is_cupys = all(address in pinned_on_host.held for address in landing)
        allocator = comm._lives.epoch.setup.allocator
        counted = allocator.stats()  # the report adds spare rows, which only some placements need
    del comm
    if device != "cpu":
        torch.accelerator.synchronize()  # close does not wait for the event that guards landing memory
    after = allocator.stats()
    gc.collect()
    lent = len(pinned_on_host.held) - pool.n_free_blocks()
    assert before == ({}, 0)
    return wrong, is_cupys, counted, (after.nbytes_in_use, after.nbytes_pool, lent)


@pytest.mark.parametrize("staging_layers", [1, 2])
def test_device_rows_arrive_exactly_by_way_of_cupys_memory_which_is_all_back_after_close(device, staging_layers):
    for wrong, is_cupys, staging, left in run_ranks(3, moves, "eplbdev", "torch_gloo", None, staging_layers):
        assert wrong == []
        assert is_cupys
        assert staging.nbytes_peak == staging.nbytes_in_use > 0
        assert left == (0, 0, 0)


@pytest.mark.parametrize("transport", ["tcp", ""])
def test_staged_nixl_reads_send_buffers_of_cupys_and_gives_them_back(monkeypatch, transport):
    env = {"UCX_TLS": transport} if transport else {}
    for wrong, is_cupys, staging, left in run_ranks(3, moves, "cpu", "nixl", {"mode": "staged"}, env=env):
        assert wrong == []
        assert is_cupys
        one_layer = ROWS * sum(LAYERS[0])
        assert 4 * one_layer <= staging.nbytes_in_use < 4 * (one_layer + (64 << 10))  # two slots to send, two to land
        assert left == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device_type", "backend", "options", "layers"),
    [
        ("eplbdev", "torch_gloo", None, LAYERS),
        # torch_gloo packs small host rows, for each peer again as far as one slot holds them: here all of them do.
        ("cpu", "torch_gloo", None, [[40_000, 2048, 8]] * 3),
        ("cpu", "nixl", {"mode": "staged"}, LAYERS),
    ],
    ids=["torch_gloo device", "torch_gloo host", "nixl staged"],
)
def test_the_report_shows_the_same_memory_at_two_and_at_four_ranks(device, device_type, backend, options, layers):
    shown = [
        (staging.nbytes_in_use, staging.nbytes_peak, staging.nbytes_pool)
        for world_size in (2, 4)
        for _, _, staging, _ in run_ranks(world_size, moves, device_type, backend, options, 2, layers)
    ]
    print(shown[0])
    assert shown == shown[:1] * 6
    assert shown[0][0] > 0


def closes_while_its_commit_is_queued(rank: Rank):
    """Commit behind a device that does not begin, close, have CuPy hand out all it has, write over it, go on."""
    fake_device.load()
    pinned_on_host.install()
    old, new = shuffles(2, 2, rank.world_size, ROWS)
    model = Model(rank.rank, ROWS, [[70_000]] * 2, device="eplbdev")
    model.fill(old)
    stream = torch.accelerator.current_stream()
    comm = communicator(rank, model.weights)
    generation = comm.begin(old, new)
    for layer in generation.layers:
        generation.stage(layer)
    landing = {slot.data_ptr(): len(slot) for slot in comm._lives.epoch.landing.slots}
    fake_device.hold(stream)
    with fake_device.host_memory_not_kept():
        for layer in generation.layers:
            generation.commit(layer)
    generation.end()
    comm.close()
    del comm, generation
    gc.collect()
    staging = CupyPinned(torch.device("eplbdev", 0))
    early = [staging.allocate(nbytes, CPU) for nbytes in landing.values() for _ in range(4)]
    for block in early:
        block.data.fill_(0xEE)
    fake_device.release(stream)
    torch.accelerator.synchronize()
    committed = model.wrong_rows(new)
    staging.stats()
    gc.collect()
    late = [staging.allocate(nbytes, CPU) for nbytes in landing.values()]
    for block in late:
        block.data.fill_(0xEE)
    return (
        bool(set(landing) & {block.data.data_ptr() for block in early}),
        set(landing) == {block.data.data_ptr() for block in late},
        committed,
        model.wrong_rows(new),
    )


def test_landing_memory_is_not_handed_out_again_before_the_commits_that_read_it_are_done(device):
    """The pool does hand it out again, after that, and then nobody reads it any more."""
    for handed_out_early, handed_out_late, committed, afterwards in run_ranks(2, closes_while_its_commit_is_queued):
        assert not handed_out_early
        assert handed_out_late
        assert committed == []
        assert afterwards == []


def rebuilds(rank: Rank, times: int):
    fake_device.load()
    pinned_on_host.install()
    maps = shuffles(2, 2, rank.world_size, ROWS)
    model = Model(rank.rank, ROWS, [[3 << 20], [64]], device="eplbdev")
    model.fill(maps[0])
    seen = []
    with communicator(rank, model.weights) as comm:
        for number in range(times):
            report = comm.rearrange(maps[number % 2], maps[1 - number % 2])
            gc.collect()
            seen.append((report.staging, sum(pinned_on_host.held.values())))
            comm.rebuild(20)
    return seen, model.wrong_rows(maps[times % 2])


@pytest.mark.slow
def test_rebuilding_takes_no_further_memory(device):
    for seen, wrong in run_ranks(2, rebuilds, 4, timeout_s=90):
        assert wrong == []
        assert len({staging for staging, _ in seen}) == 1
        assert len({held for _, held in seen}) == 1


def alone(*, backend: str, device: str = "cpu", **fields) -> eplb.Communicator:
    import torch.distributed as dist

    store = dist.HashStore()
    control = eplb.ControlPlane.from_store(store, rank=0, world_size=1)
    weights = [[torch.zeros(2, 8, device=device)]]
    return eplb.Communicator(
        eplb.EPLBConfig(communicator=backend, use_async=False, **fields), weights, control, name=f"{backend} {fields}"
    )


def test_the_allocator_is_named_in_one_line_with_what_it_is_made_of(caplog):
    with caplog.at_level(logging.INFO, "eplb_core"), alone(backend="torch_gloo", staging="cupy_pinned"):
        pass
    (line,) = (text for text in caplog.messages if text.startswith("EPLB staging"))
    assert line.startswith("EPLB staging cupy_pinned for torch_gloo: named in the configuration (cupy: 1")
    assert "host memory: as the installed allocator gives it" in line


@pytest.mark.parametrize(
    ("backend", "device_type", "staging", "reason"),
    [
        ("nixl", "eplbdev", "cupy_pinned", "nixl stages in device memory, and it has host memory only"),
        ("torch_gloo", "cpu", "cupy_device", "it stages for cuda, not for cpu"),
    ],
)
def test_an_allocator_of_the_other_memory_is_refused_when_the_communicator_is_built(
    device, backend, device_type, staging, reason
):
    with pytest.raises(ConfigError, match=reason) as caught:
        alone(backend=backend, device=device_type, staging=staging)
    assert caught.value.code == "EPLB-C014"


def large_rows(rank: Rank, backend: str, options):
    pinned_on_host.install()
    old, new = np.array([[0, 1]]), np.array([[1, 0]])
    weights = [[torch.full((1, 33 << 20), rank.rank + 1, dtype=torch.uint8)]]
    with communicator(rank, weights, backend, options, staging_layers=1) as comm:
        staging = comm.rearrange(old, new).staging
    return bool((weights[0][0] == 2 - rank.rank).all()), staging.nbytes_peak, max(pinned_on_host.sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options", "slots"), [("torch_gloo", None, 1), ("nixl", {"mode": "staged"}, 2)], ids=["gloo", "nixl"]
)
def test_rows_of_33_mib_are_staged_in_33_mib(backend, options, slots):
    for right, peak, largest in run_ranks(2, large_rows, backend, options):
        assert right
        assert peak == slots * (33 << 20)
        assert largest == 33 << 20
