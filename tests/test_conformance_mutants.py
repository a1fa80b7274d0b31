"""The kit is judged by what it catches: every faulty backend fails the kit test that is meant for it."""

from __future__ import annotations

import sys

import pytest

from eplb_core.testing.conformance import BackendConformance, kit_tests
from eplb_core.testing.expectation import Unmet
from tests.conformance_mutants.runner import MUTANTS, Examination, install


@pytest.fixture(scope="module")
def _installed(tmp_path_factory):
    kept = list(sys.path)
    install(tmp_path_factory.mktemp("mutants"))
    yield
    sys.path[:] = kept


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_the_kit_test_meant_for_it(name):
    examination = Examination(name)
    try:
        failure = examination.failure_of(f"test_{MUTANTS[name].test}")
    finally:
        examination.close()
    assert failure is not None, f"{name} {MUTANTS[name].fault}, and the kit did not notice"
    assert isinstance(failure, Unmet), f"the kit notices {name}, and does not say what is wrong: {failure}"
    meaning = (kit_tests()[f"test_{MUTANTS[name].test}"].__doc__ or "").split()
    assert " ".join(str(failure).split()).startswith(" ".join(meaning))


def test_every_kit_test_is_meant_for_a_mutant_or_about_the_kit_itself():
    meant = {f"test_{mutant.test}" for mutant in MUTANTS.values()}
    assert set(kit_tests()) - meant == {"test_the_kit_is_complete"}
    assert len(MUTANTS) >= 25


def test_a_class_that_replaces_or_drops_a_kit_test_is_refused():
    for replacement in (lambda self: None, None):
        with pytest.raises(TypeError, match="replaces or drops kit tests: test_a_row_arrives_whole"):
            type("TestMine", (BackendConformance,), {"test_a_row_arrives_whole": replacement})


def test_an_excuse_for_a_test_that_the_kit_has_not_is_refused():
    with pytest.raises(TypeError, match="names no tests of the kit: test_nothing"):
        type("TestMine", (BackendConformance,), {"excused": {"test_nothing": "it is late"}})
