"""Ranks are built at different moments; one that never comes, or comes with another model, is named on every rank."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.errors import EplbError, StalledError
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from tests.support.backends import BackendCase, case_config, case_options
from tests.support.lives import over_gloo_and_nixl

NOBODY_COMES = {0: 2.0, 1: 1.2, 2: 2.5}


def meets_nobody(rank: Rank, from_group: bool):
    if rank.rank == 3:
        if from_group:
            dist.init_process_group("gloo", store=rank.store("world"), rank=3, world_size=4)
            eplb.ControlPlane.from_process_group(dist.group.WORLD)
        rank.listen(60)
        return None
    limit_s = NOBODY_COMES[rank.rank]
    if from_group:
        dist.init_process_group("gloo", store=rank.store("world"), rank=rank.rank, world_size=4)
        control = eplb.ControlPlane.from_process_group(dist.group.WORLD)
    else:
        control = rank.control()
    model = Model(rank.rank, 4, [[8]])
    comm = eplb.Communicator(case_config("torch_gloo", timeout_s=limit_s), model.weights, control)
    rank.store("built").add("count", 1)
    while int(rank.store("built").add("count", 0)) < 3:
        time.sleep(0.01)
    started = time.monotonic()
    with pytest.raises(StalledError) as caught:
        comm.connect()
    seconds = time.monotonic() - started
    rank.tell("done")
    rank.listen(60)  # until the others have read what rank 0 tells in its store
    comm.close(force=True)
    return caught.value.code, str(caught.value), seconds


@pytest.mark.parametrize("from_group", [False, True], ids=["from_store", "from_process_group"])
def test_a_rank_that_never_comes_is_named_on_every_waiting_rank_each_by_its_own_limit(from_group: bool) -> None:
    with Ranks(4, meets_nobody, from_group) as ranks:
        for number in range(3):
            assert ranks.hear(number, 30) == "done"
        for number in range(4):
            ranks.tell(number, "go home")
        outcomes = ranks.values(30)
    for number, (code, text, seconds) in enumerate(outcomes[:3]):
        limit_s = NOBODY_COMES[number]
        host = "127.0.0.1; " if from_group else ""
        assert code == "EPLB-T023"
        assert text.startswith(f"Endpoint not ready after {limit_s:g}s: rank 3 ({host}not seen at the store "), text
        assert limit_s <= seconds < limit_s + 1.5


def is_built_late(rank: Rank, backend: str, apart_s: float):
    maps = shuffles(2, 2, rank.world_size, 4)
    model = Model(rank.rank, 4, [[512, 16]] * 2)
    model.fill(maps[0])
    time.sleep(apart_s * rank.rank)
    config = case_config(backend, timeout_s=apart_s * rank.world_size + 10)
    started = time.monotonic()
    comm = eplb.Communicator(config, model.weights, rank.control(), options=case_options())
    built_s = time.monotonic() - started
    with comm:
        comm.rearrange(maps[0], maps[1])
        return built_s, model.wrong_rows(maps[1])


@over_gloo_and_nixl
def test_construction_is_local_and_ranks_built_apart_meet(backend: BackendCase) -> None:
    results = run_ranks(3, is_built_late, backend.name, 1.0, env=backend.env)
    assert all(wrong == [] for _, wrong in results)
    assert all(built_s < 5 for built_s, _ in results)


@over_gloo_and_nixl
@pytest.mark.soak
def test_ranks_built_five_seconds_apart_meet(backend: BackendCase) -> None:
    assert all(wrong == [] for _, wrong in run_ranks(4, is_built_late, backend.name, 5.0, env=backend.env))


# --- another model ----------------------------------------------------------------------------------------------------

NAMES = ["w13_weight", "w2_weight", "w13_scale"]


def given(what: str) -> tuple[list[list[torch.Tensor]], list[list[str]]]:
    """Return weights and names of two layers, or of a rank that loaded something else."""
    layers = [
        [torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4)]
        for _ in range(2)
    ]
    names = [list(NAMES) for _ in range(2)]
    if what == "one layer more":
        layers.append([tensor.clone() for tensor in layers[0]])
        names.append(list(NAMES))
    elif what == "another dtype":
        layers[1][0] = layers[1][0].to(torch.float16)
    elif what == "quantised":
        layers[1][0] = torch.zeros(4, 16, dtype=torch.uint8)
        layers[1].append(torch.zeros(4, 2))
        names[1].append("w13_zero_point")
    elif what == "without scales":
        del layers[1][2], names[1][2]
    elif what == "another name":
        names[1][2] = "w13_weight_scale"
    return layers, names


WANTED = {
    "one layer more": ("EPLB-M002", "Missing on rank 0: [(2, 'w13_scale'), (2, 'w13_weight'), (2, 'w2_weight')]."),
    "another dtype": ("EPLB-M004", "dtype mismatch", "(1, 'w13_weight')"),
    "quantised": ("EPLB-M002", "Missing on rank 0: [(1, 'w13_zero_point')]."),
    "without scales": ("EPLB-M002", "Missing on rank 2: [(1, 'w13_scale')]."),
    "another name": (
        "EPLB-M002",
        "Missing on rank 0: [(1, 'w13_weight_scale')].",
        "Missing on rank 2: [(1, 'w13_scale')].",
    ),
}


def loaded_something_else(rank: Rank, what: str):
    weights, names = given(what if rank.rank == 2 else "")
    old = np.tile(np.arange(12), (len(weights), 1))
    control = rank.control()
    with (
        eplb.Communicator(case_config("torch_gloo", timeout_s=10), weights, control, tensor_names=names) as comm,
        pytest.raises(EplbError) as caught,
    ):
        comm.rearrange(old, old)
    return caught.value.code, str(caught.value)


@pytest.mark.parametrize("what", sorted(WANTED))
def test_a_rank_that_comes_with_another_model_is_named_with_layer_and_tensor_on_every_rank(what: str) -> None:
    code, *texts = WANTED[what]
    for number, (found, text) in enumerate(run_ranks(3, loaded_something_else, what)):
        assert found == code, text
        for wanted in texts:
            if number != 2:  # which words it from its own side
                assert wanted.replace("rank 0", f"rank {number}") in text, text
        if code == "EPLB-M002":
            assert " EPLB metadata key mismatch with rank " in text
