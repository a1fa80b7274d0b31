"""From maps to moves: what crosses ranks, from which replica, and how each rank puts it in place."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.backend import TransferPlan
from eplb_core.errors import PlanError
from eplb_core.plan import PlacementPlan, TransferRules, check_maps, plan_moves
from eplb_core.weights.layout import LayerGeometry, build_layout

LAYOUTS = ("rows", "packed_by_peer")


def geometry_of(num_rows: int, nbytes: list[int], alias: bool = False) -> LayerGeometry:
    """Register tensors with these bytes per row; with `alias`, the first one under a second key too."""
    tensors = [torch.zeros(num_rows, n, dtype=torch.uint8) for n in nbytes]
    return build_layout([tensors + tensors[:1] * alias]).geometries[0]


def planned(old, new, world_size, **how) -> PlacementPlan:
    old, new = np.array(old, np.int64), np.array(new, np.int64)
    return plan_moves(old, new, world_size=world_size, **how)


def shared(plan: PlacementPlan, layer: int, rank: int, geometry: LayerGeometry, **how) -> TransferPlan:
    rules = TransferRules(**({"landing_layout": "rows"} | how))
    return plan.transfer_plan(layer, rank, geometry, rules, generation=3, sequence=5, slot=1)


def moves(plan: PlacementPlan) -> list[tuple[int, ...]]:
    return list(zip(*(c.tolist() for c in (plan.layer, plan.src, plan.dst, plan.src_row, plan.dst_row)), strict=True))


def sources(old, new, world_size, **how) -> list[int]:
    """Return which rank serves each move, by (layer, destination rank, destination row)."""
    plan = planned(old, new, world_size, **how)
    return [src for *_, src in sorted(zip(plan.layer, plan.dst, plan.dst_row, plan.src, strict=True))]


def commit(plan: PlacementPlan, layer: int = 0, rank: int = 0) -> tuple[list, list, list]:
    """Return the copies of each level, the landed rows, the duplicates."""
    order = plan.commit_plan(layer, rank)
    levels = np.split(order.copies, order.level_starts[1:-1]) if len(order.copies) else []
    landed = sorted(plan.dst_row[(plan.layer == layer) & (plan.dst == rank)].tolist())
    return [level.tolist() for level in levels], landed, order.duplicates.tolist()


# --- moves ------------------------------------------------------------------------------------------------------------


def test_both_ends_list_a_pairs_moves_in_the_same_order_whatever_rows_they_take():
    # Case 3: rank 0 holds experts 5, 6 in this order, rank 1 wants them the other way round.
    plan = planned([[5, 6, -1, -1]], [[5, 6, 6, 5]], 2)
    geometry = geometry_of(2, [8, 16])
    sends, receives = shared(plan, 0, 0, geometry).sends, shared(plan, 0, 1, geometry).receives
    assert sends.row.tolist() == receives.peer_row.tolist() == [0, 1, 0, 1]
    assert sends.peer_row.tolist() == receives.row.tolist() == [1, 0, 1, 0]
    assert sends.tensor.tolist() == receives.tensor.tolist() == [0, 0, 1, 1]
    assert sends.nbytes.tolist() == receives.nbytes.tolist() == [8, 8, 16, 16]
    assert sends.peer.tolist() == [1] * 4
    assert receives.peer.tolist() == [0] * 4


def test_moves_are_ordered_by_layer_source_destination_and_source_row():
    plan = planned(
        [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]],
        [[5, 2, 4, 1, 3, 0], [0, 1, 2, 3, 1, 0]],
        3,
    )
    assert moves(plan) == [
        (0, 0, 1, 1, 1), (0, 0, 2, 0, 1), (0, 1, 0, 0, 1), (0, 1, 2, 1, 0), (0, 2, 0, 1, 0), (0, 2, 1, 0, 0),
        (1, 0, 2, 0, 1), (1, 0, 2, 1, 0),
    ]  # fmt: skip
    assert plan.layer_starts.tolist() == [0, 6, 8]


def test_an_expert_wanted_twice_by_a_rank_is_read_once_and_fills_both_rows():
    # Case 10.
    plan = planned([[7, 1, 2, 3]], [[7, 1, 7, 7]], 2)
    assert moves(plan) == [(0, 0, 1, 0, 0)]
    assert commit(plan, rank=1) == ([], [0], [[1, 0]])


def test_an_expert_received_lands_in_the_lowest_row_that_wants_it():
    plan = planned([[7, 0, 0, 1, 2, 3]], [[7, 0, 0, 1, 7, 7]], 2)
    assert moves(plan) == [(0, 0, 1, 0, 1)]
    assert commit(plan, rank=1) == ([], [1], [[2, 1]])


def test_the_lowest_row_is_read_when_a_source_holds_an_expert_twice():
    # Row 1 keeps expert 7, row 0 does not; both hold it until the commit.
    assert moves(planned([[7, 7, 0, 1]], [[1, 7, 7, 1]], 2)) == [(0, 0, 1, 0, 0), (0, 1, 0, 1, 0)]


def test_rows_that_keep_their_expert_and_rows_that_become_empty_are_left_alone():
    plan = planned([[0, 1, 2, 3, -1, -1]], [[0, -1, 2, 3, -1, -1]], 2)
    assert plan.layers == ()
    assert moves(plan) == []
    for rank in range(2):
        assert commit(plan, 0, rank) == ([], [], [])


def test_layers_that_move_something_within_a_rank_only_are_listed_too():
    plan = planned([[0, 1, 2, 3]] * 3, [[0, 1, 2, 3], [1, 0, 2, 3], [2, 1, 0, 3]], 2)
    assert plan.layers == (1, 2)


def test_a_plan_of_no_layers_is_empty():
    plan = planned(np.zeros((0, 4)), np.zeros((0, 4)), 2)
    assert plan.layers == ()
    assert plan.pairs.shape == (0, 2)


def test_peers_are_those_of_any_layer_in_either_direction():
    plan = planned([[0, 1, 2, 3], [0, 1, 2, 3]], [[0, 0, 2, 3], [0, 1, 2, 0]], 4)
    assert plan.pairs.tolist() == [[0, 1], [0, 3]]
    assert [plan.peers(rank) for rank in range(4)] == [(1, 3), (0,), (), (0,)]


@pytest.mark.parametrize("bits", range(48, 63))
def test_large_ids_give_the_plan_of_small_ones(bits):
    # Wherever it happens that layer, rank, expert and row no longer fit one integer.
    old, new = [[0, 1, 2, 3, 4, 0]] * 3, [[1, 0, 4, 4, 0, 2]] * 3
    large = 2**bits + np.arange(5)
    expected, plan = planned(old, new, 3), planned(large[old], large[new], 3)
    assert moves(plan) == moves(expected)
    for rank in range(3):
        assert commit(plan, 2, rank) == commit(expected, 2, rank)


# --- sources ----------------------------------------------------------------------------------------------------------


def test_a_replica_on_the_readers_own_node_is_preferred():
    # Case 23.
    assert sources([[9, 0, 9, 1]], [[9, 0, 9, 9]], 4, nodes=[0, 0, 1, 1]) == [2]


def test_replicas_take_turns_by_destination_and_start_further_on_in_every_layer():
    old = [[9, 9, 0, 1, 2, 3]] * 3
    new = [[9, 9, 9, 9, 9, 9]] * 3
    assert sources(old, new, 6) == [0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1]


def test_replicas_of_a_node_take_turns_among_its_own_readers():
    old = [[9, 9, 0, 9, 1, 2, 3, 4]]
    new = [[9, 9, 9, 9, 9, 9, 9, 9]]
    # Node 1 (ranks 3 to 5) has one replica; ranks 6 and 7 have none on theirs and take turns among all three.
    assert sources(old, new, 8, nodes=[4, 4, 4, 1, 1, 1, 0, 2]) == [0, 3, 3, 0, 1]


def test_a_rank_with_two_rows_of_an_expert_counts_as_one_replica():
    assert sources([[9, 9, 9, 0, 1, 2, 3, 4]], [[9, 9, 9, 0, 9, 2, 9, 4]], 4) == [0, 1]


# --- members ----------------------------------------------------------------------------------------------------------


def test_ranks_keep_their_numbers_when_others_are_absent():
    plan = planned([[9, 0, 9, 1]], [[-1, -1, 9, 9]], 4, members=[2, 3])
    assert moves(plan) == [(0, 2, 3, 0, 0)]
    assert plan.peers(3) == (2,)


def test_an_expert_held_only_by_an_absent_rank_is_held_nowhere():
    with pytest.raises(PlanError, match=r"^Layer 1: expert 4 is needed by rank 2 .* ranks \[0\]") as caught:
        planned([[0, 1, 2], [4, 1, 2]], [[-1, 1, 2], [-1, 1, 4]], 3, members=[1, 2])
    assert caught.value.code == "EPLB-P002"


def test_an_expert_that_nobody_holds_is_refused_naming_layer_expert_and_rank():
    with pytest.raises(PlanError, match=r"Layer 0: expert 8 is needed by rank 1 .* 1 more") as caught:
        planned([[0, 1, 2, 3]], [[0, 1, 8, 9]], 2)
    assert caught.value.fields == {"layer": 0, "expert": 8, "rank": 1}


def test_a_map_that_puts_an_expert_on_an_absent_rank_is_refused():
    with pytest.raises(PlanError, match="Layer 0: the plan needs rank 1, which is not a member") as caught:
        planned([[0, 1, 2, 3]], [[0, 1, -1, 3]], 2, members=[0])
    assert caught.value.code == "EPLB-P005"


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"members": [0, 2]}, "member 2"),
        ({"members": [-1]}, "member -1"),
        ({"nodes": [0]}, "1 nodes are given for 2 ranks"),
    ],
)
def test_members_and_nodes_must_fit_the_world(how, named):
    with pytest.raises(PlanError, match=named) as caught:
        planned([[0, 1]], [[1, 0]], 2, **how)
    assert caught.value.code == "EPLB-P007"


# --- commit -----------------------------------------------------------------------------------------------------------


def test_a_swap_takes_the_spare_row_once():
    levels, landed, duplicates = commit(planned([[0, 1, 2]], [[1, 0, 2]], 1))
    assert levels == [[[3, 0]], [[0, 1]], [[1, 3]]]
    assert landed == duplicates == []


def test_a_chain_needs_no_spare_row():
    # Row 2 receives; its old expert goes to row 1, whose goes to row 0.
    plan = planned([[0, 1, 2, 9, 8, 7]], [[1, 2, 9, 9, 8, 7]], 2)
    assert commit(plan) == ([[[0, 1]], [[1, 2]]], [2], [])


def test_independent_chains_share_levels():
    plan = planned([[0, 1, 2, 3, 4, 5]], [[1, 2, -1, 4, 5, -1]], 1)
    assert commit(plan)[0] == [[[0, 1], [3, 4]], [[1, 2], [4, 5]]]


def test_cycles_follow_the_chains_that_read_from_them_and_one_another():
    # Rows 0, 1 and rows 2, 3 swap; row 4 takes the old content of row 0.
    levels, *_ = commit(planned([[0, 1, 2, 3, 9]], [[1, 0, 3, 2, 0]], 1))
    assert levels == [[[4, 0]], [[5, 0]], [[0, 1]], [[1, 5]], [[5, 2]], [[2, 3]], [[3, 5]]]


def test_a_local_copy_reads_the_row_that_keeps_the_expert():
    # Expert 7 is in rows 0 and 2; only row 2 keeps it, so that row 0 may change at once.
    assert commit(planned([[7, 0, 7, 1]], [[1, 7, 7, 1]], 1))[0] == [[[0, 3], [1, 2]]]
    # A row that becomes empty keeps its bytes just as well.
    assert commit(planned([[7, 0, 7, 1]], [[1, 7, -1, 1]], 1))[0] == [[[0, 3], [1, 2]]]


# --- any rearrangement ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rearrangement:
    world_size: int
    num_rows: int
    old: list[list[int]]
    new: list[list[int]]
    members: list[int] | None
    nodes: list[int] | None

    @property
    def present(self) -> list[int]:
        return list(range(self.world_size)) if self.members is None else self.members

    def plan(self) -> PlacementPlan:
        return planned(self.old, self.new, self.world_size, members=self.members, nodes=self.nodes)

    def rows(self, placement: list[list[int]], layer: int, rank: int) -> list[int]:
        return placement[layer][rank * self.num_rows : (rank + 1) * self.num_rows]


@st.composite
def rearrangements(draw) -> Rearrangement:
    """Draw maps with empty slots, duplicates, local permutations, lost experts, absent ranks and nodes."""
    world_size, num_rows = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    slots = world_size * num_rows
    members = draw(st.none() | st.sets(st.integers(0, world_size - 1), min_size=1).map(sorted))
    nodes = draw(st.none() | st.lists(st.integers(0, 2), min_size=world_size, max_size=world_size))
    present = range(world_size) if members is None else members
    columns = [rank * num_rows + row for rank in present for row in range(num_rows)]
    old, new = [], []
    for _ in range(draw(st.integers(1, 3))):
        before = draw(st.lists(st.integers(-1, draw(st.integers(0, 10))), min_size=slots, max_size=slots))
        after = [-1] * slots
        if draw(st.booleans()):
            for column in columns:
                after[column] = before[draw(st.sampled_from(columns))]
        else:
            for rank in present:
                mine = before[rank * num_rows : (rank + 1) * num_rows]
                after[rank * num_rows : (rank + 1) * num_rows] = draw(st.permutations(mine))
        old.append(before)
        new.append(after)
    return Rearrangement(world_size, num_rows, old, new, members, nodes)


def content(what: tuple[int, ...], nbytes: int) -> np.ndarray:
    return np.random.default_rng([x + 1 for x in what]).integers(0, 256, nbytes, np.uint8)


def exchange(plans: dict[int, TransferPlan], live, landing) -> None:
    """Carry every message as bytes: what a source reads in its own order, a destination finds in its own."""
    sent: dict[tuple[int, int, int], list[tuple[int, ...]]] = defaultdict(list)
    expected: dict[tuple[int, int, int], list[tuple[int, ...]]] = defaultdict(list)
    for rank, plan in plans.items():
        s, r = plan.sends, plan.receives
        for peer, number, *row in zip(s.peer, s.message, s.tensor, s.row, s.nbytes, s.landing_offset, strict=True):
            sent[rank, peer, number].append(tuple(row))
        for peer, number, *row in zip(r.peer, r.message, r.tensor, r.peer_row, r.nbytes, r.landing_offset, strict=True):
            expected[peer, rank, number].append(tuple(row))
    assert sent == expected
    for (src, dst, _), rows in sent.items():
        message = np.concatenate([live[src][tensor][row] for tensor, row, _, _ in rows])
        start = rows[0][-1]
        assert len(message) == sum(nbytes for _, _, nbytes, _ in rows)
        assert [offset for *_, offset in rows] == (start + np.cumsum([0] + [n for _, _, n, _ in rows[:-1]])).tolist()
        memory, written = landing[dst]
        assert start + len(message) <= len(memory)
        assert not written[start : start + len(message)].any(), "two messages land on the same bytes"
        memory[start : start + len(message)] = message
        written[start : start + len(message)] = True


def put_in_place(plan: PlacementPlan, layer: int, rank: int, share: TransferPlan, rows, memory) -> None:
    """Commit in the order that `CommitPlan` states, levels backwards, for their copies are independent."""
    order = plan.commit_plan(layer, rank)
    spare = plan.num_local_physical_experts
    assert order.level_starts[0] == 0
    assert order.level_starts[-1] == len(order.copies)
    for start, end in zip(order.level_starts, order.level_starts[1:], strict=False):
        level = order.copies[start:end].tolist()
        written = [to for to, _ in level]
        assert len(set(written)) == len(level) > 0
        assert not set(written) & {origin for _, origin in level}
        for to, origin in reversed(level):
            for tensor in rows:
                tensor[to] = tensor[origin]
    assert len({to for to, _ in order.copies.tolist() if to != spare}) == sum(order.copies[:, 0] != spare)
    r = share.receives
    for tensor, row, nbytes, offset in zip(r.tensor, r.row, r.nbytes, r.landing_offset, strict=True):
        rows[tensor][row] = memory[offset : offset + nbytes]
    for to, origin in order.duplicates.tolist():
        assert origin in plan.dst_row[(plan.layer == layer) & (plan.dst == rank)]
        for tensor in rows:
            tensor[to] = tensor[origin]
    if len(r):
        assert set(r.row.tolist()) == set(plan.dst_row[(plan.layer == layer) & (plan.dst == rank)].tolist())


@given(
    rearrangements(),
    st.lists(st.sampled_from([1, 7, 64, 65, 300]), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(LAYOUTS),
    st.sampled_from([0, 60, 100, 1000]),
)
def test_every_rank_ends_with_the_bytes_of_the_new_map(case, nbytes, alias, landing_layout, coalesce_nbytes):
    plan = case.plan()
    geometry = geometry_of(case.num_rows, nbytes, alias)
    slot = geometry.nbytes_grid if landing_layout == "rows" else geometry.nbytes_packed(case.world_size - 1)
    for layer in range(len(case.old)):
        live, plans, landing = {}, {}, {}
        for rank in case.present:
            held = case.rows(case.old, layer, rank)
            live[rank] = [np.zeros((case.num_rows + 1, n), np.uint8) for n in nbytes]
            for tensor, rows in enumerate(live[rank]):
                for row, expert in enumerate(held):
                    what = (layer, tensor, expert) if expert >= 0 else (rank, row, tensor, 0)
                    rows[row] = content(what, nbytes[tensor])
            landing[rank] = np.zeros(slot, np.uint8), np.zeros(slot, bool)
            plans[rank] = shared(
                plan, layer, rank, geometry, landing_layout=landing_layout, coalesce_nbytes=coalesce_nbytes
            )
        before = {rank: [rows.copy() for rows in live[rank]] for rank in live}
        exchange(plans, live, landing)
        for rank in case.present:
            put_in_place(plan, layer, rank, plans[rank], live[rank], landing[rank][0])
            for tensor, rows in enumerate(live[rank]):
                for row, expert in enumerate(case.rows(case.new, layer, rank)):
                    stays = expert == -1 or expert == case.rows(case.old, layer, rank)[row]
                    right = before[rank][tensor][row] if stays else content((layer, tensor, expert), nbytes[tensor])
                    assert rows[row].tolist() == right.tolist()


@given(rearrangements())
def test_every_move_reads_once_from_the_replica_whose_turn_it_is(case):
    expected = []
    changed = set()
    for layer in range(len(case.old)):
        turns: dict[tuple, int] = defaultdict(int)
        for dst in range(case.world_size):
            held = case.rows(case.old, layer, dst)
            asked = case.rows(case.new, layer, dst)
            for row, expert in enumerate(asked):
                if expert == -1 or expert == held[row]:
                    continue
                changed.add(layer)
                if expert in held or expert in asked[:row]:
                    continue
                holders = [r for r in case.present if expert in case.rows(case.old, layer, r)]
                near = [r for r in holders if case.nodes and case.nodes[r] == case.nodes[dst]]
                candidates = near or holders
                counted = (expert, case.nodes[dst] if near else None)
                turn = turns[counted]
                turns[counted] += 1
                src = candidates[(turn + layer) % len(candidates)]
                expected.append((layer, src, dst, case.rows(case.old, layer, src).index(expert), row))
    plan = case.plan()
    assert moves(plan) == sorted(expected)
    assert plan.layers == tuple(sorted(changed))
    ends = {(min(src, dst), max(src, dst)) for _, src, dst, _, _ in expected}
    assert plan.pairs.tolist() == [list(pair) for pair in sorted(ends)]


@given(rearrangements())
def test_local_rows_are_copied_once_and_saved_only_to_open_a_cycle(case):
    plan = case.plan()
    for layer in range(len(case.old)):
        for rank in case.present:
            held, asked = case.rows(case.old, layer, rank), case.rows(case.new, layer, rank)
            local = [i for i, x in enumerate(asked) if x not in (-1, held[i]) and x in held]
            copies = plan.commit_plan(layer, rank).copies.tolist()
            saved = [origin for to, origin in copies if to == case.num_rows]
            assert sorted(to for to, _ in copies if to != case.num_rows) == local
            # A saved row is on a cycle: its content is needed by a row that is written after it.
            for origin in saved:
                at = copies.index([case.num_rows, origin])
                restored = next(to for to, source in copies[at:] if source == case.num_rows)
                assert asked[restored] == held[origin]
                assert copies.index([restored, case.num_rows]) > [to for to, _ in copies].index(origin)


# --- maps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_map",
    [
        [[0, 1, 2, -1]],
        np.array([[0, 1, 2, -1]], np.int16),
        np.array([[0, 0, 1, 1, 2, 2, -1, -1]])[:, ::2],
        torch.tensor([[0, 1, 2, -1]], dtype=torch.int32),
    ],
)
def test_maps_of_any_integer_kind_become_int64_copies(given_map):
    old, new = check_maps(given_map, given_map, num_layers=1, world_size=2, num_local_physical_experts=2)
    for checked in (old, new):
        assert checked.dtype == np.int64
        assert checked.flags.c_contiguous
        assert checked.tolist() == [[0, 1, 2, -1]]
        assert not np.shares_memory(checked, np.asarray(given_map))


def test_a_checked_map_of_the_right_form_is_a_copy_too():
    given_map = np.arange(4).reshape(1, 4)
    old, new = check_maps(given_map, given_map, num_layers=1, world_size=2, num_local_physical_experts=2)
    old[:] = -1
    new[:] = -1
    assert given_map.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ([[0, 1, 2]], r"has shape \(1, 3\), expected \(1, 4\) \(1 layers, 2 ranks x 2 local physical experts\)"),
        ([0, 1, 2, 3], r"has shape \(4,\)"),
        ([[0, 1, 2, 3]] * 2, r"has shape \(2, 4\)"),
        (None, r"has shape \(\)"),
        ([[0, 1], [2]], "cannot be read as an array"),
        (torch.zeros(1, 4, dtype=torch.int64, device="meta"), "cannot be read as an array"),
        (torch.zeros(1, 4), "holds float32, expected integers"),
        ([[0.0, 1.0, 2.0, 3.0]], "holds float64"),
        ([[True, False, True, False]], "holds bool"),
        ([["0", "1", "2", "3"]], "holds <U1"),
        ([[0, 1, -2, 3]], "holds -2 at layer 0, slot 2"),
        (np.array([[0, 1, 2, 2**63]], np.uint64), "holds 9223372036854775808 at layer 0, slot 3"),
    ],
)
@pytest.mark.parametrize("which", ["old", "new"])
def test_a_wrong_map_is_refused_saying_what_is_wrong_with_which(wrong, problem, which):
    maps = {"old": [[0, 1, 2, 3]], "new": [[0, 1, 2, 3]]} | {which: wrong}
    with pytest.raises(PlanError, match=f"^Invalid physical_to_logical_map: the {which} map {problem}") as caught:
        check_maps(**maps, num_layers=1, world_size=2, num_local_physical_experts=2)
    assert caught.value.code == "EPLB-P001"


# --- the object -------------------------------------------------------------------------------------------------------


def test_nothing_a_plan_hands_out_can_be_written():
    plan = planned([[0, 1, 2, 9, 8, 7]], [[1, 0, 9, 9, 8, 2]], 2)
    share, order = shared(plan, 0, 0, geometry_of(3, [8]), landing_layout="packed_by_peer"), plan.commit_plan(0, 0)
    arrays = [value for thing in (plan, share.sends, share.receives, order) for value in vars(thing).values()]
    arrays = [*(a for a in arrays if isinstance(a, np.ndarray)), plan.pairs]
    assert len(arrays) == (9 + 2) + 8 + 8 + 3 + 1
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(AttributeError):
        plan.layers = ()


@pytest.mark.parametrize(
    ("layer", "rank", "named"), [(1, 0, "layer is 1"), (-1, 0, "layer is -1"), (0, 2, "rank is 2")]
)
def test_a_layer_or_rank_that_is_not_there_is_refused(layer, rank, named):
    plan = planned([[0, 1]], [[1, 0]], 2)
    for call in (lambda: plan.commit_plan(layer, rank), lambda: shared(plan, layer, rank, geometry_of(1, [8]))):
        with pytest.raises(PlanError, match=named) as caught:
            call()
        assert caught.value.code == "EPLB-P007"


@pytest.mark.parametrize("nodes", [None, [rank // 8 for rank in range(256)]])
def test_planning_speed_of_all_layers_of_a_large_model(nodes):
    rng = np.random.default_rng(0)
    slots = np.arange(4096) % 3584
    old, new = (np.stack([rng.permutation(slots) for _ in range(61)]) for _ in range(2))
    wall_s, cpu_s = [], []
    for _ in range(5):
        start, start_cpu = time.perf_counter(), time.thread_time()
        plan = plan_moves(old, new, world_size=256, nodes=nodes)
        wall_s.append(time.perf_counter() - start)
        cpu_s.append(time.thread_time() - start_cpu)
    print(
        f"\nplan: 61 layers x 4096 slots x 256 ranks, {len(plan.layer)} moves{', nodes of 8' if nodes else ''}: "
        f"{min(wall_s):.3f} s, {min(cpu_s):.3f} s of one core"
    )
    assert min(cpu_s) < 1  # a bound on the kind of algorithm, not a measurement: cores may be busy with other things
