"""README says what is so: its program runs, its commands and files exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eplb_core.config import EPLBConfig

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def run(*command, **kwargs):
    """Run to the end, or end the command so that torchrun takes its ranks along."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes, **kwargs) as process:
        try:
            stdout, stderr = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(timeout=40)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


PROGRAM, CALL = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

# What the second snippet takes as given.
PREPARED = """
import numpy as np
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ep_cpu_group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
old_map = np.tile(np.arange(12) % 8, (3, 1))
new_map = np.roll(old_map, 6, axis=1)
mine = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
weights = [[torch.from_numpy(row[mine])[:, None].expand(-1, 1000).contiguous()] for row in old_map]
"""
AFTERWARDS = """
assert all((weights[layer][0][:, 0].numpy() == new_map[layer, mine]).all() for layer in range(3))
dist.destroy_process_group()
"""


def run_on_two_ranks(program, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(program)
    # PYTHONOPTIMIZE would drop the asserts that stand in it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    apart = ["--redirects", "1", "--log-dir", str(tmp_path)]  # two ranks that print at once share lines otherwise
    done = run(sys.executable, *torchrun, *apart, str(script), env=environment)
    assert done.returncode == 0, done.stderr
    return "".join(path.read_text() for path in tmp_path.rglob("stdout.log"))


@pytest.mark.slow
def test_the_program_in_the_readme_rearranges_while_two_ranks_serve(tmp_path):
    said = run_on_two_ranks(PROGRAM, tmp_path)
    assert sorted(re.findall(r"rank (\d): expert 7 has \[5 5 5\] replicas, it had \[1 1 1\]", said)) == ["0", "1"]


@pytest.mark.slow
def test_the_call_in_the_readme_moves_weights_between_two_ranks(tmp_path):
    said = run_on_two_ranks(PREPARED + CALL + AFTERWARDS, tmp_path)
    assert [int(nbytes) > 0 for nbytes in re.findall(r"\(0, 1, 2\) (\d+)", said)] == [True, True]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake (\w+)\b", README)) - {"and"}))
def test_a_make_target_named_in_the_readme_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_continuous_integration_runs_the_readmes_test_command():
    assert "make test" in README
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1].startswith("exec make test")


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`eplb ([a-z-]+)[^`]*`", README))))
def test_a_command_named_in_the_readme_exists(command):
    done = run(sys.executable, "-m", "eplb_core.cli", command, "--help")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"\]\(([^)]+)\)|`((?:eplb_core|examples|plugins)/[\w./-]+)`", README)))
)
def test_a_file_named_in_the_readme_exists(path):
    assert (ROOT / (path[0] or path[1])).exists()


def test_the_table_of_fields_is_that_of_the_configuration():
    table = re.search(r"\| field \| default \| meaning \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", README)
    expected = [
        f"| `{name}` | `{field.default!r}` | {field.description} |" for name, field in EPLBConfig.model_fields.items()
    ]
    assert table.group(1).splitlines() == expected
