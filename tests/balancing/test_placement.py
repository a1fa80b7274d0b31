"""Placement: the default policy, balancedness, and alignment to what stands already."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from eplb_core.balancing import align, alignment, balancedness, rebalance_experts
from eplb_core.errors import PlanError


@dataclass(frozen=True)
class Case:
    load: np.ndarray
    num_physical_experts: int
    num_ranks: int
    num_groups: int
    num_nodes: int

    def placement(self):
        return rebalance_experts(
            self.load,
            self.num_physical_experts,
            num_ranks=self.num_ranks,
            num_groups=self.num_groups,
            num_nodes=self.num_nodes,
        )

    @property
    def is_hierarchical(self):
        return self.num_groups % self.num_nodes == 0 and self.num_ranks % self.num_nodes == 0


@st.composite
def cases(draw, max_nodes=3):
    nodes, groups = draw(st.integers(1, max_nodes)), draw(st.integers(1, 6))
    ranks = draw(st.one_of(st.integers(1, 4).map(lambda per_node: per_node * nodes), st.integers(1, 8)))
    experts = groups * draw(st.integers(1, 6))
    slots_per_rank = -(-experts // ranks) + draw(st.integers(0, 3))
    layers = draw(st.integers(1, 4))
    load = draw(npst.arrays(np.int64, (layers, experts), elements=st.integers(0, 1000)))
    return Case(load, slots_per_rank * ranks, ranks, groups, nodes)


@st.composite
def old_and_new_maps(draw):
    """Two maps of one shape over a few experts, empty slots and doubles included, and a topology."""
    nodes, ranks_per_node, local = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    shape = (draw(st.integers(1, 3)), nodes * ranks_per_node * local)
    maps = npst.arrays(np.int64, shape, elements=st.integers(-1, draw(st.integers(0, 12))))
    return draw(maps), draw(maps), nodes * ranks_per_node, nodes


@pytest.fixture(params=["with SciPy", "without SciPy"])
def solver(request, monkeypatch):
    if request.param == "with SciPy":
        pytest.importorskip("scipy")
    else:
        monkeypatch.setattr(alignment, "find_spec", lambda name: None)
    alignment.assignment.cache_clear()
    yield request.param
    alignment.assignment.cache_clear()


def rows_from_elsewhere(old, new, num_ranks, num_blocks):
    """Count the rows that ranks need from outside their block of ranks (a block is a rank, or a node)."""
    layers = len(new)
    held = old.reshape(layers, num_blocks, -1)
    needed = new.reshape(layers, num_blocks, num_ranks // num_blocks, -1)
    return sum(
        len(set(rank) - set(held[layer, block]) - {-1})
        for layer in range(layers)
        for block in range(num_blocks)
        for rank in needed[layer, block]
    )


def contents(physical_to_logical_map, num_blocks):
    """Say what the blocks of each layer hold, whoever holds it."""
    return [
        Counter(tuple(sorted(block)) for block in layer.reshape(num_blocks, -1)) for layer in physical_to_logical_map
    ]


# --- the policy -------------------------------------------------------------------------------------------------------


def test_the_published_example_gets_the_published_placement():
    load = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    published = [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    np.testing.assert_array_equal(rebalance_experts(load, 16, num_ranks=8, num_groups=4, num_nodes=2), published)


@given(cases())
def test_every_logical_expert_is_placed_and_every_slot_is_filled(case):
    result = case.placement()
    assert result.dtype == np.int64
    assert result.shape == (len(case.load), case.num_physical_experts)
    for layer in result:
        assert set(layer) == set(range(case.load.shape[1]))


@given(cases(max_nodes=1))
def test_no_other_count_of_replicas_lowers_the_load_of_the_busiest_replica(case):
    for load, layer in zip(case.load, case.placement(), strict=True):
        replicas = np.bincount(layer, minlength=len(load))
        busiest = (load / replicas).max()
        # Taking a replica from any expert that has two or more would make that expert as busy or busier.
        assert all(load[e] / (replicas[e] - 1) >= busiest for e in np.flatnonzero(replicas > 1))


@given(cases())
def test_a_group_stays_on_one_node_and_nodes_get_equally_many_groups(case):
    if not case.is_hierarchical:
        return
    group_size = case.load.shape[1] // case.num_groups
    for layer in case.placement():
        groups_of_nodes = [set(node // group_size) for node in layer.reshape(case.num_nodes, -1)]
        assert [len(groups) for groups in groups_of_nodes] == [case.num_groups // case.num_nodes] * case.num_nodes
        assert set.union(*groups_of_nodes) == set(range(case.num_groups))


@pytest.mark.parametrize(("num_groups", "num_nodes", "num_ranks"), [(3, 2, 4), (4, 2, 3), (1, 4, 4)])
def test_what_does_not_spread_evenly_over_the_nodes_is_placed_globally(num_groups, num_nodes, num_ranks):
    load = np.random.default_rng(1).integers(1, 1000, (3, 12))
    by_nodes = rebalance_experts(load, 24, num_ranks=num_ranks, num_groups=num_groups, num_nodes=num_nodes)
    np.testing.assert_array_equal(by_nodes, rebalance_experts(load, 24, num_ranks=num_ranks))


@given(cases())
def test_a_layer_is_placed_alike_alone_in_company_and_from_any_kind_of_array(case):
    together = case.placement()
    for layer in range(len(case.load)):
        alone = Case(case.load[[layer]], *list(vars(case).values())[1:]).placement()
        np.testing.assert_array_equal(alone[0], together[layer])
    for load in (np.asfortranarray(case.load), case.load.astype(np.float32), case.load.tolist()):
        np.testing.assert_array_equal(Case(load, *list(vars(case).values())[1:]).placement(), together)


def test_another_process_places_alike():
    load = np.random.default_rng(5).random((4, 32))
    program = (
        "import numpy as np; from eplb_core.balancing import rebalance_experts;"
        "load = np.random.default_rng(5).random((4, 32));"
        "print(rebalance_experts(load, 40, num_ranks=8, num_groups=4, num_nodes=2).tolist())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    here = rebalance_experts(load, 40, num_ranks=8, num_groups=4, num_nodes=2)
    assert other.stdout.strip() == str(here.tolist())


@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8, 16]), st.sampled_from([0, 16, 64]))
def test_skewed_loads_are_spread_better_than_round_robin_spreads_them(seed, num_ranks, num_redundant):
    experts = np.arange(64)
    load = np.random.default_rng(seed).permuted(np.tile(10_000 / (1 + experts) ** 1.2, (8, 1)), axis=1)
    round_robin = np.tile(np.arange(64 + num_redundant) % 64, (8, 1))
    placed = rebalance_experts(load, 64 + num_redundant, num_ranks=num_ranks)
    before, after = balancedness(load, round_robin, num_ranks), balancedness(load, placed, num_ranks)
    assert after.mean() > before.mean()


def test_a_layer_without_load_spreads_its_replicas_over_all_experts():
    (layer,) = rebalance_experts(np.zeros((1, 8)), 20, num_ranks=4)
    assert set(np.bincount(layer)) == {2, 3}


def test_one_expert_a_rank_leaves_nothing_to_choose_and_moves_nothing():
    assert rebalance_experts([[3, 1, 4, 1]], 4, num_ranks=4).tolist() == [[0, 1, 2, 3]]


def test_all_layers_of_a_large_model_are_placed_within_a_second_of_processor_time():
    load = np.random.default_rng(2).zipf(1.5, (61, 256)).clip(max=10**6)
    start = time.process_time()
    rebalance_experts(load, 320, num_ranks=32, num_groups=8, num_nodes=4)
    rebalance_experts(load, 320, num_ranks=32)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("load", "num_physical_experts", "sizes", "says"),
    [
        (np.ones((2, 8)), 6, {"num_ranks": 2}, "6 physical experts cannot hold 8 logical ones"),
        (np.ones((2, 8)), 9, {"num_ranks": 2}, "9 physical experts do not spread evenly over 2 ranks"),
        (np.ones((2, 8)), 8, {"num_ranks": 2, "num_groups": 3}, "8 logical experts do not form 3 groups"),
        (np.ones((2, 8)), 8, {"num_ranks": 0}, "must be positive"),
        (np.ones((2, 8)), 8, {"num_ranks": 2, "num_nodes": 0}, "must be positive"),
        (np.ones(8), 8, {"num_ranks": 2}, "load must be real"),
        (np.full((2, 8), "x"), 8, {"num_ranks": 2}, "load must be real"),
        (np.array([[1.0, np.nan]]), 2, {"num_ranks": 2}, "not finite"),
        (np.array([[1e308, 1e308]]), 2, {"num_ranks": 2}, "too large to add up"),
        (np.array([[1, -1]]), 2, {"num_ranks": 2}, "negative"),
    ],
)
def test_a_load_or_sizes_that_allow_no_placement_are_refused(load, num_physical_experts, sizes, says):
    with pytest.raises(PlanError, match=says) as refused:
        rebalance_experts(load, num_physical_experts, **sizes)
    assert refused.value.code == "EPLB-P006"


# --- balancedness -----------------------------------------------------------------------------------------------------


@given(st.data())
def test_balancedness_is_mean_over_maximum_of_what_the_ranks_carry(data):
    layers, experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    ranks, local = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    load = data.draw(npst.arrays(np.int64, (layers, experts), elements=st.integers(0, 100)))
    slots = data.draw(npst.arrays(np.int64, (layers, ranks * local), elements=st.integers(-1, experts - 1)))
    for layer, measured in enumerate(balancedness(load, slots, ranks)):
        replicas = Counter(slots[layer].tolist())
        carried = [
            sum(load[layer, e] / replicas[e] for e in rank.tolist() if e >= 0)
            for rank in slots[layer].reshape(ranks, -1)
        ]
        expected = sum(carried) / ranks / max(carried) if max(carried) else 1.0
        assert measured == pytest.approx(expected)


@pytest.mark.parametrize(
    ("load", "slots", "expected"),
    [([1, 1, 1, 1], [0, 1, 2, 3], 1.0), ([8, 0, 0, 0], [0, 1, 2, 3], 0.5), ([8, 0, 0], [0, 1, 0, 2], 1.0)],
)
def test_balancedness_of_simple_placements(load, slots, expected):
    assert balancedness([load], [slots], 2).tolist() == [expected]


@pytest.mark.parametrize(
    ("slots", "says"),
    [
        ([[0, 4]], "names expert 4, the load has 4 experts"),
        ([[0, -2]], "holds -2"),
        ([[0, 1, 2]], "do not spread over 2 ranks"),
        ([0, 1], "must be integer"),
        ([[0.0, 1.0]], "must be integer"),
        ([[0, 1], [0, 1]], "has 2 layers, the load 1"),
    ],
)
def test_a_map_that_does_not_fit_the_load_is_refused(slots, says):
    with pytest.raises(PlanError, match=says) as refused:
        balancedness(np.ones((1, 4)), slots, 2)
    assert refused.value.code == "EPLB-P001"


# --- alignment --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("solver")
class TestAlignment:
    @given(old_and_new_maps())
    def test_experts_that_share_a_rank_or_a_node_still_share_it(self, maps):
        old, new, num_ranks, num_nodes = maps
        aligned = align(old, new, num_ranks, num_nodes=num_nodes)
        assert contents(aligned, num_ranks) == contents(new, num_ranks)
        assert contents(aligned, num_nodes) == contents(new, num_nodes)

    @given(old_and_new_maps())
    def test_no_more_rows_come_from_other_ranks_or_nodes_than_before(self, maps):
        old, new, num_ranks, num_nodes = maps
        aligned = align(old, new, num_ranks)
        assert rows_from_elsewhere(old, aligned, num_ranks, num_ranks) <= rows_from_elsewhere(
            old, new, num_ranks, num_ranks
        )
        aligned = align(old, new, num_ranks, num_nodes=num_nodes)
        assert rows_from_elsewhere(old, aligned, num_ranks, num_nodes) <= rows_from_elsewhere(
            old, new, num_ranks, num_nodes
        )

    @given(old_and_new_maps())
    def test_what_stays_on_its_rank_keeps_its_row(self, maps):
        old, new, num_ranks, num_nodes = maps
        aligned = align(old, new, num_ranks, num_nodes=num_nodes)
        local = old.shape[1] // num_ranks
        for before, after in zip(old.reshape(-1, local), aligned.reshape(-1, local), strict=True):
            common = Counter(before.tolist()) & Counter(after.tolist())
            assert (before == after).sum() == common.total()

    @given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2]))
    def test_a_mere_relabelling_is_undone(self, seed, num_nodes):
        rng = np.random.default_rng(seed)
        old = np.stack([rng.permutation(24), rng.permutation(24)])
        relabelled = []
        for layer in old:
            nodes = rng.permutation(layer.reshape(num_nodes, -1, 4))
            relabelled.append([rng.permuted(rng.permutation(ranks), axis=1) for ranks in nodes])
        relabelled = np.array(relabelled).reshape(old.shape)
        np.testing.assert_array_equal(align(old, relabelled, 6, num_nodes=num_nodes), old)

    def test_balancedness_stays_while_a_drifting_load_moves_fewer_rows(self):
        rng = np.random.default_rng(3)
        load = rng.zipf(1.6, (8, 64)).clip(max=1000) + 20.0
        drifted = load * rng.uniform(0.8, 1.25, load.shape)
        old, new = (rebalance_experts(x, 80, num_ranks=8, num_groups=4, num_nodes=2) for x in (load, drifted))
        aligned = align(old, new, 8, num_nodes=2)
        np.testing.assert_allclose(balancedness(drifted, aligned, 8), balancedness(drifted, new, 8), rtol=1e-12)
        assert rows_from_elsewhere(old, aligned, 8, 8) < 0.9 * rows_from_elsewhere(old, new, 8, 8)
        assert rows_from_elsewhere(old, aligned, 8, 2) <= rows_from_elsewhere(old, new, 8, 2)

    def test_a_rank_takes_the_place_where_most_of_its_experts_are(self):
        old, new = [[0, 1, 2, 3, 4, 5]], [[5, 4, 1, 9, 2, 0]]
        assert align(old, new, 3).tolist() == [[9, 1, 2, 0, 4, 5]]

    def test_copies_of_an_expert_on_one_rank_count_once(self):
        old, new = [[7, 1, 2, 8, 8, 8]], [[7, 7, 7, 1, 2, 5]]
        assert align(old, new, 2).tolist() == [[5, 1, 2, 7, 7, 7]]

    @given(old_and_new_maps())
    def test_ranks_trade_no_places_for_nothing(self, maps):
        old, new, num_ranks, _ = maps
        aligned = align(old, new, num_ranks)
        rows = [rows_from_elsewhere(old, each, num_ranks, num_ranks) for each in (aligned, new)]
        if rows[0] == rows[1]:
            by_rank = (each.reshape(-1, old.shape[1] // num_ranks) for each in (aligned, new))
            for after, wanted in zip(*by_rank, strict=True):
                assert sorted(after) == sorted(wanted)

    def test_ranks_trade_places_only_within_their_node(self):
        old, new = [[0, 1, 2, 3]], [[1, 3, 0, 2]]
        assert align(old, new, 4).tolist() == [[0, 1, 2, 3]]
        assert align(old, new, 4, num_nodes=2).tolist() == [[3, 1, 2, 0]]


def test_the_exact_assignment_saves_at_least_as_many_rows_as_the_greedy_one():
    pytest.importorskip("scipy")
    score = np.array([[5.0, 4.0], [4.0, 0.0]])
    assert alignment.assignment()(score).tolist() == [1, 0]
    assert alignment._assign_greedily(score).tolist() == [0, 1]


def test_the_greedy_assignment_is_never_worse_than_leaving_all_in_place():
    score = np.array([[4.0, 5.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]])
    assert alignment._assign_greedily(score).tolist() == [0, 1, 2]


def test_alignment_works_where_scipy_cannot_be_imported():
    program = (
        "import sys; sys.modules['scipy'] = None; from eplb_core.balancing import align;"
        "print(align([[0, 1, 2, 3]], [[3, 2, 1, 0]], 2).tolist(), 'scipy.optimize' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[[0, 1, 2, 3]] False"


@pytest.mark.parametrize(
    ("old", "new", "num_nodes", "code"),
    [
        ([[0, 1]], [[0, 1, 2, 3]], 1, "EPLB-P001"),
        ([[0, 1], [0, 1]], [[0, 1]], 1, "EPLB-P001"),
        ([[0, 1]], [[1, 0]], 3, "EPLB-P006"),
        ([[0, 1]], [[1, 0]], 0, "EPLB-P006"),
    ],
)
def test_maps_and_nodes_that_do_not_fit_together_are_refused(old, new, num_nodes, code):
    with pytest.raises(PlanError) as refused:
        align(old, new, 2, num_nodes=num_nodes)
    assert refused.value.code == code


# --- ranks that may hold nothing --------------------------------------------------------------------------------------


def test_dead_and_draining_ranks_get_no_expert_and_the_others_are_balanced_as_alone():
    load = np.random.default_rng(3).random((4, 12))
    active = np.array([True, False, True, True])
    placed = rebalance_experts(load, 32, num_ranks=4, active=active).reshape(4, 4, 8)
    assert (placed[:, 1] == -1).all()
    alone = rebalance_experts(load, 24, num_ranks=3).reshape(4, 3, 8)
    assert np.array_equal(placed[:, active], alone)


def test_a_node_of_which_a_rank_is_dead_does_not_keep_its_groups():
    load = np.ones((1, 8))
    uneven = rebalance_experts(load, 16, num_ranks=4, num_groups=2, num_nodes=2, active=[True, True, True, False])
    assert set(uneven[0, :12].tolist()) == set(range(8))
    even = rebalance_experts(load, 16, num_ranks=4, num_groups=2, num_nodes=2, active=[True, False, True, False])
    assert set(even[0, :4].tolist()) in ({0, 1, 2, 3}, {4, 5, 6, 7})
    assert set(even[0, 8:12].tolist()) in ({0, 1, 2, 3}, {4, 5, 6, 7})


@pytest.mark.parametrize("active", [[False] * 2, [True], [1, 0], [True, False]])
def test_a_mask_that_leaves_too_few_slots_or_fits_no_ranks_is_refused(active):
    with pytest.raises(PlanError, match="EPLB-P006"):
        rebalance_experts(np.ones((1, 8)), 8, num_ranks=2, active=active)
