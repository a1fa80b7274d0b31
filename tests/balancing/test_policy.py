"""From a load to the next placement: the named policy is asked, checked, aligned, and followed where it is worth it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from eplb_core.backend import API_VERSION, PolicyInfo
from eplb_core.balancing import balancedness, rebalance_experts, rows_received
from eplb_core.balancing.policy import Group, Policy, check_slots, load_policy, new_placement
from eplb_core.config import EPLBConfig
from eplb_core.discovery.discover import Catalog
from eplb_core.errors import ConfigError, DiscoveryError, PlanError

DEFAULT = Policy("default", rebalance_experts, 0.01)
ALWAYS = Policy("always", rebalance_experts, None)
FOUR = Group(4, (0, 1, 2, 3))


def spread(num_layers, num_slots, num_experts):
    return np.tile(np.arange(num_slots) % num_experts, (num_layers, 1))


@st.composite
def loads_on_ranks(draw):
    ranks, local = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, ranks * local))
    load = draw(npst.arrays(np.int64, (draw(st.integers(1, 3)), experts), elements=st.integers(0, 99)))
    return load.astype(float), spread(len(load), ranks * local, experts), Group(ranks, tuple(range(ranks)))


@given(loads_on_ranks())
@settings(max_examples=200)
def test_every_layer_that_moves_gains_what_the_policy_calls_worth_it_and_every_other_stays(case):
    load, old, group = case
    new = new_placement(DEFAULT, load, old, group)
    moved = (new.physical_to_logical_map != old).any(axis=1)
    gained = balancedness(load, new.physical_to_logical_map, group.world_size)
    gained -= balancedness(load, old, group.world_size)
    assert (gained[moved] >= 0.01).all()
    assert new.num_moved_layers == moved.sum()
    assert new.balancedness_after - new.balancedness_before == pytest.approx(gained.mean())
    assert new.num_rows == rows_received(old, new.physical_to_logical_map, group.world_size).sum()
    assert new.num_rows <= new.num_rows_unaligned


@given(loads_on_ranks())
def test_a_policy_that_reports_nothing_is_followed_whatever_it_gains(case):
    load, old, group = case
    wanted = rebalance_experts(load, old.shape[1], num_ranks=group.world_size)
    new = new_placement(ALWAYS, load, old, group).physical_to_logical_map
    for layer in range(len(old)):  # but for which rank holds what, and in which of its slots
        assert of_ranks(new[layer], group) == of_ranks(wanted[layer], group)


def of_ranks(row, group):
    return sorted(sorted(slots) for slots in row.reshape(group.world_size, -1).tolist())


def test_a_small_gain_moves_nothing():
    old = spread(1, 8, 8)
    even = np.array([[10, 10, 10, 10, 10, 10, 10, 10.3]])
    assert new_placement(DEFAULT, even, old, FOUR).num_moved_layers == 0
    skewed = np.array([[90, 80, 1, 1, 1, 1, 1, 1.0]])
    assert new_placement(DEFAULT, skewed, old, FOUR).num_moved_layers == 1


def test_an_expert_that_is_held_nowhere_is_placed_whatever_that_gains():
    old = np.array([[0, 1, 2, 0]])
    new = new_placement(DEFAULT, np.full((1, 4), 7.0), old, FOUR)
    assert sorted(new.physical_to_logical_map[0]) == [0, 1, 2, 3]


def test_columns_of_ranks_that_are_no_members_stay_empty():
    old = np.array([[0, 1, -1, -1, 2, 3, 0, 1]])
    new = new_placement(DEFAULT, np.array([[9, 9, 1, 1.0]]), old, Group(4, (0, 2, 3))).physical_to_logical_map
    assert (new[:, 2:4] == -1).all()
    assert set(new[0]) == {-1, 0, 1, 2, 3}


@pytest.mark.parametrize(
    ("members", "nodes", "number"),
    [
        ((0, 1, 2, 3), None, 1),
        ((0, 1, 2, 3), (0, 0, 1, 1), 2),
        ((0, 1, 2, 3), (7, 7, 7, 7), 1),
        ((0, 1, 2, 3), (0, 1, 0, 1), 1),
        ((0, 1, 2, 3), (0, 0, 0, 1), 1),
        ((0, 1, 3), (0, 0, 1, 1), 1),
        ((0, 2), (0, 0, 1, 1), 2),
    ],
)
def test_nodes_count_where_members_are_spread_over_them_evenly_and_in_order(members, nodes, number):
    assert Group(4, members, nodes).num_nodes == number


def test_the_policy_is_told_the_topology():
    asked = {}

    def policy(load, num_physical_experts, **sizes):
        asked.update(sizes, slots=num_physical_experts)
        return spread(1, 4, 4)

    new_placement(
        Policy("spy", policy, None), np.ones((1, 4)), spread(1, 4, 4), Group(4, (0, 1, 2, 3), (0, 0, 1, 1), 2)
    )
    assert asked == {"slots": 4, "num_ranks": 4, "num_groups": 2, "num_nodes": 2}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([[0, 1, 2, 9]], "experts 0 to 9, and there are 4"),
        ([[0, 1, 2, -2]], "experts -2 to 2, and there are 4"),
        ([[0, 1, 2]], r"int64 \[1, 3\] where integers \[1, 4\]"),
        ([[0.0, 1, 2, 3]], "float64"),
        ([[0, 1, 2, 2]], "a placement without expert 3 in layer 0"),
        (None, "object"),
        ([[0, 1], [2]], "failed with ValueError"),
    ],
)
def test_what_a_policy_returns_is_checked(answer, text):
    policy = Policy("mine", lambda *_, **__: answer, None)
    with pytest.raises(PlanError, match=f"the policy 'mine' .*{text}") as error:
        new_placement(policy, np.ones((1, 4)), spread(1, 4, 4), FOUR)
    assert error.value.code == "EPLB-P006"


def test_a_policy_that_raises_is_named():
    def policy(*_, **__):
        raise KeyError("layer 3")

    with pytest.raises(PlanError, match="the policy 'mine' failed with KeyError: 'layer 3'"):
        new_placement(Policy("mine", policy, None), np.ones((1, 4)), spread(1, 4, 4), FOUR)


def catalog_with(**changes):
    target = {"target": "eplb_core.balancing.placement:rebalance_experts"} | changes
    return Catalog(policies={"mine": PolicyInfo("mine", "a policy", API_VERSION, **target)})


def test_the_policy_of_a_plugin_is_imported_by_name():
    policy = load_policy(EPLBConfig(policy="mine", use_async=False), catalog_with(worthwhile_gain=0.2))
    assert policy == Policy("mine", rebalance_experts, 0.2)


def test_the_default_policy_reports_what_is_worth_it():
    policy = load_policy(EPLBConfig())
    assert policy.place is rebalance_experts
    assert 0 < policy.worthwhile_gain < 0.1


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"requires": ("no_such_module",)}, "EPLB-C015", "no_such_module is not installed"),
        ({"available": lambda: "no solver"}, "EPLB-C015", "cannot be used here: no solver"),
        ({"target": "eplb_core.balancing:__all__"}, "EPLB-C015", "is list"),
        ({"target": "eplb_core.balancing:no_such"}, "EPLB-D006", "no_such"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused_with_the_reason(changes, code, text):
    with pytest.raises((ConfigError, DiscoveryError), match=text) as error:
        load_policy(EPLBConfig(policy="mine", use_async=False), catalog_with(**changes))
    assert error.value.code == code


def test_a_policy_that_nobody_offers_is_refused():
    with pytest.raises(ConfigError, match="Unknown policy 'thrifty'") as error:
        load_policy(EPLBConfig(policy="thrifty", use_async=False))
    assert error.value.code == "EPLB-C012"


@pytest.mark.parametrize(
    ("experts", "slots", "redundant"), [(4, 8, 3), (4, 4, 1), (4, 8, 0), (0, 0, 0), (True, 1, 0), (4.0, 4, 0)]
)
def test_slots_are_the_logical_and_the_redundant_experts(experts, slots, redundant):
    with pytest.raises(ConfigError) as error:
        check_slots(EPLBConfig(num_redundant_experts=redundant), experts, slots)
    assert error.value.code == "EPLB-C015"


def test_slots_that_fit_are_taken():
    assert check_slots(EPLBConfig(num_redundant_experts=4), np.int32(4), 8) == 4
