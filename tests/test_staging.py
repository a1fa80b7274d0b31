"""Staging: torch's own allocator hands out buffers, keeps those a device still uses, and counts their bytes."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.backend import StagingAllocator, StagingBlock, StagingStats
from eplb_core.errors import TransferError
from eplb_core.memory.staging import TorchStaging

SUPPORT = Path(__file__).parent / "support"
if str(SUPPORT) not in sys.path:
    sys.path.insert(0, str(SUPPORT))

import fake_device  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def device():
    yield fake_device.require()
    if fake_device.why_not() is None:
        fake_device.reset()


def refusal(call, *arguments):
    with pytest.raises(TransferError) as caught:
        call(*arguments)
    assert caught.value.code == "EPLB-T010"
    return str(caught.value)


def test_it_is_a_staging_allocator():
    assert isinstance(TorchStaging(CPU), StagingAllocator)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 1 << 20])
def test_a_block_is_contiguous_bytes_that_start_at_a_multiple_of_64(nbytes):
    data = TorchStaging(CPU).allocate(nbytes, CPU).data
    assert (data.dtype, data.shape, data.device) == (torch.uint8, (nbytes,), CPU)
    assert data.is_contiguous()
    assert data.data_ptr() % 64 == 0


def test_host_memory_for_weights_on_the_cpu_is_not_pinned():
    assert not TorchStaging(CPU).pins_host_memory
    assert not TorchStaging(CPU).allocate(8, CPU).data.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("index", ["", ":0"])
def test_that_torch_sees_no_cuda_device_is_said(index):
    staging = TorchStaging(torch.device(f"cuda{index}"))
    assert "torch sees no cuda device here" in refusal(staging.allocate, 8, CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_host_memory_for_weights_on_cuda_is_pinned_and_kept_until_its_event():
    cuda = torch.device("cuda", torch.cuda.device_count() - 1)
    staging = TorchStaging(cuda)
    block = staging.allocate(64 << 20, CPU)
    assert block.data.is_pinned()
    source = torch.full((64 << 20,), 3, dtype=torch.uint8, device=cuda)
    with torch.cuda.device(cuda):
        torch.cuda._sleep(1 << 28)
        block.data.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    staging.release(block, event)
    assert staging.stats().nbytes_pool == 64 << 20
    event.synchronize()
    assert staging.stats() == StagingStats(0, 64 << 20, 0)


def test_host_memory_for_weights_on_an_accelerator_is_pinned(device):
    assert TorchStaging(device).allocate(8, CPU).data.is_pinned()


def test_device_memory_lies_on_the_weights_own_device(device):
    second = torch.device(device.type, 1)
    assert TorchStaging(second).allocate(8, second).data.device == second
    assert TorchStaging(second).allocate(8, torch.device(device.type)).data.device == second


def test_memory_on_any_other_device_is_refused(device):
    assert "eplbdev:1 was asked for where the weights are on eplbdev:0" in refusal(
        TorchStaging(device).allocate, 8, torch.device(device.type, 1)
    )
    assert "meta was asked for where the weights are on cpu" in refusal(
        TorchStaging(CPU).allocate, 8, torch.device("meta")
    )


def test_a_block_made_in_inference_mode_can_be_written_outside_of_it():
    with torch.inference_mode():
        data = TorchStaging(CPU).allocate(8, CPU).data
    assert data.fill_(1).sum() == 8


def test_a_negative_size_is_refused():
    assert "-1 bytes were asked for" in refusal(TorchStaging(CPU).allocate, -1, CPU)


def test_memory_that_cannot_be_had_is_a_typed_error_with_the_size_and_what_is_held():
    staging = TorchStaging(CPU)
    kept = staging.allocate(100, CPU)
    text = refusal(staging.allocate, 1 << 60, CPU)
    assert f"{1 << 60} bytes on cpu could not be allocated beside 100 in use and 0 waiting" in text
    assert staging.stats() == StagingStats(100, 100, 0)
    staging.release(kept)


def test_bytes_in_use_fall_at_release_and_the_peak_stays():
    staging = TorchStaging(CPU)
    first, second = staging.allocate(100, CPU), staging.allocate(50, CPU)
    assert staging.stats() == StagingStats(150, 150, 0)
    staging.release(first)
    assert staging.stats() == StagingStats(50, 150, 0)
    third = staging.allocate(60, CPU)
    assert staging.stats() == StagingStats(110, 150, 0)
    staging.release(second)
    staging.release(third)
    assert staging.stats() == StagingStats(0, 150, 0)


@given(st.lists(st.integers(0, 500) | st.none(), max_size=30))
@settings(deadline=None)
def test_counts_follow_any_order_of_allocations_and_releases(steps):
    staging, held, peak = TorchStaging(CPU), [], 0
    for step in steps:
        if step is not None:
            held.append(staging.allocate(step, CPU))
        elif held:
            staging.release(held.pop(len(held) // 2))
        in_use = sum(len(block.data) for block in held)
        peak = max(peak, in_use)
        assert staging.stats() == StagingStats(in_use, peak, 0)


def test_a_released_block_without_an_event_is_not_kept():
    staging = TorchStaging(CPU)
    block = staging.allocate(1 << 20, CPU)
    data = weakref.ref(block.data)
    staging.release(block)
    del block
    gc.collect()
    assert data() is None


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_block_is_kept_until_the_event_that_guards_it_has_completed(device, place):
    staging = TorchStaging(device)
    stream = torch.Stream(device=device)
    block = staging.allocate(4096, CPU if place == "host" else device)
    data, address = weakref.ref(block.data), block.data.data_ptr()
    source = torch.full((4096,), 5, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    with fake_device.held(stream):
        with stream:
            block.data.copy_(source, non_blocking=True)
            event = stream.record_event()
        staging.release(block, event)
        del block
        gc.collect()
        assert staging.stats() == StagingStats(0, 4096, 4096)
        others = [staging.allocate(4096, CPU if place == "host" else device) for _ in range(8)]
        assert address not in {other.data.data_ptr() for other in others}
        assert data() is not None
    event.synchronize()
    assert staging.stats() == StagingStats(8 * 4096, 8 * 4096, 0)
    gc.collect()
    assert data() is None


def test_an_event_that_has_completed_already_keeps_nothing(device):
    staging = TorchStaging(device)
    event = torch.accelerator.current_stream().record_event()
    event.synchronize()
    staging.release(staging.allocate(8, CPU), event)
    assert staging.stats() == StagingStats(0, 8, 0)


def test_a_block_is_released_once():
    staging = TorchStaging(CPU)
    block = staging.allocate(8, CPU)
    staging.release(block)
    assert "a block of 8 bytes was released twice" in refusal(staging.release, block)
    assert staging.stats() == StagingStats(0, 8, 0)


def test_a_block_of_another_allocator_is_refused():
    staging = TorchStaging(CPU)
    for block in (TorchStaging(CPU).allocate(8, CPU), StagingBlock(torch.zeros(8, dtype=torch.uint8), None)):
        assert "did not hand out" in refusal(staging.release, block)
    assert staging.stats() == StagingStats(0, 0, 0)


def test_an_event_that_cannot_be_asked_is_refused_and_the_block_stays_in_use():
    staging = TorchStaging(CPU)
    block = staging.allocate(8, CPU)
    assert "a int is not an event" in refusal(staging.release, block, 3)
    assert staging.stats() == StagingStats(8, 8, 0)
    staging.release(block)


def test_the_failure_of_a_device_is_not_taken_for_the_end_of_its_work(device):
    staging = TorchStaging(device)
    stream = torch.Stream(device=device)
    block = staging.allocate(8, CPU)
    data = weakref.ref(block.data)
    with fake_device.held(stream):
        fake_device.fail(stream, "uncorrectable memory error")
        event = stream.record_event()
        staging.release(block, event)
        del block
    with pytest.raises(RuntimeError, match="uncorrectable memory error"):
        event.synchronize()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="uncorrectable memory error"):
            staging.stats()
    assert data() is not None


def test_counts_are_exact_when_threads_allocate_and_release_at_once():
    staging = TorchStaging(CPU)
    gate = threading.Barrier(4)

    def work(nbytes):
        gate.wait(timeout=30)
        for _ in range(300):
            staging.release(staging.allocate(nbytes, CPU))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, [1, 10, 100, 1000], timeout=60))
    finally:
        sys.setswitchinterval(interval)
    stats = staging.stats()
    assert (stats.nbytes_in_use, stats.nbytes_pool) == (0, 0)
    assert stats.nbytes_peak <= 1111


def test_a_thousand_leases_leave_nothing_behind():
    staging = TorchStaging(CPU)
    for _ in range(1000):
        staging.release(staging.allocate(1 << 16, CPU))
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.numel() == 1 << 16]
    assert not tensors
    assert staging.stats() == StagingStats(0, 1 << 16, 0)
