"""A registered tensor whose memory the host replaced is found before a byte moves, and named on every rank."""

from __future__ import annotations

import pytest
import torch

from eplb_core.testing.model import Map, Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks
from tests.support.backends import BackendCase
from tests.support.lives import (
    AT_ONCE_S,
    LAYERS,
    NUM_ROWS,
    Life,
    Step,
    all_went_well,
    at,
    over_every_transport,
    same_bytes_as_claimed,
)

pytestmark = pytest.mark.slow

NAMES = ["w13", "w2"]
LAYER, TENSOR = 1, 1


def give_other_data(weight: torch.Tensor) -> None:
    weight.data = weight.data.clone()


def set_to_another(weight: torch.Tensor) -> None:
    weight.set_(weight.clone())


def set_to_nothing(weight: torch.Tensor) -> None:
    weight.set_()


def free_the_storage(weight: torch.Tensor) -> None:
    weight.untyped_storage().resize_(0)


WAYS = {
    "w.data = w.data.clone()": give_other_data,
    "w.set_(other)": set_to_another,
    "w.set_()": set_to_nothing,
    "storage resized to 0": free_the_storage,
}
KEEP_THE_BYTES = ("w.data = w.data.clone()", "w.set_(other)")


class Untouched(Model):
    """Looks at copies of its rows: torch refuses to resize a storage that numpy has seen."""

    def wrong_rows(self, mapping: Map) -> list[tuple[int, int, int]]:
        live, self.weights = self.weights, [[tensor.clone() for tensor in layer] for layer in self.weights]
        try:
            return super().wrong_rows(mapping)
        finally:
            self.weights = live


def replaces(rank: Rank, backend: str, way: str):
    """First on rank 1 alone, between two rearrangements; then, in another communicator, everywhere before the first."""
    maps = shuffles(3, 3, 2, NUM_ROWS)
    steps: list[Step] = []
    for who in ("one rank", "every rank"):
        model = Untouched(rank.rank, NUM_ROWS, LAYERS)
        model.fill(maps[0])
        life = Life(rank, backend, maps[0], model=model, tensor_names=NAMES, name=who)
        held = maps[0]
        # torch resizes no storage that numpy has seen, as gloo's have been once they were sent from.
        sent_by_gloo = (backend, way) == ("torch_gloo", "storage resized to 0")
        if who == "one rank" and not sent_by_gloo:
            life.rearrange("first", maps[1])
            held = maps[1]
        weight = model.weights[LAYER][TENSOR]
        if who == "every rank" or rank.rank == 1:
            before = weight.data.view(weight.shape)
            model.weights[LAYER][TENSOR] = weight.clone()  # what the host has of it, where nothing else is left
            WAYS[way](weight)
            if way in KEEP_THE_BYTES:
                model.weights[LAYER][TENSOR] = weight
        life.do(f"replaced on {who}", life.comm.rearrange, held, maps[2])
        if way != "storage resized to 0":
            if who == "every rank" or rank.rank == 1:
                weight.set_(before)
                model.weights[LAYER][TENSOR] = weight
            life.do(f"put right on {who}", life.comm.rearrange, held, maps[2])
        steps += life.end()
    return steps


@over_every_transport
@pytest.mark.parametrize("way", WAYS)
def test_a_replaced_storage_is_named_on_every_rank_before_a_byte_moves(backend: BackendCase, way: str) -> None:
    """Row 12."""
    stories = run_ranks(2, replaces, backend.name, way, env=backend.env)
    for who in ("one rank", "every rank"):
        steps = at(f"replaced on {who}", *stories)
        assert {step.code for step in steps} == {"EPLB-M007"}, steps
        assert {step.kind for step in steps} == {"MetadataError"}
        assert len({step.text for step in steps}) == 1, steps
        assert f"({LAYER}, '{NAMES[TENSOR]}')" in steps[0].text, steps
        assert max(step.seconds for step in steps) < AT_ONCE_S
        if way != "storage resized to 0":
            all_went_well(at(f"put right on {who}", *stories))
    same_bytes_as_claimed(*stories)


def replaces_nothing(rank: Rank):
    """Views, gradients switched off, values written in place: the memory stays where it is."""
    maps = shuffles(3, 3, 2, NUM_ROWS)
    life = Life(rank, "torch_gloo", maps[0], tensor_names=NAMES)
    life.rearrange("first", maps[1])
    weight = life.model.weights[LAYER][TENSOR]
    weight.requires_grad_(False)
    weight.copy_(weight.clone())
    weight.data = weight.data.view(weight.shape)
    life.rearrange("second", maps[2])
    return life.end()


def test_a_tensor_that_was_only_written_in_place_is_as_good_as_before() -> None:
    """Row 12."""
    stories = run_ranks(2, replaces_nothing)
    same_bytes_as_claimed(*stories)
    all_went_well(at("second", *stories))
