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


def test_what_several_tests_met_before_they_could_look_is_shown_once_and_accuses_of_nothing(verify):
    patterns = ("nothing_is_*", "a_row_*", "wait_returns*", "transfer*", "the_declaration_is_sound")
    done = verify("no_handle", *(word for pattern in patterns for word in ("--test", pattern)))
    shown = " ".join(done.stdout.split())
    error = "DiscoveryError: Backend no_handle could not be loaded: its transfer returned None instead of a handle."
    assert done.returncode == 1
    assert "transfer_does_not_wait `transfer` waits for a peer, or returns no handle" in shown
    assert "3 tests not reached: nothing_is_pickled, a_row_arrives_whole, wait_returns_with_the_rows" in shown
    assert shown.count(error) == 1
    assert "A pickle travels" not in shown
    assert "no_handle: 1 passed, 1 failed, 3 not reached, in " in shown


@pytest.mark.soak
def test_a_wait_that_outlasts_its_limit_is_told_in_one_line_and_is_nothing_else(verify):
    done = verify("ignores_its_limit", "--test", "wait_[kn]*", "--test", "failures_are_typed")
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert lines.count("rank 0 is still in wait(timeout_s=0.6) after 8 s") == 2
    assert "2 tests not reached: wait_never_swallows_a_failure, failures_are_typed" in lines
    assert "garbage is committed" not in done.stdout
    assert "DistStoreError" not in done.stdout


def test_a_class_that_is_not_whole_leaves_the_rest_not_run(verify):
    done = verify("no_abort", "--test", "the_class_is_whole", "--test", "a_row*", "--test", "a_dead*", "--json")
    told = {verdict["test"]: verdict for verdict in json.loads(done.stdout)["tests"]}
    assert done.returncode == 1
    assert told["the_class_is_whole"]["outcome"] == "failed"
    assert {told[test]["outcome"] for test in ("a_row_arrives_whole", "a_dead_rank_is_survived")} == {"not run"}
    assert told["a_dead_rank_is_survived"]["detail"] == "test_the_class_is_whole fails"


def test_not_run_is_not_passed(verify):
    done = verify("fails_when_built", "--test", "a_row*", "--test", "a_dead*")
    assert done.returncode == 1
    assert "AttributeError: 'Buffers' object has no attribute 'no_such_field'" in done.stdout
    assert "fails_when_built: 0 passed, 0 failed, 2 not run, in " in done.stdout


def test_a_device_that_the_backend_does_not_declare_is_refused_before_any_test(verify):
    done = verify("good", "--device", "cuda")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nothing was tested: good: it moves weights on cpu, not on cuda\n"


def test_a_backend_that_needs_the_hosts_group_is_told_which_flag_gives_it_one():
    pytest.importorskip("eplb_nccl")
    command = [sys.executable, "-m", "eplb_core.cli", "verify", "torch_nccl", "--device", "cpu", "--test", "a_row*"]
    without = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert without.returncode == 1
    assert "pass device_group=" in without.stdout
    assert "'eplb verify --device-group'" in without.stdout
    given = subprocess.run([*command, "--device-group"], capture_output=True, text=True, timeout=100, check=False)
    assert given.returncode == 0, given.stdout
    assert "torch_nccl: 1 passed, 0 failed, in " in given.stdout


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
    assert "the kit has no test 'everything'" in " ".join(result.output.replace("│", " ").split())


def test_an_environment_without_equals_sign_is_a_usage_error():
    result = CliRunner().invoke(app, ["verify", "torch_gloo", "--env", "UCX_TLS"])
    assert result.exit_code == 2
