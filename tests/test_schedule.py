"""How a layer's moves travel: messages, landing offsets, batches."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.backend import MoveColumns, TransferPlan
from eplb_core.errors import PlanError
from eplb_core.plan import PlacementPlan, TransferRules, plan_moves
from eplb_core.plan.rank_plan import RankMoves
from eplb_core.weights.layout import LayerGeometry, build_layout


def geometry_of(num_rows: int, nbytes: list[int]) -> LayerGeometry:
    return build_layout([[torch.zeros(num_rows, n, dtype=torch.uint8) for n in nbytes]]).geometries[0]


def planned(old, new, world_size: int) -> PlacementPlan:
    return plan_moves(np.array([old], np.int64), np.array([new], np.int64), world_size=world_size)


def shares(plan: PlacementPlan, geometry: LayerGeometry, **how) -> list[TransferPlan]:
    """Return every rank's share of layer 0."""
    rules = TransferRules(**({"landing_layout": "packed_by_peer"} | how))
    numbers = {"generation": 3, "sequence": 5, "slot": 1}
    return [plan.transfer_plan(0, rank, geometry, rules, **numbers) for rank in range(plan.world_size)]


def columns(moves, *names: str) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(moves, name).tolist() for name in names), strict=True))


def broadcast(world_size: int, num_rows: int, num_experts: int) -> PlacementPlan:
    """Rank 0 sends its first experts to the same rows of every other rank."""
    old = list(range(world_size * num_rows))
    new = [row if row < num_experts else rank * num_rows + row for rank in range(world_size) for row in range(num_rows)]
    return planned(old, new, world_size)


@st.composite
def layers(draw) -> tuple[PlacementPlan, LayerGeometry]:
    world_size, num_rows = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    size = world_size * num_rows
    slots = st.lists(st.integers(0, size - 1), min_size=size, max_size=size)
    old = draw(slots)
    plan = planned(old, [old[column] for column in draw(slots)], world_size)
    sizes = st.sampled_from([1, 8, 63, 64, 65, 100, 300])
    return plan, geometry_of(num_rows, draw(st.lists(sizes, min_size=1, max_size=4)))


def all_rows(plan: PlacementPlan, geometry: LayerGeometry) -> list[tuple[int, ...]]:
    """Return (src, dst, tensor, src row, dst row, nbytes) of the layer in canonical order."""
    moved = zip(*(column.tolist() for column in (plan.src, plan.dst, plan.src_row, plan.dst_row)), strict=True)
    return sorted(
        (src, dst, tensor, src_row, dst_row, int(geometry.nbytes[tensor]))
        for src, dst, src_row, dst_row in moved
        for tensor in geometry.moving.tolist()
    )


def as_computed(plans: list[TransferPlan], what: str) -> list[tuple[int, ...]]:
    """Return (*row of all_rows, *columns of `what`) as the receivers have it, and check that the senders agree."""
    names = ("tensor", "nbytes", *what.split())
    sent = [
        (src, peer, *row)
        for src, plan in enumerate(plans)
        for peer, *row in columns(plan.sends, "peer", "row", "peer_row", *names)
    ]
    received = [
        (peer, dst, *row)
        for dst, plan in enumerate(plans)
        for peer, *row in columns(plan.receives, "peer", "peer_row", "row", *names)
    ]
    received = [(src, dst, t, sr, dr, n, *rest) for src, dst, sr, dr, t, n, *rest in received]
    sent = [(src, dst, t, sr, dr, n, *rest) for src, dst, sr, dr, t, n, *rest in sent]
    assert sent == sorted(received)
    for plan in plans:
        assert columns(plan.receives, "peer", "tensor", "peer_row") == sorted(
            columns(plan.receives, "peer", "tensor", "peer_row")
        )
    return sent


# --- rows -------------------------------------------------------------------------------------------------------------


@given(layers())
def test_in_a_grid_every_row_is_a_message_that_lands_at_its_own_place(layer):
    plan, geometry = layer
    expected, numbers = [], defaultdict(int)
    for src, dst, tensor, src_row, dst_row, nbytes in all_rows(plan, geometry):
        offset = int(geometry.offsets[tensor]) + dst_row * nbytes
        expected.append((src, dst, tensor, src_row, dst_row, nbytes, offset, numbers[src, dst]))
        numbers[src, dst] += 1
    # Small rows are packed in the other layout only.
    plans = shares(plan, geometry, landing_layout="rows", coalesce_nbytes=100)
    assert as_computed(plans, "landing_offset message") == expected


