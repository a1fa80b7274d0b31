"""The real ``EplbState`` of vLLM with its step loop and worker thread: every row of every model after every step."""

from __future__ import annotations

import logging
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

from prometheus_client import REGISTRY  # noqa: E402

import engine as engines  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def vllm():
    on_cpu.stand_in_for_an_accelerator()
    import eplb_vllm

    eplb_vllm.register()


class Said(logging.Handler):
    """Keeps what the plugin logs."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def serve(rank, world, port, core, use_async, steps):
    said = Said()
    logger = logging.getLogger("vllm.plugins.eplb_vllm")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)  # which vLLM's entry points do for all of "vllm"
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
            "said": said.lines,
            "counted": REGISTRY.get_sample_value("eplb_layers_committed_total", {"communicator": "vllm-0"}),
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


@pytest.mark.parametrize(
    ("core", "landing"),
    [
        ({"communicator": "nixl"}, "vLLM's expert buffer"),
        ({"communicator": "nixl", "landing": "own"}, "2 layer(s) of the core's own memory"),
        ({}, "2 layer(s) of the core's own memory"),  # torch_gloo packs
    ],
)
def test_one_line_says_that_it_is_on_and_vllms_registry_counts(core, landing):
    ranks = on_cpu.run(2, serve, 2, on_cpu.free_port(), core, True, 30)
    (line,) = ranks[0]["said"]
    name = core.get("communicator", "torch_gloo")
    assert f"vllm-0 moves the expert weights of 3 layers over 2 ranks with {name} (named in the configuration)" in line
    assert f"rows land in {landing}; a failed rearrangement is dropped" in line
    assert ranks[1]["said"] == []
    assert [rank["counted"] for rank in ranks] == [ranks[0]["changed"]] * 2


def spawned(rank, port):
    on_cpu.stand_in_for_an_accelerator()
    import eplb_vllm

    eplb_vllm.register()
    return serve(rank.rank, rank.world_size, port, {"communicator": "nixl"}, True, 40)


@pytest.mark.slow
def test_ranks_that_are_spawned_and_import_vllm_themselves_do_the_same():
    from eplb_core.testing.ranks import run_ranks

    ranks = run_ranks(2, spawned, on_cpu.free_port(), timeout_s=150)
    assert [rank["wrong"] for rank in ranks] == [0, 0]
    assert ranks[0]["maps"] == ranks[1]["maps"]
    assert ranks[0]["changed"] > 0


def test_without_the_key_vllm_runs_its_own_code_and_comes_to_the_same_maps():
    plain = on_cpu.run(2, serve, 2, on_cpu.free_port(), None, False, 60)
    ours = on_cpu.run(2, serve, 2, on_cpu.free_port(), {"communicator": "torch_gloo"}, False, 60)
    assert {rank["communicator"] for rank in plain} == {"TorchDistGlooStagedEplbCommunicator"}
    assert [rank["wrong"] for rank in plain + ours] == [0] * 4
    assert plain[0]["maps"] == ours[0]["maps"]


def with_models(rank, world, port, core, use_async, stages):
    config = engines.configuration(core, use_async=use_async)
    with engines.groups(rank, world, port, config, stages):
        layers = 3 if rank < world // stages else 2
        engine = engines.Engine(config, rank % (world // stages), world // stages, models=2, layers=layers)
        engine.start()
        for _ in range(100):
            engine.step()
            time.sleep(0.002)
        return {
            "wrong": engine.wrong,
            "changed": engine.changed(),
            "names": [engine.communicator(i).mover.comm.name for i in range(2)],
            "lives": engine.worker_lives(),
        }


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("communicator", ["torch_gloo", "nixl"])
def test_two_models_share_a_control_plane_and_pipeline_stages_with_other_layers_do_not_meet(communicator, use_async):
    core = {"communicator": communicator}
    ranks = on_cpu.run(4, with_models, 4, on_cpu.free_port(), core, use_async, 2)
    assert [rank["wrong"] for rank in ranks] == [0] * 4
    assert all(rank["names"] == ["vllm-0", "vllm-1"] for rank in ranks)
    assert all(rank["changed"] > 10 and rank["lives"] for rank in ranks)


def drain(rank, world, port, core):
    """Drain when some layers of a cycle are committed, reload all weights, and go on."""
    config = engines.configuration(core, use_async=True)
    with engines.groups(rank, world, port, config):
        engine = engines.Engine(config, rank, world, layers=4)
        engine.start()
        model, state = engine.models[0], engine.model_state()
        drained = 0
        for _ in range(3):
            for _ in range(60):  # to where a layer was committed and others of its cycle are not, on every rank alike
                engine.step()
                if state.rebalanced and engine.maps[-1] != engine.maps[-2]:
                    break
            before = [[weight.clone() for weight in layer.tensors] for layer in model.moe_layers]
            placed = engine.mapping().clone()
            drained += state.rebalanced
            engine.state.drain_async()
            assert (engine.mapping() == placed).all()
            for layer, kept in zip(model.moe_layers, before, strict=True):
                assert all((a == b).all() for a, b in zip(layer.tensors, kept, strict=True))
            model.salt += 1  # the host reloads its weights
            model.fill(engine.mapping())
            engine.check()
        changed = engine.changed()
        for _ in range(60):
            engine.step()
            time.sleep(0.002)
        return {
            "wrong": engine.wrong,
            "drained": drained,
            "went on": engine.changed() > changed,
            "maps": engine.maps,
            "lives": engine.worker_lives(),
            "usable": engine.communicator().mover.comm.usable,
        }


@pytest.mark.parametrize("communicator", ["torch_gloo", "nixl", "vmread"])
def test_a_drain_in_mid_cycle_writes_nothing_over_what_is_reloaded_then(communicator):
    ranks = on_cpu.run(2, drain, 2, on_cpu.free_port(), {"communicator": communicator})
    assert [rank["wrong"] for rank in ranks] == [0, 0]
    assert ranks[0]["maps"] == ranks[1]["maps"]
    assert all(rank["drained"] == 3 and rank["went on"] and rank["lives"] and rank["usable"] for rank in ranks)
