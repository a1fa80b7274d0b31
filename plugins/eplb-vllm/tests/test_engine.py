"""The real ``EplbState`` of vLLM with its step loop and worker thread: every row of every model after every step."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import on_cpu  # noqa: E402

if not on_cpu.is_there():
    pytest.skip(on_cpu.SKIP, allow_module_level=True)

import engine as engines  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def vllm():
    on_cpu.stand_in_for_an_accelerator()
    import eplb_vllm

    eplb_vllm.register()


def serve(rank, world, port, core, use_async, steps):
    config = engines.configuration(core, use_async=use_async)
    with engines.groups(rank, world, port, config):
        engine = engines.Engine(config, rank, world)
        engine.start()
        for _ in range(steps):
            engine.step()
            time.sleep(0.002)
        return {
            "wrong": engine.wrong,
            "changed": engine.changed(),
            "maps": engine.maps,
            "communicator": type(engine.communicator()).__name__,
            "lives": engine.worker_lives(),
        }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("communicator", ["torch_gloo", "nixl", "vmread"])
def test_every_row_is_what_the_committed_map_says_after_every_step(communicator, use_async, world):
    core = {"communicator": communicator}
    ranks = on_cpu.run(world, serve, world, on_cpu.free_port(), core, use_async, 150)
    assert {rank["communicator"] for rank in ranks} == {"CoreCommunicator"}
    assert [rank["wrong"] for rank in ranks] == [0] * world
    assert all(rank["maps"] == ranks[0]["maps"] for rank in ranks)
    assert ranks[0]["changed"] > 10
    assert all(rank["lives"] for rank in ranks)
