"""The example host engine, run as its README says: a real model gives the same logits while its experts move."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="examples/host_engine serves a model of transformers")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "host_engine" / "host_engine.py"
BACKENDS = ROOT / "tests" / "data" / "demo_backends"

pytestmark = pytest.mark.slow

SMALL = ("--ranks", "2", "--layers", "2", "--rounds", "1", "--steps", "112", "--interval", "32")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [str(BACKENDS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)


def said(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert result.returncode == 0, result.stderr
    return dict(line.split(": ", 1) for line in result.stdout.splitlines() if ": " in line)


@pytest.mark.parametrize("backend", [pytest.param("torch_gloo", marks=pytest.mark.soak), "nixl"])
def test_logits_stay_the_same_to_the_bit_while_experts_move_in_the_background(backend):
    lines = said(run(*SMALL, "--backend", backend))
    assert lines[f"backend {backend}"] == "named in the configuration"
    assert lines["reference"].startswith("the logits of transformers 5.")
    assert "rearranged" not in lines["experts stay"]
    layers, nbytes = map(int, re.search(r"(\d+) layers rearranged, (\d+) MB", lines["experts move"]).groups())
    assert layers >= 2
    assert nbytes > 0
    held = lines["engine's thread held by step()"]
    assert re.match(r"longest [\d.]+ ms; with nothing under way median \d+ us", held)
    assert lines["all 2 ranks"] == "logits equal to the bit in every step, experts to the byte after every round"


@pytest.mark.soak
def test_experts_may_also_move_between_two_steps_and_be_float32():
    lines = said(run(*SMALL, "--backend", "torch_gloo", "--synchronous", "--dtype", "float32"))
    assert int(re.search(r"(\d+) layers rearranged", lines["experts move"])[1]) >= 2
    assert "all 2 ranks" in lines


def test_one_flipped_bit_in_one_weight_is_noticed():
    result = run(*SMALL, "--backend", "flips_a_byte")
    assert result.returncode != 0
    assert re.search(r"logits changed by|slot \d+ does not hold expert \d+", result.stderr)


def test_a_backend_that_is_not_safe_beside_running_kernels_is_refused_in_one_line():
    result = run("--backend", "torch_nccl")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("ConfigError: ")


def test_ranks_that_do_not_divide_the_experts_are_refused():
    result = run("--ranks", "3")
    assert result.returncode == 2
    assert "--ranks must divide the 32 experts" in result.stderr


def test_no_steps_at_all_are_refused():
    result = run("--steps", "0")
    assert result.returncode == 2
    assert "must be 1 or more" in result.stderr


def test_the_readme_lists_the_options_that_exist():
    readme = (SCRIPT.parent / "README.md").read_text()
    shown = run("--help").stdout
    listed = set(re.findall(r"\| `(--\w+)", readme))
    assert listed == set(re.findall(r"^\s+(--\w+)", shown, re.MULTILINE)) - {"--help"}
