"""What each rule of the meeting and the vote is for: without it, a walk finds an order in which something is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from eplb_core.errors import error_for
from eplb_core.voting.vote import Vote
from tests.protocol import broken
from tests.protocol.meetings import Call, Host, Memory, all_connected, meet, nobody_leaves, old_run, someone_is_endless
from tests.protocol.ranks import PROCESSES, THE_RULES, Rules, attend, drive
from tests.protocol.store import Contents
from tests.protocol.votes import all_know, outcomes, untroubled, vote
from tests.protocol.walk import Found, State, Walk

TWO, THREE = (0, 1), (0, 1, 2)
STRIDED = error_for("EPLB-M006", rank=1, reason="its tensor w13 is strided")


# --- what hosts do ---------------------------------------------------------------------------------------------------


def restarted_job(rules: Rules) -> Walk:
    """Two ranks meet over what an old run has left; each tries twice."""
    return meet({rank: [Call(TWO, 2)] for rank in TWO}, old_run(TWO, rules), rules=rules, rounds=6)


def job_that_starts(rules: Rules) -> Walk:
    """Three ranks meet over what an old run has left; nobody waits to a limit."""
    return meet({rank: [Call(THREE)] for rank in THREE}, old_run(THREE, rules), rules=rules, patient=True)


def unequal_tries(rules: Rules) -> Walk:
    """Two ranks meet in a new store; each tries twice."""
    return meet({rank: [Call(TWO, 2)] for rank in TWO}, rules=rules, rounds=6)


def wrong_members_first(rules: Rules) -> Walk:
    """Rank 1 is told a wrong list of members first, and then the right one."""
    return meet({0: [Call(TWO, 2)], 1: [Call(THREE), Call(TWO, 2)]}, rules=rules, rounds=6)


def rank_that_was_left_out(rules: Rules) -> Walk:
    """All three were connected, 0 and 1 have rebuilt without 2; now all call for three."""
    contents = drive([attend(rules, rank, THREE) for rank in THREE], {})
    contents = drive([attend(rules, rank, TWO, epoch=1, nonces=1) for rank in TWO], contents)
    memories = [Memory(epoch=2, nonces=2), Memory(epoch=2, nonces=2), Memory(epoch=1, nonces=1)]
    return meet({rank: [Call(THREE)] for rank in THREE}, contents, memories=memories, rules=rules, patient=True)


def rank_that_is_left_out(rules: Rules) -> Walk:
    """All three meet; 0 and 1 rebuild without 2, and then all call for three, 2 perhaps before the others do."""
    three, two = Call(THREE), Call(TWO)
    calls = {0: [three, two, three], 1: [three, two, three], 2: [three, three]}
    return meet(calls, rules=rules, patient=True)


def restarted_rank(rules: Rules) -> Walk:
    """A process dies and its rank starts anew."""
    return meet({rank: [Call(TWO)] for rank in TWO}, rules=rules, crashes=1, rounds=6)


def second_process_of_a_rank(rules: Rules) -> Walk:
    """0 and 1 were connected and rebuild; meanwhile another process comes as rank 1."""
    contents = drive([attend(rules, rank, TWO) for rank in TWO], {})
    memories = [Memory(epoch=1, nonces=1), Memory(epoch=1, nonces=1), Memory()]
    return meet(_rivals(rules), contents, memories=memories)


def two_processes_that_cannot_see_each_other(rules: Rules) -> Walk:
    """Two processes on different machines come as rank 1."""
    PROCESSES.unseen = frozenset({"0.1", "1.1", "1b.1"})
    return meet(_rivals(rules))


def _rivals(rules: Rules) -> list[Host]:
    settings = {"rules": rules, "expected": ["EPLB-T015"], "patient": True, "rounds": 3}
    return [
        Host(0, [Call(TWO)], **settings),
        Host(1, [Call(TWO)], alone=False, **settings),
        Host(1, [Call(TWO)], alone=False, seat="1b", **settings),
    ]


def refusal_of_the_dead(rules: Rules) -> Walk:
    """Two ranks meet over the refusal of an old run."""
    return meet({rank: [Call(TWO)] for rank in TWO}, _old_refusal(), rules=rules)


def refusal_of_the_dead_in_an_own_store(rules: Rules) -> Walk:
    """Rank 0 meets rank 1, which has refused and has ended; the store was made for the two."""
    return meet({0: [Call(TWO)]}, _old_refusal(), rules=rules, private=True, expected=["EPLB-M006"], patient=True)


def _old_refusal() -> Contents:
    return drive([attend(THE_RULES, 1, TWO, life=0, refusal=STRIDED)], {}, patience=2)


def refusal_and_then_not(rules: Rules) -> Walk:
    """Rank 1 refuses, and takes part in the next meeting; the others try twice."""
    calls = {0: [Call(THREE, 2)], 1: [Call(THREE, refusal=STRIDED), Call(THREE)], 2: [Call(THREE, 2)]}
    return meet(calls, rules=rules, expected=("EPLB-M006",), patient=True)


# --- what the walk finds ---------------------------------------------------------------------------------------------


def unsafe(found: Found, text: str) -> bool:
    return found.wrong is not None and re.search(text, found.wrong) is not None


def stuck(found: Found, text: str) -> bool:
    return found.wrong is None and bool(found.stuck(all_connected, nobody_leaves))


def never_all_connected(found: Found, text: str) -> bool:
    """As `stuck`, of hosts none of which waits to a limit: then nobody may give up either."""
    return found.wrong is None and bool(found.stuck(all_connected, lambda state: True))


def endless(found: Found, text: str) -> bool:
    return found.wrong is None and any(map(someone_is_endless, found.states))


def not_told(found: Found, text: str) -> bool:
    """Is there a state from which not everybody is connected or told why not?"""
    return found.wrong is None and bool(found.stuck(everybody_knows, lambda state: True))


def everybody_knows(state: State) -> bool:
    return all(local.end is not None and local.end.why in {"connected", "gave up"} for local in state[:-1])


@dataclass(frozen=True)
class Case:
    """Without which rule what hosts do can end in what; text: a pattern of what is wrong then."""

    rule: str
    without: Rules
    hosts: Callable[[Rules], Walk]
    finds: Callable[[Found, str], bool]
    text: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: {self.hosts.__name__} {self.finds.__name__}"


ALONE = "has voted as nobody of this run"
OF_THREE = r"has voted as {} of ranks \[0, 1, 2\]".format

CASES = [
    # Without a roll, each rank counts the epochs that it has called for.
    Case("roll", broken.NO_ROLL, restarted_job, unsafe, ALONE),
    Case("roll", broken.NO_ROLL, rank_that_was_left_out, unsafe, f"rank 2 is connected by .* rank 0 {ALONE}"),
    Case("roll", broken.NO_ROLL, wrong_members_first, unsafe, OF_THREE("1")),
    Case("fresh nonces", broken.NONCE_OF_A_RANK, restarted_job, unsafe, ALONE),
    Case("fresh nonces", broken.NONCE_OF_A_PROCESS, rank_that_is_left_out, unsafe, f"rank 2 {OF_THREE('2.1')} and 2.1"),
    Case("fresh nonces", broken.NONCE_OF_A_PROCESS, unequal_tries, stuck),
    Case("own nonce", broken.ENTERS_ANY_ROLL, restarted_job, unsafe, ALONE),
    Case("own nonce", broken.ENTERS_ANY_ROLL, rank_that_is_left_out, unsafe, f"rank 2 {OF_THREE('2.1.1')} and 2.1.2"),
    Case("a replaced nonce voids", broken.NEVER_VOID, unequal_tries, stuck),
    Case("a replaced nonce voids", broken.NEVER_VOID, wrong_members_first, stuck),
    Case("a replaced nonce voids", broken.NEVER_VOID, restarted_rank, stuck),
    Case("used nonces are no posts", broken.PUBLISHES_USED_NONCES, job_that_starts, endless),
    Case("a time-out is one rank's", broken.IMPATIENT, unequal_tries, stuck),
    Case("members are compared", broken.COMPARES_NO_MEMBERS, wrong_members_first, unsafe, OF_THREE("1.1.1")),
    Case("epochs rise", broken.ONE_EPOCH, restarted_rank, unsafe, "has been in epoch 1 before"),
    Case("one process is a rank", broken.LOOKS_FOR_NOBODY, second_process_of_a_rank, not_told),
    Case("the last is the rank", broken.TAKES_ITS_PLACE_BACK, two_processes_that_cannot_see_each_other, endless),
    Case("the dead do not refuse", broken.HEEDS_THE_DEAD, refusal_of_the_dead, unsafe, "fails before its limit"),
    Case("in a store of its own they do", broken.NEVER_HEEDS_THE_DEAD, refusal_of_the_dead_in_an_own_store, not_told),
    Case("a refusal ends one call", broken.HEEDS_AGAIN, refusal_and_then_not, never_all_connected),
    Case("a refusal is passed on", broken.PASSES_NOTHING_ON, refusal_and_then_not, never_all_connected),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_walk_finds_what_a_rule_of_the_meeting_is_for(case):
    found = case.hosts(case.without).explore()
    assert case.finds(found, case.text), found.wrong

    found = case.hosts(THE_RULES).explore()
    assert found.wrong is None, found.schedule
    assert not any(map(someone_is_endless, found.states))
    if case.finds not in {unsafe, endless}:
        assert not case.finds(found, case.text)


@pytest.mark.parametrize(
    "rules", [broken.GATHERS_ANY_MEMBERS, broken.ENTERS_ANY_MEMBERS], ids=["gathering", "entering"]
)
def test_members_are_compared_at_both_ends_of_which_each_is_enough(rules):
    found = wrong_members_first(rules).explore()
    assert found.wrong is None, found.schedule
    assert not found.stuck(all_connected, nobody_leaves)


# --- the vote --------------------------------------------------------------------------------------------------------


def disagree(found: Found) -> bool:
    return found.wrong is None and any(len(outcomes(state)) > 1 for state in found.states)


def changed(found: Found) -> bool:
    return found.wrong is not None and "a decision that stood was changed" in found.wrong


def unsupported(found: Found) -> bool:
    return found.wrong is not None and "obeys a commit without the ballot" in found.wrong


def for_nothing(found: Found) -> bool:
    """Is a vote aborted in which all say yes and nothing happens?"""
    return found.wrong is None and any(
        all_know(state) and untroubled(state) and outcomes(state) == {"abort"} for state in found.states
    )


@pytest.mark.parametrize(
    ("kind", "finds"),
    [
        (broken.Overwrites, changed),
        (broken.CountsFirst, for_nothing),
        (broken.CountsFirstAndTakesWhatIsThere, unsupported),
        (broken.GivesUpAlone, disagree),
    ],
    ids=lambda value: value.__name__,
)
def test_a_walk_finds_what_a_rule_of_the_vote_is_for(kind, finds):
    assert finds(vote(["yes"] * 3, kind=kind).explore())
    assert not finds(vote(["yes"] * 3).explore())


@pytest.mark.parametrize(("kind", "ends"), [(broken.ObeysAnyCommit, "commit"), (Vote, "EPLB-T016")])
def test_a_commit_that_another_life_has_left_is_obeyed_without_the_rule_of_the_own_ballot(kind, ends):
    decided = vote(["yes"] * 3).explore()
    state = next(state for state in decided.states if all_know(state) and outcomes(state) == {"commit"})
    left = {key: value for key, value in state[-1].contents.items() if key.endswith("/decision")}

    found = vote(["fails"] * 3, kind=kind, contents=left).explore()
    assert {end for state in found.states for end in outcomes(state)} == {ends}
