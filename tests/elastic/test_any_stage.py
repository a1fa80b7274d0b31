"""A stage without MoE layers, and layers with different numbers of experts on a rank, in one communicator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.errors import EplbError, MetadataError, PlanError
from eplb_core.testing.known_bytes import known_bytes
from eplb_core.testing.ranks import Rank, run_ranks
from tests.support.backends import BackendCase, case_config, case_options, device_group, every_backend

LOCAL = (4, 2, 3)
"""Experts of each layer on a rank."""
NBYTES = ((512, 16), (512, 16), (64,))


# --- no layers --------------------------------------------------------------------------------------------------------


def has_no_layers(rank: Rank, backend: str):
    config = case_config(backend, timeout_s=10)
    with eplb.Communicator(config, [], rank.control(), options=case_options()) as comm:
        comm.connect()
        reports = [comm.rearrange(np.empty((0, 12), int), np.empty((0, 12), int)) for _ in range(2)]
        comm.reloaded([])
        gen = comm.begin([], [])
        gen.end()
        comm.rebuild(10)
        reports.append(comm.rearrange([], []))
        landing = comm.report.staging.nbytes_peak
    return comm.backend, [(report.committed_layers, report.nbytes_received) for report in reports], landing


@every_backend
def test_a_stage_without_layers_builds_a_communicator_that_does_nothing(backend: BackendCase) -> None:
    for name, reports, landing in run_ranks(2, has_no_layers, backend.name, env=backend.env):
        assert name == backend.name
        assert reports == [((), 0)] * 3
        assert landing == 0


def loads_no_library(rank: Rank):
    import sys

    with eplb.Communicator(case_config("nixl", timeout_s=10), [], rank.control()) as comm:
        comm.rearrange([], [])
        return comm.backend, sorted({"nixl", "eplb_nixl.backend"} & set(sys.modules))


def test_a_stage_without_layers_loads_no_library_of_a_backend() -> None:
    assert run_ranks(1, loads_no_library) == [("nixl", [])]


def one_has_no_layers(rank: Rank):
    weights = [] if rank.rank == 1 else [[torch.zeros(4, 8)]]
    old = np.arange(8)[None] if weights else np.empty((0, 8), int)
    with (
        eplb.Communicator(case_config("torch_gloo", timeout_s=10), weights, rank.control()) as comm,
        pytest.raises(MetadataError) as caught,
    ):
        comm.rearrange(old, old)
    return caught.value.code, str(caught.value)


def test_a_rank_without_layers_among_ranks_that_have_some_is_named_on_every_rank() -> None:
    for code, text in run_ranks(2, one_has_no_layers):
        assert code == "EPLB-M002"
        assert "Missing on rank 1: [(0, '0')]." in text


# --- layers of different sizes ----------------------------------------------------------------------------------------


def placements(world_size: int, count: int = 3) -> list[np.ndarray]:
    """Return maps of layers of `LOCAL` experts on a rank, which have the columns of the largest."""
    rng = np.random.default_rng(7)
    maps = []
    for _ in range(count):
        grid = np.full((len(LOCAL), world_size, max(LOCAL)), -1)
        for layer, local in enumerate(LOCAL):
            grid[layer, :, :local] = rng.permutation(world_size * local).reshape(world_size, local) % (
                world_size * local - 1
            )
        maps.append(grid.reshape(len(LOCAL), -1))
    return maps


def filled(rank: int, mapping: np.ndarray) -> list[list[torch.Tensor]]:
    own = mapping[:, rank * max(LOCAL) : (rank + 1) * max(LOCAL)]
    return [
        [
            torch.stack([torch.from_numpy(known_bytes(layer, tensor, int(e), n)) for e in own[layer, : LOCAL[layer]]])
            for tensor, n in enumerate(sizes)
        ]
        for layer, sizes in enumerate(NBYTES)
    ]


def rearranges_them(rank: Rank, backend: str):
    maps = placements(rank.world_size)
    weights = filled(rank.rank, maps[0])
    config = case_config(backend, timeout_s=20)
    group = device_group(rank, backend)
    with eplb.Communicator(config, weights, rank.control(), group, options=case_options()) as comm:
        wrong = 0
        for old, new in zip(maps, [*maps[1:], maps[0]], strict=True):
            comm.rearrange(old, new)
            wanted = filled(rank.rank, new)
            wrong += sum(
                not torch.equal(have, want)
                for layer, other in zip(weights, wanted, strict=True)
                for have, want in zip(layer, other, strict=True)
            )
        out_of_place = maps[1].copy()
        out_of_place[1, 2] = 0  # layer 1 has rows 0 and 1
        with pytest.raises(PlanError) as refused:
            comm.rearrange(maps[0], out_of_place if rank.rank == 0 else maps[1])
        with pytest.raises(PlanError):
            comm.reloaded(out_of_place)
        comm.rearrange(maps[0], maps[1])
    return wrong, str(refused.value)


@every_backend
def test_layers_with_different_numbers_of_local_experts_go_into_one_communicator(backend: BackendCase) -> None:
    for wrong, text in run_ranks(3, rearranges_them, backend.name, env=backend.env):
        assert wrong == 0
        assert "puts expert 0 at layer 1, slot 2, which is row 2 of rank 0, and the layer has 2 rows on a rank" in text


def differs_in_one_layer(rank: Rank):
    counts = (4, 3) if rank.rank else (4, 2)
    weights = [[torch.zeros(count, 8)] for count in counts]
    old = np.full((2, 8), -1)
    with (
        eplb.Communicator(case_config("torch_gloo", timeout_s=10), weights, rank.control()) as comm,
        pytest.raises(EplbError) as caught,
    ):
        comm.rearrange(old, old)
    return caught.value.code, str(caught.value)


def test_a_layer_with_more_experts_on_one_rank_is_named() -> None:
    for code, text in run_ranks(2, differs_in_one_layer):
        assert code == "EPLB-M004"
        assert "num_local_physical_experts mismatch" in text
        assert "in layer 1" in text
