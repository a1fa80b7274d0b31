"""Rearranging moves every byte to where the map says, over every backend, and nothing before everyone has agreed."""

from __future__ import annotations

import itertools
import os
import sys
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.errors import ConfigError, EplbError, PlanError
from eplb_core.hookspecs import hookimpl
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from tests.support.backends import BackendCase, case_config, case_options, device_group, every_backend

SMALL = [[96, 1, 40]] * 4  # 1: a per-expert scalar
MIXED = [[300_000, 64]] * 2  # above and below what is coalesced


def communicator(rank: Rank, weights, backend: str, *, config=None, name="default", **keywords) -> eplb.Communicator:
    config = case_config(backend, **{"timeout_s": 30, **(config or {})})
    keywords.setdefault("device_group", device_group(rank, backend))
    return eplb.Communicator(config, weights, rank.control(), name=name, options=case_options(), **keywords)


# --- every byte -------------------------------------------------------------------------------------------------------


def rearrange_all(rank: Rank, backend: str, maps, row_nbytes, config, by_layer: bool):
    model = Model(rank.rank, maps[0].shape[1] // rank.world_size, row_nbytes)
    model.fill(maps[0])
    moved = 0
    with communicator(rank, model.weights, backend, config=config) as comm:
        for old, new in itertools.pairwise(maps):
            if by_layer:
                generation = comm.begin(old, new)
                for layer in generation.layers:
                    generation.stage(layer)
                    generation.commit(layer)
                generation.end()
                report = comm.report
            else:
                report = comm.rearrange(old, new)
            assert model.wrong_rows(new) == []
            np.testing.assert_array_equal(report.physical_to_logical_map, new)
            assert report.backend == backend
            moved += report.nbytes_received
    return moved


@every_backend
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("staging_layers", [1, 2])
def test_every_row_is_where_the_new_map_says(backend: BackendCase, world_size: int, staging_layers: int) -> None:
    maps = shuffles(4, len(SMALL), world_size, 6, redundant=3)
    config = {"staging_layers": staging_layers}
    moved = run_ranks(world_size, rearrange_all, backend.name, maps, SMALL, config, False, env=backend.env)
    assert all(moved)


@every_backend
def test_large_and_small_rows_move_layer_by_layer_as_well(backend: BackendCase) -> None:
    maps = shuffles(3, len(MIXED), 2, 4)
    run_ranks(2, rearrange_all, backend.name, maps, MIXED, {}, True, env=backend.env)


@every_backend
def test_empty_slots_duplicates_and_dropped_experts_are_placements_too(backend: BackendCase) -> None:
    """Cases 10 and the -1 of the maps: [7, 7] on rank 1 is one read and two equal rows."""
    old = np.array([[7, 1, 2, 3, 4, -1], [0, 1, 2, 3, 4, 5]])
    new = np.array([[7, -1, 1, 7, 7, 4], [5, 0, 0, 1, 1, 1]])
    received = run_ranks(2, rearrange_all, backend.name, [old, new], [[32], [32]], {}, False, env=backend.env)
    assert received == [32, 32 + 32]  # rank 0: expert 5 of layer 1; rank 1: expert 7, then expert 1, each once


DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.bfloat16,
    torch.uint16,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.float32,
    torch.complex64,
]


