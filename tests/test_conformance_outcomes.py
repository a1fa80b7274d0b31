"""What the kit says when a test fails: its meaning where that was seen, else what was raised; never a guess."""

from __future__ import annotations

import os

import pytest

from eplb_core.backend import API_VERSION, BackendInfo
from eplb_core.errors import TransferError
from eplb_core.testing.conformance import BackendConformance, kit_tests
from eplb_core.testing.course import Course
from eplb_core.testing.expectation import NotReached, Unmet, expect, expecting, reach, told
from eplb_core.testing.kit_test import kit_test
from eplb_core.testing.ranks import run_ranks
from eplb_core.testing.usable import why_not_here
from eplb_core.testing.verdict import examine


def info(**fields):
    return BackendInfo(name="mine", summary="mine", api_version=API_VERSION, target="mine:Mine", **fields)


def raised(function):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        function()
    return caught.value


def lookup():
    return {}["row"]


def test_a_meaning_stands_before_what_did_not_hold():
    @kit_test
    def test():
        """Rows are lost."""
        expect(False, "row 3 is gone")

    failure = raised(test)
    assert isinstance(failure, Unmet)
    assert str(failure) == "Rows are lost.\n\nrow 3 is gone"


def test_a_meaning_does_not_stand_before_an_error_that_came_first():
    @kit_test
    def test():
        """Rows are lost."""
        lookup()

    failure = raised(test)
    assert isinstance(failure, NotReached)
    assert "Rows are lost" not in str(failure)
    assert str(failure).startswith("not reached: the backend raised before this could be checked\nKeyError: 'row'\n")
    assert "in lookup: return {}" in str(failure)


def test_what_a_check_builds_on_is_no_part_of_its_meaning():
    assert isinstance(raised(lambda: reach(False, "the exchange before went wrong")), NotReached)


def test_an_error_where_none_is_expected_is_a_failed_expectation():
    def judged():
        with expecting("close raised"):
            lookup()

    assert isinstance(raised(judged), Unmet)
    assert str(raised(judged)).startswith("close raised: KeyError: 'row'")


def test_an_error_that_repeats_its_cause_is_left_out():
    def wrapped():
        try:
            lookup()
        except KeyError as error:
            raise TransferError("EPLB-T007", rank=1, where="layer 0", reason=f"KeyError: {error}") from error

    assert told(raised(wrapped)) == told(raised(wrapped).__cause__)
    assert told(raised(wrapped)).startswith("KeyError: 'row'")


def test_of_several_ranks_the_one_that_saw_it_comes_first_and_echoes_are_left_out():
    course = Course(40.0)
    course.failures.update({0: ("raised", "OSError: broken"), 1: ("unmet", "row 3 is gone"), 2: ("unheard", "no word")})
    verdict = course.verdict(silent=[3])
    assert isinstance(verdict, Unmet)
    assert str(verdict) == "rank 1: row 3 is gone\nrank 0: OSError: broken"


def test_ranks_that_say_the_same_say_it_once():
    course = Course(40.0)
    course.failures.update({0: ("raised", "OSError: broken"), 1: ("raised", "OSError: broken")})
    assert str(course.verdict([])).splitlines()[1:] == ["ranks 0, 1: OSError: broken"]


@pytest.mark.parametrize(("judged", "kind"), [(True, Unmet), (False, NotReached)])
def test_a_rank_that_does_not_come_back_is_named_with_the_call_it_is_in(judged, kind):
    course = Course(40.0)
    course.goes(0, ("wait(timeout_s=0.6)", judged))
    course.failures[1] = ("unheard", "rank 1 did not hear 'rank 0 is done' within 8 s")
    assert course.explained_by([0])
    verdict = course.verdict([0])
    assert isinstance(verdict, kind)
    assert str(verdict).splitlines()[-1] == "rank 0 is still in wait(timeout_s=0.6) after 0 s"


def test_a_backend_is_not_examined_where_it_says_no():
    assert why_not_here(info(device_types=("cpu",))) is None
    assert why_not_here(info(device_types=("cpu",)), "cuda") == "mine: it moves weights on cpu, not on cuda"
    refusal = why_not_here(info(available=lambda: "no driver", install_hint="pip install mine[gpu]"))
    assert refusal == "mine is not usable here: no driver. To install: pip install mine[gpu]"
    assert (
        why_not_here(info(requires=("no_such_module",))) == "mine is not usable here: no_such_module is not installed"
    )
    no_device = "mine was to move weights on gpu, and torch has no such device here"
    assert why_not_here(info(device_types=("gpu",))) == no_device
    assert why_not_here(info(device_types=("*",)), "gpu") == no_device


@pytest.mark.parametrize("wanted", ["everything", "wait_returns"])
def test_a_test_that_the_kit_has_not_brings_up_those_close_to_it(wanted):
    with pytest.raises(ValueError, match=f"the kit has no test '{wanted}'. (Close to it|Patterns)") as refused:
        examine("mine", tests=[wanted])
    assert wanted != "wait_returns" or "wait_returns_with_the_rows" in str(refused.value)


def test_the_class_says_what_happens_where_it_cannot_run():
    assert "skipif" in (BackendConformance.__doc__ or "")
    assert "test_a_communicator_can_be_built" in kit_tests()


def environment_of(rank, name):
    return os.environ.get(name)


def test_ranks_have_the_environment_of_the_test_that_starts_them(monkeypatch):
    seen = []
    for value in ("one", "two", None):
        if value is None:
            monkeypatch.delenv("EPLB_TEST_OF_RANKS")
        else:
            monkeypatch.setenv("EPLB_TEST_OF_RANKS", value)
        seen += run_ranks(1, environment_of, "EPLB_TEST_OF_RANKS")
    assert seen == ["one", "two", None]
