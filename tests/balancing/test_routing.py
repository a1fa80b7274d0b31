"""Routing tables, and the rows that a change of placement moves between ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from eplb_core.balancing import align, routing_tables, rows_received
from eplb_core.errors import PlanError
from eplb_core.plan import check_maps, plan_moves


@st.composite
def maps(draw):
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 12)))
    return draw(npst.arrays(np.int64, shape, elements=st.integers(-1, draw(st.integers(0, 8)))))


@given(maps())
def test_a_table_lists_the_slots_of_every_expert_ascending_and_pads_with_minus_one(placement):
    experts = 9
    table, counts = routing_tables(placement, experts)
    for layer, row in enumerate(placement):
        for expert in range(experts):
            slots = np.flatnonzero(row == expert).tolist()
            assert counts[layer, expert] == len(slots)
            assert table[layer, expert].tolist() == slots + [-1] * (table.shape[2] - len(slots))


@given(maps())
def test_tables_made_for_a_fixed_shape_hold_the_same_slots(placement):
    narrow, wide = routing_tables(placement, 9), routing_tables(placement, 9, max_replicas=12)
    width = narrow.logical_to_physical_map.shape[2]
    assert wide.logical_to_physical_map.shape == (len(placement), 9, 12)
    assert (wide.logical_to_physical_map[..., :width] == narrow.logical_to_physical_map).all()
    assert (wide.logical_to_physical_map[..., width:] == -1).all()


def test_the_number_of_experts_is_the_largest_and_one_where_none_is_given():
    assert routing_tables([[4, -1, 4]]).logical_replica_count.tolist() == [[0, 0, 0, 0, 2]]
    assert routing_tables([[-1, -1]]).logical_to_physical_map.shape == (1, 0, 0)


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        ([[0, 3]], {"num_logical_experts": 3}, "names expert 3, there are 3"),
        ([[0, 1], [1, 1]], {"max_replicas": 1}, "expert 1 of layer 1 has 2 replicas, at most 1 fit"),
        ([0, 1], {}, "must be integer"),
        ([[0.5, 1]], {}, "must be integer"),
        ([[0, -2]], {}, "-1 is the only negative value"),
    ],
)
def test_what_cannot_be_a_table_is_refused(given, options, text):
    with pytest.raises(PlanError, match=text) as error:
        routing_tables(given, **options)
    assert error.value.code == "EPLB-P001"


def test_the_tables_of_a_large_model_are_made_without_a_loop_over_experts():
    rng = np.random.default_rng(0)
    placement = rng.integers(0, 256, (61, 288))
    placement[:, :256] = rng.permutation(256)
    table, counts = routing_tables(placement, 256)
    assert counts.sum() == placement.size
    assert ((table >= 0).sum(axis=2) == counts).all()


@st.composite
def placements_of_ranks(draw):
    ranks, local, layers = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = draw(st.integers(1, 6))
    shape = (layers, ranks * local)
    return (
        draw(npst.arrays(np.int64, shape, elements=st.integers(-1, experts - 1))),
        draw(npst.arrays(np.int64, shape, elements=st.integers(-1, experts - 1))),
        ranks,
    )


@given(placements_of_ranks())
def test_rows_received_are_those_that_the_plan_moves_between_ranks(case):
    old, new, ranks = case
    held = [set(row.tolist()) for row in old]
    new = np.array([[e if e in held[layer] else -1 for e in row] for layer, row in enumerate(new.tolist())])
    maps = check_maps(old, new, num_layers=len(old), world_size=ranks, num_local_physical_experts=old.shape[1] // ranks)
    plan = plan_moves(*maps, world_size=ranks)
    moved = np.diff(plan.layer_starts).tolist()
    assert rows_received(old, new, ranks).tolist() == moved


def test_aligned_placements_move_fewer_rows():
    old = np.array([[0, 1, 2, 3]])
    new = np.array([[2, 3, 0, 1]])
    assert rows_received(old, new, 2).tolist() == [4]
    assert rows_received(old, align(old, new, 2), 2).tolist() == [0]


def test_no_layers_receive_no_rows():
    assert rows_received(np.empty((0, 4), int), np.empty((0, 4), int), 2).tolist() == []


def test_rows_cannot_be_counted_between_maps_of_two_shapes():
    with pytest.raises(PlanError, match="old_map is"):
        rows_received([[0, 1]], [[0, 1, 2, 3]], 2)
