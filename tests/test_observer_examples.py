"""The observers' examples, run as their README says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples" / "observers"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_backend_that_is_not_installed_is_refused_in_one_line(script, tmp_path):
    command = [sys.executable, str(script), "--backend", "nope"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith("ConfigError: Unknown communicator 'nope'.")
    assert (result.stderr.count("\n"), result.stdout) == (1, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem, marks=pytest.mark.soak if path != SCRIPTS[0] else []) for path in SCRIPTS],
)
def test_a_backend_that_moves_weights_over_the_hosts_group_is_given_one(script, tmp_path):
    command = [sys.executable, str(script), "--backend", "torch_nccl"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr


def test_a_trace_of_every_rank_and_of_all_together(tmp_path):
    folder = tmp_path / "traces"
    *single, merged = run("trace_a_rearrangement.py", "--folder", str(folder), "--backend", "torch_gloo").split()
    assert [Path(path).name for path in single] == [f"eplb-default-rank{rank}.trace.json" for rank in range(3)]
    events = json.loads(Path(merged).read_text())["traceEvents"]
    votes = [event["pid"] for event in events if event["name"] == "vote"]
    assert {process: votes.count(process) for process in (0, 1, 2)} == dict.fromkeys((0, 1, 2), 16)


def test_a_flipped_byte_is_caught():
    said = run("catch_a_flipped_byte.py", "--backend", "torch_gloo")
    ranks = re.split(r"rank \d:\n", said)[1:]
    assert len(ranks) == 3
    assert len(set(ranks)) == 1
    assert re.search(r"Checksum mismatch in layer 2: tensor '\w+', row \d, landed on rank 1 otherwise than", ranks[0])
    assert "committed before it: layers [0, 1]" in ranks[0]
    assert "rows that hold wrong bytes: 0" in ranks[0]
    assert "after another try: 0" in ranks[0]


def test_counters_as_json():
    counts = json.loads(run("export_stats.py", "--backend", "torch_gloo"))
    assert (counts["communicator"], counts["rearrangements"], counts["layers_committed"]) == ("main", 3, 12)
    assert counts["nbytes_sent"] > 12 * 65536


def test_counters_for_prometheus():
    pytest.importorskip("prometheus_client")
    text = run("export_stats.py", "--prometheus", "--backend", "torch_gloo")
    assert 'eplb_layers_committed_total{communicator="main"} 12.0' in text


def test_the_readme_names_every_script_and_its_own_observer_works():
    readme = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"`(\w+\.py)", readme)) == {script.name for script in SCRIPTS}
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    from eplb_core.rearrange.hooks import BackendHooks
    from tests.test_checksums import ByHand

    BackendHooks("by hand", ByHand([]), [scope["SlowLayers"]()])
