"""``eplb verify``: what passed, what each failure means, and an exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from eplb_core.cli.app import app
from eplb_core.testing.conformance import kit_tests
from tests.conformance_mutants.runner import install

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def verify(tmp_path_factory):
    kept = list(sys.path)
    install(tmp_path_factory.mktemp("mutants"))
    added = [path for path in sys.path if path not in kept] + [path for path in kept if path.endswith("mutants/site")]
    sys.path[:] = kept

    def run(name, *options):
        env = {**os.environ, "EPLB_PLUGINS": name, "PYTHONPATH": os.pathsep.join(added)}
        command = [sys.executable, "-m", "eplb_core.cli", "verify", name, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=env)

    return run


def test_a_good_backend_passes_and_a_claim_not_made_is_no_failure(verify):
    done = verify("good", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert told["passed"] is True
    outcomes = {verdict["test"]: verdict["outcome"] for verdict in told["tests"]}
    assert {f"test_{test}" for test in outcomes} == set(kit_tests())
    assert {test for test, outcome in outcomes.items() if outcome == "not claimed"} == {
        "zero_copy_takes_no_memory_for_rows",
        "zero_copy_the_source_stays_frozen",
        "batched_every_batch_is_moved",
    }


def test_a_failure_is_shown_with_its_meaning_and_the_status_is_1(verify):
    done = verify("empty_receipts", "--test", "receipts_count_the_bytes", "--test", "the_class_is_whole")
    shown = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert "receipts_count_the_bytes failed" in shown
    assert " ".join((kit_tests()["test_receipts_count_the_bytes"].__doc__ or "").split()) in shown
    assert "one expert of 128 bytes was received; the receipt says 0" in shown
    assert "empty_receipts: 1 passed, 1 failed, in " in shown


def test_an_unknown_backend_is_a_typed_error():
    done = subprocess.run(
        [sys.executable, "-m", "eplb_core.cli", "verify", "nosuch"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "EPLB-C006" in done.stderr


def test_a_test_that_the_kit_has_not_is_a_usage_error():
    result = CliRunner().invoke(app, ["verify", "torch_gloo", "--test", "everything"])
    assert result.exit_code == 2
    assert "the kit has no test_everything" in result.output


def test_an_environment_without_equals_sign_is_a_usage_error():
    result = CliRunner().invoke(app, ["verify", "torch_gloo", "--env", "UCX_TLS"])
    assert result.exit_code == 2
