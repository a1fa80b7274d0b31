"""An elastic switch as vLLM makes it: two ranks, three, two; the third leaves without a word, or dies in between."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import on_cpu  # noqa: E402

if not on_cpu.is_there():
    pytest.skip(on_cpu.SKIP, allow_module_level=True)

import faults  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import engine as engines  # noqa: E402

LOCAL, LAYERS, LIMIT_S = 8, 3, 3.0


@pytest.fixture(scope="module", autouse=True)
def vllm():
    on_cpu.stand_in_for_an_accelerator()
    import eplb_vllm

    eplb_vllm.register()


class ElasticRank:
    """Makes the calls of vLLM's elastic executor, in its order."""

    def __init__(self, rank, port, communicator):
        self.rank = rank
        self.store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        core = {"communicator": communicator, "timeout_s": LIMIT_S}
        # Of vLLM's own communicators an elastic group takes none that works on a CPU.
        self.config = engines.configuration(core, use_async=True)
        self.config.parallel_config.enable_elastic_ep = True
        self.config.parallel_config.elastic_ep_max_dp_size = 3

    def group(self, name, size):
        from vllm.distributed.stateless_coordinator import StatelessGroupCoordinator

        return StatelessGroupCoordinator(
            [list(range(size))],
            local_rank=self.rank,
            torch_distributed_backend="gloo",
            use_device_communicator=False,
            coord_store=self.store,
            group_name=name,
            global_rank=self.rank,
            global_world_size=size,
        )

    def switch(self, ep, eplb, size):
        from vllm.distributed import parallel_state

        self.config.parallel_config.data_parallel_size = size
        return parallel_state._replace_active_groups(world=ep, dp=ep, ep=ep, eplb=eplb, node_count=1)

    def start(self, size):
        """Load the model as a rank of `size`."""
        from vllm.config import set_current_vllm_config

        ep, eplb = self.group(f"ep{size}", size), self.group(f"eplb{size}", size)
        self.switch(ep, eplb, size)
        with set_current_vllm_config(self.config):
            redundant = size * LOCAL - 12
            self.engine = engines.Engine(self.config, self.rank, size, layers=LAYERS, logical=12, redundant=redundant)
        return self.engine

    def prepare(self, size, name):
        """Make the next groups and the communicator over them while the model serves."""
        done = []

        def work():
            ep, eplb = self.group(f"ep{size}{name}", size), self.group(f"eplb{size}{name}", size)
            model = self.engine.models[0]
            done.extend((ep, eplb, self.engine.state.create_communicator(model.config, eplb)))

        thread = threading.Thread(target=work)
        thread.start()
        return thread, done

    def take(self, size, ep, eplb, communicator):
        """Switch to the next groups."""
        self.switch(ep, eplb, size)
        state, model = self.engine.state, self.engine.models[0]
        model_state = self.engine.model_state()
        state.reconfigure_physical_expert_slots(model.config, size * LOCAL)
        model.expert_weights = []
        model.set_eplb_state(
            model_state.expert_load_pass_buffer, model_state.logical_to_physical_map, model_state.logical_replica_count
        )
        state._propagate_shared_tensors(model, model_state.num_unpadded_tokens_tensors)
        model.update_physical_experts_metadata(size * LOCAL, LOCAL)
        state.update_communicator(model.config, communicator)

    def reshuffle(self, rank_mapping=None):
        state = self.engine.state
        state.is_async = rank_mapping is None
        state.rearrange(rank_mapping=rank_mapping, use_last_expert_load=True)
        state.expert_rearrangement_step = 0
        state.is_async = True
        state.start_async_loop()


def grow(rank, port, communicator):
    """Serve on two ranks, then on three."""
    elastic = ElasticRank(rank, port, communicator)
    if rank < 2:
        engine = elastic.start(2)
        engine.start()
        faults.serve(engine, 40)
        thread, prepared = elastic.prepare(3, "")
        faults.serve(engine, 40)
        thread.join()
        engine.state.drain_async()
        if rank == 0:
            elastic.store.set("map", json.dumps(engine.model_state().physical_to_logical_map_buffer.tolist()))
        elastic.take(3, *prepared)
    else:
        engine = elastic.start(3)  # the others' prepare meets it
        mapping = torch.tensor(json.loads(elastic.store.get("map")))
        engine.models[0].fill(torch.full_like(mapping, -1))
        engine.state.update_mapping(engine.models[0].config, mapping)
    engine.world = 3
    elastic.reshuffle()
    faults.serve(engine, 60)
    return elastic, engine


def shrink(rank, port, communicator):
    elastic, engine = grow(rank, port, communicator)
    grown = engine.changed(), int((engine.mapping()[:, 2 * LOCAL :] >= 0).sum())
    thread, prepared = elastic.prepare(2, "again") if rank < 2 else (None, [])
    if thread is not None:
        thread.join()
    engine.state.drain_async()
    elastic.reshuffle({0: 0, 1: 1, 2: -1})
    if rank == 2:
        os._exit(1)  # without a goodbye
    before = engine.communicator()
    elastic.take(2, *prepared)
    engine.check()
    faults.serve(engine, 60)
    time.sleep(LIMIT_S + 1.0)
    return {
        "wrong": engine.wrong,
        "changed on three": grown[0],
        "rows of the new rank": grown[1],
        "maps": engine.maps[-60:],
        "closed": not before.mover.comm.usable,
        "lives": engine.worker_lives(),
        "closing": [thread.name for thread in threading.enumerate() if thread.name.startswith("eplb-vllm-close")],
    }


@pytest.mark.parametrize("communicator", ["torch_gloo", "nixl"])
def test_two_ranks_become_three_and_two_again_and_the_third_vanishes(communicator):
    ranks = on_cpu.run(3, shrink, on_cpu.free_port(), communicator, gone=(2,))[:2]
    assert [rank["wrong"] for rank in ranks] == [0, 0]
    assert all(rank["rows of the new rank"] == LAYERS * LOCAL and rank["lives"] for rank in ranks)
    assert ranks[0]["maps"] == ranks[1]["maps"]
    assert all(rank["closed"] and not rank["closing"] for rank in ranks)


def die(rank, port, communicator):
    elastic, engine = grow(rank, port, communicator)
    engine.state.drain_async()
    comm = engine.communicator().mover.comm
    if rank == 2:
        plain = comm.begin

        def begin(*maps):
            plain(*maps)
            os._exit(1)

        comm.begin = begin
    began = time.monotonic()
    try:
        elastic.reshuffle({0: 0, 1: 1, 2: -1})
    except Exception as error:
        held = torch.from_numpy(comm.report.physical_to_logical_map)
        wrong = engine.wrong + engine.models[0].wrong_rows(held)
        return {"wrong": wrong, "error": str(error), "seconds": time.monotonic() - began, "held": held.tolist()}
    raise AssertionError("the engine goes on without the rows that it still has to get")


@pytest.mark.parametrize("communicator", ["torch_gloo", "nixl"])
def test_a_rank_that_dies_while_its_experts_leave_it_is_named_on_every_other_one(communicator):
    ranks = on_cpu.run(3, die, on_cpu.free_port(), communicator, gone=(2,))[:2]
    assert [rank["wrong"] for rank in ranks] == [0, 0]
    assert ranks[0]["held"] == ranks[1]["held"]
    for rank in ranks:
        assert "Rank 2 is gone" in rank["error"]
        assert rank["seconds"] < 3 * LIMIT_S