# --- packed -----------------------------------------------------------------------------------------------------------


@given(layers(), st.sampled_from([0, 50, 64, 65, 1000]))
def test_messages_and_offsets_follow_the_rule_on_every_rank(layer, coalesce_nbytes):
    plan, geometry = layer
    rows = all_rows(plan, geometry)
    leaving: dict[int, set] = defaultdict(set)
    for src, _, tensor, src_row, _, _ in rows:
        leaving[src].add((tensor, src_row))
    room = {src: geometry.nbytes_rows - sum(int(geometry.nbytes[t]) for t, _ in rows) for src, rows in leaving.items()}
    staged, refused = set(), set()
    packed, alone = defaultdict(list), defaultdict(list)
    for row in rows:
        src, dst, tensor, src_row, _, nbytes = row
        first = (src, tensor, src_row) not in staged
        staged.add((src, tensor, src_row))
        small = nbytes < coalesce_nbytes
        if small and not first:
            refused |= {src} if nbytes > room[src] else set()
            room[src] -= nbytes
        (packed if small and (first or src not in refused) else alone)[src, dst].append(row)
    expected = {}
    for receiver in range(plan.world_size):
        end = 0
        for source in range(plan.world_size):
            together = packed[source, receiver]
            messages = ([together] if together else []) + [[row] for row in alone[source, receiver]]
            for number, message in enumerate(messages):
                end = -(-end // 64) * 64
                for row in message:
                    expected[row] = (end, number)
                    end += row[-1]
        assert end <= geometry.nbytes_packed(plan.world_size - 1)
    plans = shares(plan, geometry, coalesce_nbytes=coalesce_nbytes)
    assert as_computed(plans, "landing_offset message") == [(*row, *expected[row]) for row in rows]


@given(layers(), st.sampled_from([0, 65, 1000]))
def test_a_source_never_packs_more_than_one_slot(layer, coalesce_nbytes):
    plan, geometry = layer
    for share in shares(plan, geometry, coalesce_nbytes=coalesce_nbytes):
        sizes = columns(share.sends, "peer", "message", "tensor", "row", "nbytes")
        together = defaultdict(list)
        for peer, message, *row in sizes:
            together[peer, message].append(tuple(row))
        several = [row for rows in together.values() if len(rows) > 1 for row in rows]
        single = {rows[0] for rows in together.values() if len(rows) == 1} - set(several)
        assert sum(nbytes for *_, nbytes in [*several, *single]) <= geometry.nbytes_rows


def test_small_rows_of_a_pair_are_one_message_and_large_ones_travel_alone():
    plans = shares(broadcast(2, 3, 2), geometry_of(3, [100, 1000, 10]), coalesce_nbytes=1000)
    receives = plans[1].receives
    assert columns(receives, "tensor", "row", "message", "landing_offset") == [
        (0, 0, 0, 0), (0, 1, 0, 100), (1, 0, 1, 256), (1, 1, 2, 1280), (2, 0, 0, 200), (2, 1, 0, 210),
    ]  # fmt: skip


def test_a_row_as_large_as_the_limit_travels_alone():
    geometry = geometry_of(3, [100])
    assert shares(broadcast(2, 3, 2), geometry, coalesce_nbytes=100)[1].receives.message.tolist() == [0, 1]
    assert shares(broadcast(2, 3, 2), geometry, coalesce_nbytes=101)[1].receives.message.tolist() == [0, 0]


def test_rows_for_further_receivers_travel_alone_once_the_sources_slot_is_full():
    # A slot holds four rows. Two distinct rows leave, so two repeats fit: those for rank 2. Ranks 3 and 4 get singles.
    plans = shares(broadcast(5, 4, 2), geometry_of(4, [100]), coalesce_nbytes=1000)
    assert [plan.receives.message.tolist() for plan in plans[1:]] == [[0, 0], [0, 0], [0, 1], [0, 1]]
    assert [plan.receives.landing_offset.tolist() for plan in plans[1:]] == [[0, 100], [0, 100], [0, 128], [0, 128]]


def test_tensors_that_do_not_move_are_in_no_plan():
    tensor = torch.zeros(2, 8, dtype=torch.uint8)
    geometry = build_layout([[torch.zeros(2, 0), tensor, tensor, torch.zeros(2, 4)]]).geometries[0]
    for layout in ("rows", "packed_by_peer"):
        receives = shares(broadcast(2, 2, 1), geometry, landing_layout=layout, coalesce_nbytes=99)[1].receives
        assert columns(receives, "tensor", "nbytes") == [(1, 8), (3, 16)]


@pytest.mark.parametrize("landing_layout", ["rows", "packed_by_peer"])
@pytest.mark.parametrize("limit", [None, 32])
def test_a_layer_without_bytes_to_move_is_an_empty_plan(landing_layout, limit):
    nothing_moves = planned([0, 1], [0, 1], 2), geometry_of(1, [8])
    nothing_to_move = planned([0, 1], [1, 0], 2), build_layout([[torch.zeros(1, 0)]]).geometries[0]
    for plan, geometry in (nothing_moves, nothing_to_move):
        for share in shares(plan, geometry, landing_layout=landing_layout, max_ops_per_batch=limit):
            assert (len(share.sends), len(share.receives), share.num_batches) == (0, 0, 0)


# --- several layers ---------------------------------------------------------------------------------------------------


@st.composite
def models(draw) -> tuple[PlacementPlan, list[LayerGeometry]]:
    """A plan of several layers, some of which move nothing, in up to two geometries."""
    world_size, num_rows, num_layers = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    size = world_size * num_rows
    maps = st.one_of(st.permutations(range(size)), st.just(list(range(size))))
    old, new = ([draw(maps) for _ in range(num_layers)] for _ in range(2))
    two = [geometry_of(num_rows, [8, 100]), geometry_of(num_rows, [8, 65, 1])]
    geometries = [two[draw(st.integers(0, 1))] for _ in range(num_layers)]
    return plan_moves(np.array(old, np.int64), np.array(new, np.int64), world_size=world_size), geometries


@given(
    models(),
    st.sampled_from(["rows", "packed_by_peer"]),
    st.sampled_from([None, 3]),
    st.booleans(),
    st.sampled_from([1, 12, 999]),
)
def test_layers_planned_together_are_those_planned_alone(model, landing_layout, limit, one_peer, at_a_time):
    plan, geometries = model
    rules = TransferRules(landing_layout, 50, limit, one_peer)
    for rank in range(plan.world_size):
        together = RankMoves(
            plan, geometries, partial(plan.layer_moves, rank=rank, rules=rules), rows_at_a_time=at_a_time
        )
        for layer in plan.layers:
            share = together.of(layer)
            alone = plan.transfer_plan(layer, rank, geometries[layer], rules, generation=1, sequence=1, slot=0)
            assert share.num_batches == alone.num_batches
            names = [field.name for field in fields(MoveColumns)]
            for one, other in ((share.sends, alone.sends), (share.receives, alone.receives)):
                assert columns(one, *names) == columns(other, *names)
                assert not any(getattr(one, name).flags.writeable for name in names)


def test_many_small_layers_are_planned_at_once_and_large_ones_when_their_turn_comes():
    old = np.tile(np.arange(8), (6, 1))
    plan = plan_moves(old, np.roll(old, 4, axis=1), world_size=2)
    small, large = geometry_of(4, [8]), geometry_of(4, [8, 16, 24])
    calls = []

    def work_out(first, stop, geometry):
        calls.append((first, stop))
        return [(first, layer) for layer in range(first, stop)]

    shares = RankMoves(plan, [small] * 3 + [large] * 3, work_out, rows_at_a_time=24)  # 8 rows a layer, then 24
    assert [shares.of(layer) for layer in range(6)] == [(0, 0), (0, 1), (0, 2), (3, 3), (4, 4), (5, 5)]
    assert calls == [(0, 3), (3, 4), (4, 5), (5, 6)]


# --- batches ----------------------------------------------------------------------------------------------------------


def operations(plans: list[TransferPlan]) -> dict[tuple[int, int], list[int]]:
    """Return the peers of each (rank, batch), once per operation."""
    found = defaultdict(list)
    for rank, plan in enumerate(plans):
        for moves in (plan.sends, plan.receives):
            for peer, batch in columns(moves, "peer", "batch"):
                found[rank, batch].append(peer)
    return found


def test_300_moves_are_cut_so_that_a_send_and_its_receive_share_a_batch_of_at_most_32_operations():
    # Case 8: two ranks exchange all of 150 experts.
    plan = planned(list(range(300)), [*range(150, 300), *range(150)], 2)
    for layout in ("rows", "packed_by_peer"):
        plans = shares(plan, geometry_of(150, [8]), max_ops_per_batch=32, landing_layout=layout)
        assert sum(len(share.sends) for share in plans) == 300
        as_computed(plans, "batch")  # both ends have the same batch
        found = operations(plans)
        assert max(map(len, found.values())) == 32
        assert [share.num_batches for share in plans] == [10, 10]
        assert {batch for _, batch in found} == set(range(10))


@pytest.mark.parametrize("landing_layout", ["rows", "packed_by_peer"])
@given(layers(), st.integers(1, 9), st.booleans())
def test_each_move_goes_into_the_first_batch_with_room_at_both_ends(landing_layout, layer, limit, one_peer):
    plan, geometry = layer
    peers: dict[tuple[int, int], list[int]] = defaultdict(list)
    expected = []

    def fits(rank, peer, batch):
        there = peers[rank, batch]
        return len(there) < limit and (not one_peer or set(there) <= {peer})

    for row in all_rows(plan, geometry):
        src, dst, *_ = row
        batch = 0
        while not (fits(src, dst, batch) and fits(dst, src, batch)):
            batch += 1
        peers[src, batch].append(dst)
        peers[dst, batch].append(src)
        expected.append((*row, batch))
    plans = shares(
        plan,
        geometry,
        landing_layout=landing_layout,
        max_ops_per_batch=limit,
        one_peer_per_batch=one_peer,
    )
    assert as_computed(plans, "batch") == expected
    assert {share.num_batches for share in plans} == {max((row[-1] for row in expected), default=-1) + 1}


def test_migration_batching_gives_a_rank_one_peer_per_batch():
    plan = planned(list(range(16)), [*range(12, 16), *range(12)], 4)
    free, paired = (
        shares(plan, geometry_of(4, [8]), max_ops_per_batch=32, one_peer_per_batch=migration)
        for migration in (False, True)
    )
    assert max(len(set(peers)) for peers in operations(free).values()) == 2
    assert max(len(set(peers)) for peers in operations(paired).values()) == 1


def test_migration_batching_changes_nothing_for_a_backend_without_batches():
    plan = planned(list(range(16)), [*range(12, 16), *range(12)], 4)
    for share in shares(plan, geometry_of(4, [8]), one_peer_per_batch=True):
        assert share.num_batches == 1
        assert set(share.sends.batch.tolist()) | set(share.receives.batch.tolist()) == {0}


# --- arguments --------------------------------------------------------------------------------------------------------


def test_numbers_of_the_rearrangement_are_passed_on():
    share = shares(broadcast(2, 2, 1), geometry_of(2, [8]))[0]
    assert (share.generation, share.sequence, share.layer, share.slot) == (3, 5, 0, 1)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"landing_layout": "columns"}, "landing_layout is 'columns'"),
        ({"max_ops_per_batch": 0}, "max_ops_per_batch is 0"),
    ],
)
def test_arguments_out_of_range_are_refused(how, named):
    with pytest.raises(PlanError, match=named) as caught:
        shares(broadcast(2, 2, 1), geometry_of(2, [8]), **how)
    assert caught.value.code == "EPLB-P007"


