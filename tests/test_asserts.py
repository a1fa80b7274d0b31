"""The asserts of the tests themselves must fail when they do not hold, also under ``python -O``."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import pytest


def _what_a_failing_assert_does(results):
    outcome = "nothing"
    try:
        assert sys.flags.optimize < 0
    except AssertionError:
        outcome = "fails"
    results.put((outcome, sys.flags.optimize))


def test_a_failing_assert_fails():
    with pytest.raises(AssertionError):
        assert sys.flags.optimize < 0


def test_a_failing_assert_fails_in_a_spawned_rank_that_runs_as_optimised_as_this_process():
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    rank = context.Process(target=_what_a_failing_assert_does, args=(results,))
    rank.start()
    rank.join(60)
    assert rank.exitcode == 0
    assert results.get() == ("fails", sys.flags.optimize)


def test_a_run_in_which_every_test_is_skipped_is_no_success(pytestconfig, tmp_path):
    (tmp_path / "test_skipped.py").write_text("import pytest\npytestmark = pytest.mark.skip\ndef test_nothing(): ...\n")
    command = [sys.executable, "-m", "pytest", "-c", str(pytestconfig.inipath), "-p", "conftest", str(tmp_path)]
    run = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=60, check=False)
    assert "1 skipped" in run.stdout
    assert run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
