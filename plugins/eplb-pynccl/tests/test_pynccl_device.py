"""Weights on a device: NCCL moves device memory into device memory, after the engine's kernels and before its commit.

Real bindings over the stub library, which does to the memory of the fake device what NCCL's kernels would.
"""

from __future__ import annotations

import itertools
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import eplb_core as eplb
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks
from tests.support import stub_nccl
from tests.support.backends import backend_cases

SUPPORT = str(Path(__file__).parents[3] / "tests" / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)

import fake_device  # noqa: E402

ROW_NBYTES = [[2048, 8], [300_000, 8], [2048, 8]]
ENV = next((case.values[0].env for case in backend_cases() if case.id == "pynccl"), {})

pytestmark = pytest.mark.skipif(
    stub_nccl.compiler() is None or find_spec("nccl") is None or fake_device.why_not() is not None,
    reason="needs nccl4py, a C and a C++ compiler",
)


def late_device(rank: Rank, staging_layers: int):
    fake_device.load()
    maps = shuffles(4, len(ROW_NBYTES), rank.world_size, 4, redundant=2)
    model = Model(rank.rank, 4, ROW_NBYTES, device="eplbdev")
    model.fill(maps[0])
    stream = torch.accelerator.current_stream()
    config = eplb.EPLBConfig(communicator="pynccl_cpu", use_async=False, timeout_s=30, staging_layers=staging_layers)
    wrong, where = [], set()
    with fake_device.host_access(), eplb.Communicator(config, model.weights, rank.control()) as comm:
        for old, new in itertools.pairwise(maps):
            saved = [[tensor.clone() for tensor in layer] for layer in model.weights]
            for tensor in itertools.chain(*model.weights):
                tensor.zero_()
            torch.accelerator.synchronize()
            fake_device.delay(stream, 0.005)  # every copy on the engine's stream begins late
            for tensor, content in zip(itertools.chain(*model.weights), itertools.chain(*saved), strict=True):
                tensor.copy_(content, non_blocking=True)  # as an engine loads weights
            comm.rearrange(old, new)
            fake_device.delay(stream, 0.0)
            wrong += model.wrong_rows(new)
        where = {slot.device.type for slot in comm._lives.epoch.landing.slots}
    return wrong, where


@pytest.mark.parametrize("staging_layers", [1, 2])
def test_device_weights_move_exactly_although_the_device_runs_behind(staging_layers: int) -> None:
    fake_device.require()  # built once, before the ranks ask for it
    results = run_ranks(3, late_device, staging_layers, env=ENV, timeout_s=90)
    assert results == [([], {"eplbdev"})] * 3
