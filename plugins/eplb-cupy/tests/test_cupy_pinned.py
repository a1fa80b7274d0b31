"""``cupy_pinned``: blocks are CuPy's memory and no copy, rounded little, and given back when their event says so."""

from __future__ import annotations

import gc

import fake_device
import pytest
import torch

from eplb_core.backend import StagingAllocator, StagingStats
from eplb_core.errors import TransferError
from eplb_cupy.pinned import CupyPinned
from tests.support import pinned_on_host

CPU = torch.device("cpu")
MIB = 1 << 20
CHUNK = 64 << 10


def refusal(call, *arguments) -> str:
    with pytest.raises(TransferError) as caught:
        call(*arguments)
    assert caught.value.code == "EPLB-T010"
    return str(caught.value)


def taken_from_the_system() -> int:
    gc.collect()
    return sum(pinned_on_host.held.values())


def test_it_is_a_staging_allocator(pool):
    assert isinstance(CupyPinned(CPU), StagingAllocator)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, MIB, MIB + 1, 33 * MIB])
def test_a_block_is_cupys_own_memory_as_contiguous_bytes(pool, nbytes):
    data = CupyPinned(CPU).allocate(nbytes, CPU).data
    assert (data.dtype, data.shape, data.device) == (torch.uint8, (nbytes,), CPU)
    assert data.is_contiguous()
    address = data.untyped_storage().data_ptr()
    assert address % 64 == 0
    assert pinned_on_host.held[address] >= nbytes
    data.fill_(7)
    assert not nbytes or int(data[-1]) == 7


def test_a_block_of_33_mib_takes_33_and_not_64(pool):
    staging = CupyPinned(CPU)
    before = taken_from_the_system()
    block = staging.allocate(33 * MIB, CPU)
    assert (
        taken_from_the_system() - before <= 33 * MIB + 1024
    )  # and a first small piece by which CuPy's memory is known
    assert staging.stats() == StagingStats(33 * MIB, 33 * MIB, 0, 0)
    staging.release(block)


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [
        (1, 512),
        (1000, 1024),
        (600_000, MIB),
        (MIB, MIB),
        (MIB + 1, MIB + CHUNK),
        (2 * MIB + 1, 2 * MIB + CHUNK),
        (33 * MIB - 1, 33 * MIB),
        (64 * MIB, 64 * MIB),
    ],
)
def test_what_rounding_adds_is_counted_and_less_than_a_chunk_in_large_blocks(pool, nbytes, taken):
    staging = CupyPinned(CPU)
    block = staging.allocate(nbytes, CPU)
    assert pinned_on_host.held[block.data.data_ptr()] == taken
    assert staging.stats() == StagingStats(taken, taken, 0, taken - nbytes)
    staging.release(block)
    assert staging.stats() == StagingStats(0, taken, 0, 0)


def test_an_allocator_of_other_memory_is_used_as_it_is_and_its_rounding_counted(pool):
    import cupy

    class Arena:  # no PinnedMemory, so nobody knows how to make another size of it
        def __init__(self, size):
            self.kept = bytearray(size + 64)
            start = torch.frombuffer(self.kept, dtype=torch.uint8).data_ptr()
            self.ptr, self.size = start + -start % 64, size

    arenas = cupy.cuda.PinnedMemoryPool(lambda nbytes: cupy.cuda.PinnedMemoryPointer(Arena(nbytes), 0))
    cupy.cuda.set_pinned_memory_allocator(arenas.malloc)
    try:
        staging = CupyPinned(CPU)
        block = staging.allocate(3 * MIB, CPU)
        assert staging.stats() == StagingStats(4 * MIB, 4 * MIB, 0, MIB)
        staging.release(block)
    finally:
        cupy.cuda.set_pinned_memory_allocator(pool.malloc)


@pytest.mark.parametrize("nbytes", [4096, 3 * MIB])
def test_released_memory_goes_back_at_once_without_an_event(pool, nbytes):
    staging = CupyPinned(CPU)
    block = staging.allocate(nbytes, CPU)
    address = block.data.data_ptr()
    free = pool.n_free_blocks()
    staging.release(block)
    del block
    gc.collect()
    if nbytes > MIB:
        assert address not in pinned_on_host.held
    else:
        assert pool.n_free_blocks() == free + 1
        assert staging.allocate(nbytes, CPU).data.data_ptr() == address


