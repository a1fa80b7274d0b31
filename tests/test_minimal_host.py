"""The smallest example host, run as its README says: outputs are equal to the bit, and one wrong bit is noticed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "minimal_host" / "minimal_host.py"
BACKENDS = ROOT / "tests" / "data" / "demo_backends"

pytestmark = pytest.mark.slow


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [str(BACKENDS), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=170)


def test_a_served_model_gives_the_same_outputs_after_each_rearrangement():
    result = run("--ranks", "2", "--steps", "6", "--interval", "3", "--backend", "torch_gloo")
    assert result.returncode == 0, result.stderr
    first, *steps = result.stdout.splitlines()
    assert first == "backend torch_gloo: named in the configuration"
    assert [line.split(":")[0] for line in steps] == ["step 3", "step 6"]
    for line in steps:
        before, after = map(float, re.search(r"balancedness ([\d.]+) -> ([\d.]+)", line).groups())
        assert before < after
        assert after > 0.95
        assert "moved 3 layers" in line
        assert line.endswith("outputs equal bit for bit")


def test_one_flipped_bit_in_one_weight_is_noticed():
    result = run("--ranks", "2", "--steps", "3", "--interval", "3", "--backend", "flips_a_byte")
    assert result.returncode != 0
    assert re.search(r"rank \d, step 3: outputs changed by", result.stderr)


def test_a_backend_that_moves_weights_over_the_hosts_group_is_given_it():
    result = run("--ranks", "2", "--steps", "3", "--interval", "3", "--backend", "torch_nccl")
    assert result.returncode == 0, result.stderr
    assert "outputs equal bit for bit" in result.stdout


def test_a_backend_that_is_not_installed_is_refused_in_one_line():
    result = run("--backend", "nope")
    assert result.returncode == 1
    assert result.stderr.startswith("ConfigError: Unknown communicator 'nope'.")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("option", ["--steps", "--interval"])
def test_no_steps_at_all_are_refused(option):
    result = run(option, "0")
    assert result.returncode == 2
    assert "--steps and --interval must be 1 or more" in result.stderr


def test_ranks_that_do_not_divide_the_experts_are_refused():
    result = run("--ranks", "3")
    assert result.returncode == 2
    assert "--ranks must divide the 32 experts" in result.stderr


def test_the_readme_lists_the_options_that_exist():
    readme = (SCRIPT.parent / "README.md").read_text()
    shown = run("--help").stdout
    listed = set(re.findall(r"\| `(--\w+)", readme))
    assert listed == set(re.findall(r"^\s+(--\w+)", shown, re.MULTILINE)) - {"--help"}
