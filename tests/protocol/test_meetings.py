"""Meetings in every order of their store operations: safe, never stuck, never endless.

Safe: all that are connected by a roll have been told its members, have voted on it once, with the nonces that it
holds, and find it committed; nobody leaves a roll that is committed. Never stuck: while nobody gives up for good, all
can still be connected by one roll before another limit runs out. Never endless: no process comes anew for ever.
"""

from __future__ import annotations

import random

import pytest

from eplb_core.errors import error_for
from tests.protocol.meetings import Call, Host, all_connected, meet, nobody_leaves, old_run, someone_is_endless
from tests.protocol.ranks import PROCESSES

slow = pytest.mark.slow
soak = [pytest.mark.soak, pytest.mark.timeout(900)]


def walk(ranks, tries, *, crashes=0, old=True, rounds=8):
    members = tuple(range(ranks))
    calls = {rank: [Call(members, tries)] for rank in members}
    return meet(calls, old_run(members) if old else {}, crashes=crashes, rounds=rounds)


@pytest.mark.parametrize(
    ("ranks", "tries", "crashes", "old"),
    [
        (1, 1, 2, True),
        (2, 1, 0, False),
        (2, 2, 0, False),
        (2, 2, 0, True),
        (2, 1, 1, True),
        (3, 1, 0, False),
        (3, 1, 0, True),
        pytest.param(2, 3, 0, True, marks=slow),
        pytest.param(2, 2, 1, True, marks=slow),
        pytest.param(2, 1, 2, True, marks=slow),
        pytest.param(4, 1, 0, True, marks=slow),
        pytest.param(3, 1, 1, True, marks=soak),
        pytest.param(3, 2, 0, True, marks=soak),
    ],
)
def test_a_meeting_is_safe_and_never_stuck_in_any_order(ranks, tries, crashes, old, record_property):
    found = walk(ranks, tries, crashes=crashes, old=old).explore()
    record_property("states", len(found.states))
    assert found.wrong is None, found.schedule
    assert not any(map(someone_is_endless, found.states))

    stuck = found.stuck(all_connected, nobody_leaves)
    assert not stuck, found.way(min(stuck))
    assert any(map(all_connected, found.states))


STRIDED = error_for("EPLB-M006", rank=1, reason="its tensor w13 is strided")


@pytest.mark.parametrize("private", [False, True], ids=["a store that is shared", "a store of its own"])
@pytest.mark.parametrize(
    ("ranks", "refusing"), [(2, [0]), (2, [1]), (3, [0]), (3, [1]), (3, [2]), (3, [0, 2]), (4, [1, 2])]
)
def test_a_refusal_reaches_all_before_any_limit_and_those_that_refuse_know_that_it_was_heard(ranks, refusing, private):
    members = tuple(range(ranks))
    calls = {rank: [Call(members, refusal=STRIDED if rank in refusing else None)] for rank in members}
    found = meet(calls, old_run(members), private=private, expected=["EPLB-T002", "EPLB-M006"]).explore()
    assert found.wrong is None, found.schedule

    stuck = found.stuck(all_have_heard, nobody_has_waited_to_its_limit)
    assert not stuck, found.way(min(stuck))
    assert not any(all_connected(state) for state in found.states)


def all_have_heard(state):
    ends = [local.end and (local.end.why, local.end.detail) for local in state[:-1]]
    return set(ends) <= {("refused", "heard"), ("gave up", "EPLB-M006")}


def nobody_has_waited_to_its_limit(state):
    return not any(
        local.late if local.end is None else local.end.detail in {"at its limit", "EPLB-T002"} for local in state[:-1]
    )


@pytest.mark.parametrize("seen", [True, False], ids=["that see each other", "on machines apart"])
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_processes_that_are_one_rank_one_is_connected_and_the_other_leaves(rank, seen):
    if not seen:
        PROCESSES.unseen = frozenset({"0.1", "1.1", f"{rank}b.1"})
    expected = ["EPLB-T002", "EPLB-T015"]
    hosts = [Host(each, [Call((0, 1))], alone=each != rank, expected=expected) for each in (0, 1)]
    hosts.append(Host(rank, [Call((0, 1))], seat=f"{rank}b", alone=False, expected=expected))
    found = meet(hosts).explore()
    assert found.wrong is None, found.schedule
    assert not any(map(someone_is_endless, found.states))

    ends = [[local.end and local.end.why for local in state[:-1]] for state in found.states]
    assert max(each.count("connected") for each in ends) == 2
    codes = [[local.end.detail for local in state[:-1] if local.end] for state in found.states]
    assert max(each.count("EPLB-T015") for each in codes) == 1


@pytest.mark.parametrize(
    ("ranks", "tries", "crashes", "runs"),
    [
        (2, 3, 1, 150),
        (3, 2, 1, 100),
        (4, 2, 1, 60),
        pytest.param(5, 3, 3, 1500, marks=soak),
    ],
)
def test_after_any_history_all_are_connected_once_no_more_limits_run_out(ranks, tries, crashes, runs, record_property):
    chance = random.Random(1)
    tried = most = 0
    for run in range(runs):
        members = walk(ranks, tries, crashes=crashes, old=run % 2 == 0, rounds=1000)
        state = members.first
        for _ in range(chance.randrange(1, 40 * ranks)):
            quiet, loud = _next(members, state)
            state = _one_of(loud if loud and chance.random() < 0.05 else quiet, state, chance)
        if not nobody_leaves(state):
            continue
        tried += 1
        for _ in range(5000):
            if all_connected(state):
                break
            state = _one_of(_next(members, state)[0], state, chance)
        assert all_connected(state), f"run {run}"
        most = max(most, *(local.memory.nonces for local in state[:-1]))
    record_property("histories", tried)
    assert tried > runs // 3
    assert most <= 4 * tries + 2 * crashes


def _next(members, state):
    steps = list(members.steps(state))
    return [step for step in steps if step.quiet], [step for step in steps if not step.quiet]


def _one_of(steps, state, chance):
    if not steps:
        return state
    step = chance.choice(steps)
    assert step.wrong is None
    return step.state