@pytest.mark.parametrize("nbytes", [4096, 3 * MIB])
@pytest.mark.parametrize("keeps_the_allocator", [True, False])
def test_memory_goes_back_only_after_the_event_that_guards_it(pool, device, nbytes, keeps_the_allocator):
    staging = CupyPinned(device)
    stream = torch.Stream(device=device)
    target = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    block = staging.allocate(nbytes, CPU)
    block.data.fill_(5)
    address = block.data.data_ptr()
    torch.accelerator.synchronize()
    with fake_device.held(stream):
        with stream, fake_device.host_memory_not_kept():
            target.copy_(block.data, non_blocking=True)
            event = stream.record_event()
        staging.release(block, event)
        del block
        if keeps_the_allocator:
            assert staging.stats().nbytes_pool == nbytes
        else:
            del staging
        gc.collect()
        others = [CupyPinned(device).allocate(nbytes, CPU) for _ in range(4)]
        assert address not in {other.data.data_ptr() for other in others}
        for other in others:
            other.data.fill_(0xEE)
    event.synchronize()
    assert bool((target.cpu() == 5).all())
    (staging if keeps_the_allocator else CupyPinned(device)).stats()
    gc.collect()
    if nbytes > MIB:
        assert address not in pinned_on_host.held
    else:
        assert CupyPinned(device).allocate(nbytes, CPU).data.data_ptr() == address


def test_memory_that_a_tensor_still_shows_is_not_handed_out_again(pool):
    staging = CupyPinned(CPU)
    block = staging.allocate(4096, CPU)
    view = block.data[:16]
    address = view.data_ptr()
    staging.release(block)
    del block
    gc.collect()
    assert staging.allocate(4096, CPU).data.data_ptr() != address


def test_a_thousand_leases_take_no_more_than_one(pool):
    staging = CupyPinned(CPU)
    for nbytes in (5000, 3 * MIB):
        first = staging.allocate(nbytes, CPU)
        staging.release(first)
        del first
        before = taken_from_the_system()
        for _ in range(1000 if nbytes < MIB else 50):
            staging.release(staging.allocate(nbytes, CPU))
        assert taken_from_the_system() == before


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.uint16,
    ],
)
def test_other_dtypes_are_views_of_torchs_on_the_same_bytes(pool, dtype):
    block = CupyPinned(CPU).allocate(256, CPU)
    block.data.copy_(torch.arange(256, dtype=torch.uint8))
    view = block.data.view(dtype)
    assert view.data_ptr() == block.data.data_ptr()
    assert view.view(torch.uint8).tolist() == list(range(256))


def test_a_block_made_in_inference_mode_can_be_written_outside_of_it(pool):
    with torch.inference_mode():
        data = CupyPinned(CPU).allocate(8, CPU).data
    assert data.fill_(1).sum() == 8


def test_device_memory_and_negative_sizes_are_refused(pool, device):
    assert "cupy_pinned has host memory only, and memory on eplbdev:0" in refusal(
        CupyPinned(device).allocate, 8, device
    )
    assert "-1 bytes were asked for" in refusal(CupyPinned(CPU).allocate, -1, CPU)


def test_a_block_is_released_once_and_to_its_own_allocator(pool):
    staging, other = CupyPinned(CPU), CupyPinned(CPU)
    block = staging.allocate(8, CPU)
    assert "did not hand out" in refusal(other.release, block)
    staging.release(block)
    assert "a block of 8 bytes was released twice" in refusal(staging.release, block)


def test_memory_that_cannot_be_had_is_a_typed_error_with_the_allocators_words(pool):
    import cupy

    staging = CupyPinned(CPU)
    kept = staging.allocate(1000, CPU)

    def refuse(nbytes):
        raise cupy.cuda.runtime.CUDARuntimeError(2)

    cupy.cuda.set_pinned_memory_allocator(refuse)
    try:
        text = refusal(staging.allocate, 5000, CPU)
    finally:
        cupy.cuda.set_pinned_memory_allocator(pool.malloc)
    assert "5000 bytes of page-locked memory could not be allocated beside 1024 in use and 0 waiting" in text
    assert "CUDARuntimeError: cudaErrorMemoryAllocation" in text
    assert staging.stats() == StagingStats(1024, 1024, 0, 24)
    staging.release(kept)
