"""What hosts do with a rearrangement beyond staging and committing: give it up, refuse it, take what landed."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.errors import ConfigError, EplbError, PlanError
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks
from tests.support.backends import every_backend
from tests.test_rearrange import communicator

LAYERS = [[96, 1, 40]] * 4


def weights(rank: Rank):
    """Return weights, and maps such that every layer moves from each to the next."""
    maps = shuffles(3, len(LAYERS), rank.world_size, 6, redundant=3)
    model = Model(rank.rank, maps[0].shape[1] // rank.world_size, LAYERS)
    model.fill(maps[0])
    return model, maps


def prepared(rank: Rank, backend: str, **keywords):
    """Return weights, a communicator over them, and the maps."""
    model, maps = weights(rank)
    return model, communicator(rank, model.weights, backend, **keywords), maps


def usable_again(rank: Rank, comm: eplb.Communicator, model: Model, new) -> list:
    """Rearrange from what holds now, after a rebuild where the backend could not stop in between."""
    if not comm.usable:
        group = rank.device_group(topic="device group again") if comm.backend == "torch_nccl" else None
        comm.rebuild(30, device_group=group)
    comm.rearrange(comm.report.physical_to_logical_map, new)
    return model.wrong_rows(new)


# --- cancel -----------------------------------------------------------------------------------------------------------


def cancels(rank: Rank, backend: str, staged: int, committed: int):
    model, comm, (old, new, last) = prepared(rank, backend)
    generation = comm.begin(old, new)
    for number, layer in enumerate(generation.layers[:staged]):
        generation.stage(layer)
        if number < committed or len(comm.report.decided_layers) > 1:
            generation.commit(comm.report.decided_layers[0])
    generation.cancel()
    report = comm.report
    held = report.physical_to_logical_map
    wrong = model.wrong_rows(held)
    generation.cancel()  # again: nothing happens
    with pytest.raises(PlanError, match="over"):
        generation.stage(generation.layers[-1])
    wrong += usable_again(rank, comm, model, last)
    comm.close()
    return report.committed_layers, report.decided_layers, held.tolist(), wrong


@every_backend
@pytest.mark.parametrize(("staged", "committed"), [(0, 0), (1, 0), (1, 1), (3, 2), (4, 4)])
def test_what_is_cancelled_leaves_every_rank_with_the_same_layers(backend, staged, committed):
    outcomes = run_ranks(3, cancels, backend.name, staged, committed, env=backend.env)
    for outcome in outcomes:
        assert outcome == outcomes[0]
        assert outcome[1] == ()
        assert outcome[3] == []
        assert len(outcome[0]) in (committed, max(committed, staged - 1))


def cancels_unevenly(rank: Rank, backend: str):
    """Rank 0's engine has committed a layer that rank 1's has not; rank 1 cancels while rank 0 stages the next."""
    model, comm, (old, new, last) = prepared(rank, backend)
    generation = comm.begin(old, new)
    first, second = generation.layers[:2]
    generation.stage(first)
    told = None
    if rank.rank == 0:
        generation.commit(first)
        with pytest.raises(EplbError) as caught:
            generation.stage(second)
        told = caught.value.code
    generation.cancel()
    held = comm.report.physical_to_logical_map
    wrong = model.wrong_rows(held)
    wrong += usable_again(rank, comm, model, last)
    comm.close()
    return held.tolist(), comm.report.committed_layers and None, wrong, told


@every_backend
def test_a_layer_that_one_rank_has_committed_is_committed_by_all_that_cancel(backend):
    first, second = run_ranks(2, cancels_unevenly, backend.name, env=backend.env)
    assert first[0] == second[0]
    assert first[2] == second[2] == []
    assert first[3] == "EPLB-T021"


def reloads_after_cancel(rank: Rank, backend: str):
    model, comm, (old, new, last) = prepared(rank, backend)
    generation = comm.begin(old, new)
    generation.stage(generation.layers[0])
    generation.cancel()
    model.fill(last)  # the host loads other weights
    comm.reloaded(last)
    wrong = model.wrong_rows(last)
    wrong += usable_again(rank, comm, model, new)
    model.fill(old)
    comm.close()  # and nothing that was decided comes after it
    return wrong + model.wrong_rows(old)


@every_backend
def test_nothing_is_written_over_weights_that_the_host_loads_after_it_cancelled(backend):
    assert run_ranks(2, reloads_after_cancel, backend.name, env=backend.env) == [[], []]


# --- abort ------------------------------------------------------------------------------------------------------------


def refuses(rank: Rank, backend: str, at: int):
    model, comm, (old, new, last) = prepared(rank, backend)
    generation = comm.begin(old, new)
    for layer in generation.layers[:at]:
        generation.stage(layer)
        generation.commit(layer)
    if rank.rank == 1:
        error = generation.abort("rows of expert 3 have other scales")
    else:
        with pytest.raises(EplbError) as caught:
            generation.stage(generation.layers[at])
        error = caught.value
    held = comm.report.physical_to_logical_map
    wrong = model.wrong_rows(held)
    with pytest.raises(PlanError, match="no layer is left"):
        generation.abort("again")
    generation.cancel()
    wrong += usable_again(rank, comm, model, last)
    comm.close()
    return error.code, str(error), held.tolist(), wrong


@every_backend
@pytest.mark.parametrize("at", [0, 2])
def test_a_check_of_one_host_that_failed_is_told_to_all_in_its_words(backend, at):
    outcomes = run_ranks(3, refuses, backend.name, at, env=backend.env)
    for code, text, held, wrong in outcomes:
        assert (code, wrong) == ("EPLB-T007", [])
        assert "Rank 1" in text
        assert "rows of expert 3 have other scales" in text
        assert held == outcomes[0][2]
    assert np.array(outcomes[0][2]).shape


# --- landing memory of the host ---------------------------------------------------------------------------------------


def lands(rank: Rank, backend: str, num_slots: int, mode: str):
    model, (old, new, last) = weights(rank)
    slots = [[torch.zeros_like(tensor) for tensor in model.weights[0]] for _ in range(num_slots)]
    landing = (mode, slots) if mode else slots
    comm = communicator(rank, model.weights, backend, landing=landing)
    comm.rearrange(old, new)
    comm.rearrange(new, last)
    wrong = model.wrong_rows(last)
    used = [any(tensor.any() for tensor in slot) for slot in slots]
    comm.close()
    return wrong, used


ROWS = ("nixl", "torch_nccl", "pynccl_cpu", "vmread")


@every_backend
@pytest.mark.parametrize("num_slots", [1, 2])
def test_rows_of_the_host_are_used_where_possible_and_the_core_adds_what_is_missing(backend, num_slots):
    for wrong, used in run_ranks(2, lands, backend.name, num_slots, "if possible", env=backend.env):
        assert wrong == []
        assert used == [backend.name in ROWS] * num_slots


def does_not_fit(rank: Rank):
    model, (old, new, _) = weights(rank)
    odd = [[torch.zeros(1, 3)]]
    with pytest.raises(ConfigError, match="EPLB-C010"):
        communicator(rank, model.weights, "nixl", name="refused", landing=odd)
    with pytest.raises(ConfigError, match="without rows"):
        communicator(rank, model.weights, "nixl", name="no rows", landing="if possible")
    comm = communicator(rank, model.weights, "nixl", name="own", landing=("if possible", odd))
    comm.rearrange(old, new)
    comm.close()
    return model.wrong_rows(new)


def test_rows_of_the_host_that_do_not_fit_are_left_where_the_host_said_so():
    assert run_ranks(2, does_not_fit) == [[], []]


@pytest.mark.parametrize(("name", "layout"), [("torch_gloo", "packed_by_peer"), ("nixl", "rows")])
def test_a_host_can_ask_for_the_landing_layout_before_it_chooses(name, layout):
    assert eplb.discover().backends[name].landing_layout == layout


# --- some layers alone ------------------------------------------------------------------------------------------------


def moves_layer_by_layer(rank: Rank, backend: str):
    """Each layer is a rearrangement of its own, the last one first; then two at once; then all."""
    model, comm, (old, new, last) = prepared(rank, backend)
    held, wrong = old.copy(), []
    for layer in reversed(range(len(LAYERS))):
        generation = comm.begin(old[layer], new[layer], layer=layer)
        assert generation.layers in ((layer,), ())
        for number in generation.layers:
            generation.stage(number)
            generation.commit(number)
        generation.end()
        held[layer] = new[layer]
        wrong += model.wrong_rows(held)
        known = comm.report.physical_to_logical_map
        assert (known[layer:] == held[layer:]).all()
        assert (known[:layer] == -1).all()  # nobody has told
    for chunk, given in (((1, 3), last), ((0,), last[[0]])):
        generation = comm.begin(new if len(given) > 1 else new[[0]], given, layers=chunk)
        generation.run()
        held[list(chunk)] = last[list(chunk)]
        wrong += model.wrong_rows(held)
    comm.rearrange(held, old)
    wrong += model.wrong_rows(old)
    comm.close()
    return wrong


@every_backend
def test_one_layer_or_some_can_be_rearranged_alone(backend):
    for wrong in run_ranks(3, moves_layer_by_layer, backend.name, env=backend.env):
        assert wrong == []


def asks_for_odd_layers(rank: Rank):
    model, comm, (old, new, _) = prepared(rank, "torch_gloo")
    said = []
    for maps, layers in (
        ((old[0], new[0]), {"layer": 9}),
        ((old[0], new[0]), {"layer": "2"}),
        ((old, new), {"layers": []}),
        ((old[:2], new[:2]), {"layers": [1, 0]}),
        ((old[:2], new[:2]), {"layers": [0, 1], "layer": 1}),
        ((old[:2], new[:2]), {"layers": [0, 1, 2]}),
        ((old[1], new[1]), {"layer": rank.rank}),
    ):
        with pytest.raises(EplbError) as caught:
            comm.begin(*maps, **layers)
        said.append((caught.value.code, str(caught.value)))
    comm.rearrange(old, new)
    comm.close()
    return said, model.wrong_rows(new)


def test_layers_that_cannot_be_rearranged_are_refused_on_every_rank_alike():
    first, second = run_ranks(2, asks_for_odd_layers)
    assert first[1] == second[1] == []
    for (code, _), (other, _) in zip(first[0][:-1], second[0][:-1], strict=True):
        assert code == other == "EPLB-P001"
    for code, text in (first[0][-1], second[0][-1]):
        assert code == "EPLB-P003"
        assert "layers" in text


# --- what landed ------------------------------------------------------------------------------------------------------


def copies_itself(rank: Rank, backend: str):
    """A host that puts the rows in place by itself: all from the old ones, and from what landed."""
    model, comm, (old, new, last) = prepared(rank, backend)
    generation = comm.begin(old, new)
    num_rows = old.shape[1] // rank.world_size
    own = slice(rank.rank * num_rows, (rank.rank + 1) * num_rows)
    for layer in generation.layers:
        generation.stage(layer)
        landed = {(tensor, row): view.clone() for tensor, row, view in generation.landed(layer)}
        before = [tensor.clone() for tensor in model.weights[layer]]
        was, becomes = old[layer, own].tolist(), new[layer, own].tolist()
        first = {expert: becomes.index(expert) for expert in becomes}
        for tensor, live in enumerate(model.weights[layer]):
            for row, expert in enumerate(becomes):
                if expert in was:
                    live[row] = before[tensor][was.index(expert)]
                elif expert >= 0:
                    live[row].view(torch.uint8).copy_(
                        landed[tensor, first[expert]].view(live[row].view(torch.uint8).shape)
                    )
        generation.commit(layer, by_host=True)
        with pytest.raises(PlanError, match="not staged"):
            generation.landed(layer)
    generation.end()
    wrong = model.wrong_rows(comm.report.physical_to_logical_map) + model.wrong_rows(new)
    comm.rearrange(new, last)
    wrong += model.wrong_rows(last)
    comm.close()
    return wrong


@every_backend
def test_a_host_may_put_what_landed_in_place_itself(backend):
    for wrong in run_ranks(2, copies_itself, backend.name, env=backend.env):
        assert wrong == []


# --- commit beside stage ----------------------------------------------------------------------------------------------


def commits_beside(rank: Rank, backend: str, rounds: int):
    model, comm, maps = prepared(rank, backend)
    wrong = []
    for number in range(rounds):
        old, new = maps[number % 3], maps[(number + 1) % 3]
        generation = comm.begin(old, new)
        decided: queue.Queue = queue.Queue()
        done, failed = threading.Semaphore(2), []

        def engine(generation=generation, decided=decided, done=done, failed=failed):
            while (layer := decided.get()) is not None:
                try:
                    generation.commit(layer)
                except BaseException as error:
                    failed.append(error)
                done.release()

        thread = threading.Thread(target=engine)
        thread.start()
        for layer in generation.layers:
            done.acquire()  # one of two landing slots
            generation.stage(layer)
            decided.put(layer)
        decided.put(None)
        thread.join()
        generation.end()
        assert not failed, failed
        wrong += model.wrong_rows(new)
    comm.close()
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch_gloo", "nixl"])
def test_a_layer_is_committed_by_another_thread_while_the_next_is_staged(backend):
    for wrong in run_ranks(2, commits_beside, backend, 60, timeout_s=120):
        assert wrong == []


# --- landing memory between rearrangements ----------------------------------------------------------------------------


def trims(rank: Rank, backend: str):
    model, comm, (old, new, last) = prepared(rank, backend)
    in_use = [comm.report.staging.nbytes_in_use]
    comm.rearrange(old, new)
    generation = comm.begin(new, last)
    with pytest.raises(PlanError, match=r"trim\(\) before"):
        comm.trim()
    generation.run()
    for old_map, new_map in ((last, new), (new, last)):
        comm.trim()
        comm.trim()
        in_use.append(comm.report.staging.nbytes_in_use)
        assert comm.usable
        comm.rearrange(old_map, new_map)
        assert not model.wrong_rows(new_map)
        in_use.append(comm.report.staging.nbytes_in_use)
    comm.trim()
    comm.close()
    return in_use


@every_backend
def test_landing_memory_is_given_back_between_rearrangements(backend):
    for built, *later in run_ranks(2, trims, backend.name, env=backend.env):
        assert built > 0
        assert later[0] == later[2] == 0
        assert later[1] == later[3] >= built
