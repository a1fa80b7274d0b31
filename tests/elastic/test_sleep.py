"""Sleep and wake: weights are freed, moved or reloaded between suspend() and resume(), in one process."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.errors import ConfigError, EplbError, PlanError, TransferError
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks
from tests.support.backends import BackendCase, case_config, case_options, device_group, every_backend
from tests.support.lives import over_gloo_and_nixl

LAYERS = [[512, 16]] * 3


def sleeps(rank: Rank, backend: str):
    maps = shuffles(4, 3, 2, 4, redundant=2)
    model = Model(rank.rank, 4, LAYERS)
    model.fill(maps[0])
    group = device_group(rank, backend)
    config = case_config(backend, timeout_s=20)
    comm = eplb.Communicator(config, model.weights, rank.control(), group, options=case_options())
    wrong, refused = [], []
    comm.rearrange(maps[0], maps[1])
    # The same tensors, with other memory.
    comm.suspend()
    assert not comm.usable
    for use in (
        comm.connect,
        comm.suspend,
        lambda: comm.rearrange(maps[1], maps[2]),
        lambda: comm.begin(maps[1], maps[2]),
        lambda: comm.reloaded(maps[1]),
        lambda: comm.rebuild(1.0),
    ):
        with pytest.raises(EplbError) as caught:
            use()
        refused.append(caught.value.code)
    for layer in model.weights:
        for tensor in layer:
            tensor.data = tensor.data.clone()
    comm.resume()
    with pytest.raises(PlanError):
        comm.resume()
    comm.rearrange(maps[1], maps[2])
    wrong += model.wrong_rows(maps[2])
    # Other tensors, with other values: a training loop has loaded them.
    comm.suspend()
    del layer, tensor, use
    gone = [weakref.ref(tensor.untyped_storage()) for layer in model.weights for tensor in layer]
    gone += [weakref.ref(tensor) for layer in model.weights for tensor in layer]
    model.weights = [[torch.zeros_like(tensor) for tensor in layer] for layer in model.weights]
    gc.collect()
    alive = sum(ref() is not None for ref in gone)
    with pytest.raises(ConfigError) as freed:
        comm.resume()
    with pytest.raises(ConfigError) as short:
        comm.resume(model.weights[:2])
    model.version = 1
    model.fill(maps[3])
    comm.resume(model.weights, map=maps[3])
    with pytest.raises(PlanError) as stale:
        comm.rearrange(maps[2], maps[0])
    comm.rearrange(maps[3], maps[0])
    wrong += model.wrong_rows(maps[0])
    # Asleep at the end.
    comm.suspend()
    comm.close()
    return wrong, refused, alive, freed.value.code, short.value.code, stale.value.code


@every_backend
def test_weights_are_moved_and_reloaded_while_the_communicator_sleeps(backend: BackendCase) -> None:
    for wrong, refused, alive, *codes in run_ranks(2, sleeps, backend.name, env=backend.env):
        assert wrong == []
        assert refused == ["EPLB-T025"] * 6
        assert alive == 0
        assert codes == ["EPLB-C010", "EPLB-C010", "EPLB-P008"]


def one_sleeps(rank: Rank, backend: str):
    maps = shuffles(2, 3, 2, 4)
    model = Model(rank.rank, 4, LAYERS)
    model.fill(maps[0])
    comm = eplb.Communicator(case_config(backend, timeout_s=5), model.weights, rank.control(), options=case_options())
    comm.rearrange(maps[0], maps[0])
    if rank.rank == 1:
        comm.suspend()
        rank.store("notes").set("asleep", b"1")
        rank.store("notes").wait(["told"])
        comm.resume()
        comm.rearrange(maps[0], maps[1])
        comm.close()
        return model.wrong_rows(maps[1])
    rank.store("notes").wait(["asleep"])
    with pytest.raises(TransferError) as caught:
        comm.rearrange(maps[0], maps[1])
    rank.store("notes").set("told", b"1")
    held = comm.rebuild(20).physical_to_logical_map
    assert np.array_equal(held, maps[0])
    comm.rearrange(held, maps[1])
    comm.close()
    return [*model.wrong_rows(maps[1]), *([] if "closed" in str(caught.value) else [str(caught.value)])]


@over_gloo_and_nixl
def test_a_rank_that_goes_on_while_another_sleeps_is_told_and_meets_it_again(backend: BackendCase) -> None:
    assert run_ranks(2, one_sleeps, backend.name, env=backend.env) == [[], []]


def serves_again(rank: Rank, backend: str):
    held = np.tile(np.arange(8) % 6, (3, 1))
    model = Model(rank.rank, 4, LAYERS)
    model.fill(held)
    config = case_config(backend, use_async=True, timeout_s=10, num_redundant_experts=2, step_interval=5, window_size=4)
    comm = eplb.Communicator(config, model.weights, rank.control(), options=case_options())
    lb = eplb.LoadBalancer(config, comm, held, 6)
    comm_epoch = comm.epoch
    lb.close()
    comm.suspend()
    comm.resume()
    lb = eplb.LoadBalancer(config, comm, held, 6)
    committed = 0
    group = rank.device_group(topic="steps")
    for _ in range(400):
        row = lb.physical_to_logical_map
        assert not model.wrong_rows(row)
        for layer in range(3):
            lb.record(layer, np.where(row[layer] == 5, 100, 1))
        group.allreduce([torch.zeros(1)]).wait()
        committed += len(lb.step())
        if committed:
            break
    lb.close()
    comm.suspend()
    comm.resume()
    epoch = comm.epoch
    comm.close()
    return committed, comm_epoch, epoch


@over_gloo_and_nixl
def test_a_load_balancer_goes_on_after_a_sleep(backend: BackendCase) -> None:
    for committed, before, after in run_ranks(2, serves_again, backend.name, env=backend.env):
        assert committed > 0
        assert after > before
