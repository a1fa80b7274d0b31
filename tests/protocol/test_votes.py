"""A vote of three ranks in every order of its store operations; any may die after any of them, or reach its limit."""

from __future__ import annotations

import itertools

import pytest

from tests.protocol.votes import all_know, outcomes, untroubled, vote

SAID = list(itertools.combinations_with_replacement(["yes", "no", "fails"], 3))


@pytest.mark.parametrize("said", SAID, ids=" ".join)
def test_all_that_learn_the_decision_of_a_vote_agree_and_all_that_live_learn_it(said):
    found = vote(said, crashes=3).explore()
    assert found.wrong is None, found.schedule

    ends = [outcomes(state) for state in found.states]
    assert all(len(each) <= 1 for each in ends)
    commits = {"commit"} if said == ("yes", "yes", "yes") else set()
    assert set().union(*ends) == {"abort"} | commits

    assert not found.stuck(all_know, untroubled)  # nobody is dead and no limit has run out: nothing is waited for
    assert not found.stuck(all_know, lambda state: True, quietly=False)


def test_a_vote_in_which_all_say_yes_and_nothing_happens_commits():
    found = vote(["yes", "yes", "yes"]).explore()
    calm = [outcomes(state) for state in found.states if all_know(state) and untroubled(state)]
    assert calm
    assert all(each == {"commit"} for each in calm)
