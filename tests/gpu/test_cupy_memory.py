"""What only a GPU can show of CuPy's staging memory: page-locked, on the device, exportable, and kept for its event."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

EXPORTABLE = """
import torch
from eplb_cupy.device import CupyDevice
from eplb_nixl.registration import cannot_be_exported, pieces_of
cuda = torch.device("cuda", 0)
mine = CupyDevice(cuda).allocate(32 << 20, cuda).data
torchs = torch.empty(32 << 20, dtype=torch.uint8, device=cuda)
print(*(cannot_be_exported(pieces_of([("it", memory)])) is None for memory in (mine, torchs)))
"""


@pytest.fixture
def cuda():
    pytest.importorskip("cupy")
    return torch.device("cuda", torch.cuda.device_count() - 1)


def test_host_blocks_are_page_locked_and_33_mib_take_33(cuda):
    from eplb_cupy.pinned import CupyPinned

    staging = CupyPinned(cuda)
    for nbytes in (4096, 33 << 20):
        block = staging.allocate(nbytes, torch.device("cpu"))
        assert block.data.is_pinned()
        staging.release(block)
    assert staging.stats().nbytes_peak == 33 << 20


def test_device_blocks_lie_on_the_weights_own_device_as_bytes(cuda):
    from eplb_cupy.device import CupyDevice

    staging = CupyDevice(cuda)
    block = staging.allocate(33 << 20, cuda)
    assert (block.data.device, block.data.dtype, block.data.shape) == (cuda, torch.uint8, (33 << 20,))
    assert block.data.fill_(7).sum(dtype=torch.int64).item() == 7 * (33 << 20)
    assert staging.stats().nbytes_in_use < 34 << 20
    staging.release(block)
    assert staging.stats().nbytes_in_use == 0


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_block_is_not_handed_out_again_before_its_event(cuda, place):
    from eplb_cupy.device import CupyDevice
    from eplb_cupy.pinned import CupyPinned

    staging = CupyPinned(cuda) if place == "cpu" else CupyDevice(cuda)
    where = torch.device("cpu") if place == "cpu" else cuda
    target = torch.zeros(4096, dtype=torch.uint8, device=cuda)
    block = staging.allocate(4096, where)
    block.data.fill_(5)
    torch.cuda.synchronize(cuda)
    with torch.cuda.device(cuda):
        torch.cuda._sleep(1 << 30)
        target.copy_(block.data, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    address = block.data.data_ptr()
    staging.release(block, event)
    del block
    others = [staging.allocate(4096, where) for _ in range(4)]
    assert address not in {other.data.data_ptr() for other in others} or event.query()
    event.synchronize()
    assert bool((target == 5).all())


def test_device_blocks_can_be_exported_where_torchs_memory_cannot():
    pytest.importorskip("cupy")
    pytest.importorskip("eplb_nixl")
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-c", EXPORTABLE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "False"]