def test_a_geometry_of_another_number_of_experts_is_refused():
    with pytest.raises(PlanError, match="3 experts per rank, the maps 2"):
        shares(broadcast(2, 2, 1), geometry_of(3, [8]))


@pytest.mark.parametrize("batching", ["no batches", "batches", "batches of one peer"])
def test_scheduling_speed_of_a_large_layer(batching):
    rng = np.random.default_rng(0)
    slots = np.arange(4096) % 3584
    plan = planned(rng.permutation(slots), rng.permutation(slots), 256)
    geometry = geometry_of(16, [65536, 65536, 65536, 2048, 100, 4])
    limit = None if batching == "no batches" else 32
    rules = TransferRules("packed_by_peer", 1 << 17, limit, "one peer" in batching)
    wall_s, cpu_s = [], []
    for _ in range(5):
        start, start_cpu = time.perf_counter(), time.thread_time()
        plan.transfer_plan(0, 7, geometry, rules, generation=0, sequence=0, slot=0)
        wall_s.append(time.perf_counter() - start)
        cpu_s.append(time.thread_time() - start_cpu)
    print(
        f"\nschedule: 4096 slots x 6 tensors x 256 ranks, packed, {batching}: "
        f"{1e3 * min(wall_s):.1f} ms, {1e3 * min(cpu_s):.1f} ms of one core"
    )
    assert min(cpu_s) < 1  # as in test_plan