def rearrange_dtypes(rank: Rank, backend: str, old, new):
    def weights():
        def of(dtype, *shape):
            generator = torch.Generator().manual_seed(DTYPES.index(dtype))
            size = torch.empty(0, dtype=dtype).element_size()
            high = 2 if dtype is torch.bool else 256
            raw = torch.randint(0, high, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
            return raw.view(dtype)

        every_expert = [of(dtype, 8, 5, 6) for dtype in DTYPES]
        every_expert.append(of(torch.float32, 8, 1)[:, 0])  # a scale per expert
        every_expert.append(of(torch.bfloat16, 8, 6, 4).transpose(1, 2))  # case 12
        return every_expert

    truth = weights()
    mine = slice(rank.rank * 4, rank.rank * 4 + 4)

    def placed(mapping):
        return [
            tensor.view(torch.uint8)[mapping[0, mine]].view(tensor.dtype)
            if tensor.dtype.itemsize == 1
            else tensor[mapping[0, mine]]
            for tensor in truth
        ]

    held = placed(old)
    # index_select gives contiguous copies; keep the permuted one permuted
    held[-1] = held[-1].transpose(1, 2).contiguous().transpose(1, 2)
    with communicator(rank, [held], backend) as comm:
        comm.rearrange(old, new)
    return [
        str(tensor.dtype)
        for tensor, expected in zip(held, placed(new), strict=True)
        if bytes_of(tensor) != bytes_of(expected)
    ]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() > 1 else tensor.numpy().tobytes()


@every_backend
def test_every_dtype_moves_bit_exactly(backend: BackendCase) -> None:
    """Cases 11 and 12: fp8, packed fp4, bf16, bool, per-expert scalars, permuted experts."""
    old, new = shuffles(2, 1, 2, 4, seed=5)
    assert run_ranks(2, rearrange_dtypes, backend.name, old, new, env=backend.env) == [[], []]


# --- groups, hosts, processes -----------------------------------------------------------------------------------------


def in_a_subgroup(rank: Rank, backend: str):
    dist.init_process_group("gloo", store=rank.store("world"), rank=rank.rank, world_size=rank.world_size)
    group = dist.new_group([2, 3])
    wrong = None
    if rank.rank >= 2:
        old, new = shuffles(2, 2, 2, 4)
        model = Model(rank.rank - 2, 4, [[64], [64]])
        model.fill(old)
        control = eplb.ControlPlane.from_process_group(group)
        config = case_config(backend, timeout_s=30)
        with eplb.Communicator(config, model.weights, control, group, options=case_options()) as comm:
            comm.rearrange(old, new)
        wrong = model.wrong_rows(new)
    dist.barrier()
    dist.destroy_process_group()
    return wrong


@every_backend
def test_group_ranks_are_not_taken_for_global_ranks(backend: BackendCase) -> None:
    """Case 6: the EP group [2, 3] of a world of 4."""
    assert run_ranks(4, in_a_subgroup, backend.name, env=backend.env) == [None, None, [], []]


def two_models(rank: Rank, backend: str):
    maps = shuffles(3, 2, 2, 4)
    control = rank.control()
    config = case_config(backend, timeout_s=30)
    group = device_group(rank, backend)
    models = [Model(rank.rank, 4, [[nbytes]] * 2) for nbytes in (48, 80)]
    for model in models:
        model.fill(maps[0])
    with (
        eplb.Communicator(config, models[0].weights, control, group, options=case_options(), name="main") as first,
        eplb.Communicator(config, models[1].weights, control, group, options=case_options(), name="draft") as second,
    ):
        first.rearrange(maps[0], maps[1])
        second.rearrange(maps[0], maps[2])
        first.rearrange(maps[1], maps[0])
    return models[0].wrong_rows(maps[0]) + models[1].wrong_rows(maps[2])


@every_backend
def test_two_communicators_of_one_process_do_not_mix(backend: BackendCase) -> None:
    assert run_ranks(2, two_models, backend.name, env=backend.env) == [[], []]


@every_backend
def test_a_daemonic_process_can_rearrange(backend: BackendCase) -> None:
    """Case 24: such a process may start no processes of its own."""
    maps = shuffles(2, 2, 2, 4)
    arguments = (backend.name, maps, [[64]] * 2, {}, False)
    with Ranks(2, rearrange_all, *arguments, env=backend.env, daemon=True) as ranks:
        ranks.values(60)


@every_backend
def test_a_single_rank_rearranges_within_itself(backend: BackendCase) -> None:
    maps = shuffles(3, 2, 1, 5)
    assert run_ranks(1, rearrange_all, backend.name, maps, [[64], [64]], {}, False, env=backend.env) == [0]


def after_the_host_let_go(rank: Rank, backend: str):
    old, new = shuffles(2, 2, 2, 4)
    model = Model(rank.rank, 4, [[64], [64]])
    model.fill(old)
    views = [[tensor.view(4, 64) for tensor in layer] for layer in model.weights]
    addresses = [tensor.data_ptr() for layer in model.weights for tensor in layer]
    with communicator(rank, views, backend) as comm:
        del views
        kept, model.weights = model.weights, []
        weak = [tensor.untyped_storage()._weak_ref() for layer in kept for tensor in layer]
        del kept
        for _ in range(50):  # what was freed would be handed out again
            torch.full((4, 64), 0xFF, dtype=torch.uint8)
        comm.rearrange(old, new)
        alive = [not torch.UntypedStorage._expired(ref) for ref in weak]
        model.weights = [[tensor] for (tensor,) in comm._lives.epoch.setup.layout.weights]
        assert [tensor.data_ptr() for layer in model.weights for tensor in layer] == addresses
        return model.wrong_rows(new), all(alive)


@every_backend
def test_weights_that_the_host_deleted_are_still_there(backend: BackendCase) -> None:
    """Case 19."""
    assert run_ranks(2, after_the_host_let_go, backend.name, env=backend.env) == [([], True)] * 2


def with_own_landing(rank: Rank, backend: str):
    maps = shuffles(3, 3, 2, 4)
    model = Model(rank.rank, 4, [[64, 32]] * 3)
    model.fill(maps[0])
    landing = [[torch.empty_like(tensor) for tensor in model.weights[0]] for _ in range(2)]
    try:
        comm = communicator(rank, model.weights, backend, landing=landing)
    except ConfigError as error:
        return error.code
    with comm:
        comm.rearrange(maps[0], maps[1])
        comm.rearrange(maps[1], maps[2])
    return model.wrong_rows(maps[2])


@every_backend
def test_a_hosts_own_landing_is_used_or_refused_by_name(backend: BackendCase) -> None:
    packs = backend.name == "torch_gloo"
    assert run_ranks(2, with_own_landing, backend.name, env=backend.env) == ["EPLB-C010" if packs else []] * 2


def what_is_loaded(rank: Rank):
    environment = dict(os.environ)
    rearrange_all(rank, "torch_gloo", shuffles(2, 2, 2, 4), [[64], [64]], {}, False)
    strangers = [name for name in sys.modules if name.split(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13", "cupy")]
    return strangers, dict(os.environ) == environment


def test_only_the_chosen_backend_is_loaded_and_the_environment_is_left_alone() -> None:
    """Case 16 and I6."""
    assert run_ranks(2, what_is_loaded) == [([], True)] * 2


# --- agreement --------------------------------------------------------------------------------------------------------


def with_maps_of_its_own(rank: Rank, backend: str):
    maps = shuffles(3, 2, 2, 4)
    model = Model(rank.rank, 4, [[64], [64]])
    model.fill(maps[0])
    with communicator(rank, model.weights, backend) as comm:
        with pytest.raises(PlanError) as caught:
            comm.rearrange(maps[0], maps[1 + rank.rank])
        untouched = model.wrong_rows(maps[0])
        comm.rearrange(maps[0], maps[1])  # the communicator is as good as before
    assert caught.value.report.committed_layers == ()
    np.testing.assert_array_equal(caught.value.report.physical_to_logical_map, maps[0])
    return str(caught.value), untouched, model.wrong_rows(maps[1])


@every_backend
def test_ranks_given_different_maps_raise_the_same_error_before_a_byte_moves(backend: BackendCase) -> None:
    """Case 22."""
    (text, *_), (other, *_) = results = run_ranks(2, with_maps_of_its_own, backend.name, env=backend.env)
    assert text == other
    assert text.startswith("Ranks were given different new maps. Rank ")
    assert [result[1:] for result in results] == [([], []), ([], [])]


def with_bad_arguments(rank: Rank, backend: str):
    old, new = shuffles(2, 2, 2, 4)
    model = Model(rank.rank, 4, [[64], [64]])
    model.fill(old)
    bad = new[:, :7] if rank.rank == 1 else new
    with communicator(rank, model.weights, backend) as comm:
        with pytest.raises(PlanError) as caught:
            comm.rearrange(old, bad)
        comm.rearrange(old, new)
    return caught.value.code, str(caught.value)


@every_backend
def test_one_ranks_bad_argument_hangs_nobody(backend: BackendCase) -> None:
    results = run_ranks(2, with_bad_arguments, backend.name, env=backend.env)
    assert {code for code, _ in results} == {"EPLB-P001"}
    assert len({text for _, text in results}) == 1


class Calls:
    """Counts what a backend is asked to do."""

    name = "calls"

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []

    @hookimpl(wrapper=True)
    def transfer(self, plan):
        self.made.append(("transfer", plan.layer))
        return (yield)

    @hookimpl(wrapper=True)
    def wait(self, handle, timeout_s):
        self.made.append(("wait", 0))
        return (yield)

    @hookimpl
    def observe(self, event):
        if event.kind in ("agree", "vote", "commit"):
            self.made.append((event.kind, event.layer or 0))


def with_nothing_to_move(rank: Rank, backend: str):
    old = np.arange(9)[None].repeat(3, 0)
    new = old.copy()
    new[0, [0, 3]] = new[0, [3, 0]]  # ranks 0 and 1 exchange an expert of layer 0; rank 2 has no part in it
    new[2, [1, 2]] = new[2, [2, 1]]  # rank 0 within itself
    model, calls = Model(rank.rank, 3, [[64]] * 3), Calls()
    model.fill(old)
    with communicator(rank, model.weights, backend, observers=[calls]) as comm:
        report = comm.rearrange(old, new)
    return calls.made, report.committed_layers, model.wrong_rows(new)


@every_backend
def test_a_rank_with_nothing_to_move_makes_the_same_calls(backend: BackendCase) -> None:
    """I3."""
    results = run_ranks(3, with_nothing_to_move, backend.name, env=backend.env)
    assert all(result[1:] == ((0, 2), []) for result in results)
    assert results[0] == results[1] == results[2]


class Gate:
    """Holds this rank before its ballot on layer 0 until the test says so."""

    name = "gate"

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @hookimpl
    def observe(self, event):
        if (event.kind, event.layer) == ("vote", 0):
            self.rank.tell("at the gate")
            self.rank.listen()


def behind_a_gate(rank: Rank, backend: str):
    old, new = shuffles(2, 1, 2, 4)
    model = Model(rank.rank, 4, [[64]])
    model.fill(old)
    observers = [Gate(rank)] if rank.rank == 1 else []
    with communicator(rank, model.weights, backend, observers=observers) as comm:
        worker = threading.Thread(target=comm.rearrange, args=(old, new))
        worker.start()
        if rank.rank == 0:
            rank.listen()
            rank.tell(model.wrong_rows(old))
        worker.join(30)
    return model.wrong_rows(new)


@every_backend
def test_no_live_row_is_written_before_every_rank_has_voted(backend: BackendCase) -> None:
    """I1."""
    with Ranks(2, behind_a_gate, backend.name, env=backend.env) as ranks:
        assert ranks.hear(1) == "at the gate"
        # rank 0 has had its rows for long: give it the time in which it would commit
        threading.Event().wait(0.3)
        ranks.tell(0, "look")
        assert ranks.hear(0) == []
        ranks.tell(1, "go on")
        assert ranks.values(30) == [[], []]


# --- order of calls ---------------------------------------------------------------------------------------------------


def out_of_order(rank: Rank):
    old, new = shuffles(2, 4, 1, 4)
    model = Model(rank.rank, 4, [[64]] * 4)
    model.fill(old)
    said = []

    def refused(call, *arguments) -> None:
        with pytest.raises(PlanError) as caught:
            call(*arguments)
        said.append((caught.value.code, caught.value.fields["problem"]))

    with communicator(rank, model.weights, "torch_gloo") as comm:
        generation = comm.begin(old, new)
        refused(generation.stage, 1)
        refused(generation.commit, 0)
        refused(comm.begin, old, new)
        generation.stage(0)
        generation.stage(1)
        refused(generation.stage, 2)
        refused(generation.end)
        generation.commit(0)
        generation.commit(1)
        refused(generation.commit, 1)
        for layer in (2, 3):
            generation.stage(layer)
            generation.commit(layer)
        refused(generation.stage, 4)
        generation.end()
    with pytest.raises(EplbError) as closed:
        comm.rearrange(new, old)
    return said, closed.value.code, model.wrong_rows(new)


def test_calls_out_of_order_are_refused_and_lose_nothing() -> None:
    ((said, closed, wrong),) = run_ranks(1, out_of_order)
    assert {code for code, _ in said} == {"EPLB-P004"}
    assert [problem for _, problem in said] == [
        "stage(1) where layer 0 is next",
        "commit(0) without stage(0)",
        "begin() while a rearrangement is open",
        "stage(2) while layer(s) [0, 1] are staged and uncommitted",
        "end() before layer(s) [0, 1, 2, 3] were staged and committed",
        "commit(1) without stage(1)",
        "stage(4) after every layer was staged",
    ]
    assert (closed, wrong) == ("EPLB-T008", [])
