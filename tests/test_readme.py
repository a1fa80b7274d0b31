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


@pytest.mark.slow
def test_the_program_in_the_readme_moves_weights_between_two_ranks(tmp_path):
    *_, program = re.findall(r"```python\n(.*?)```", README, re.DOTALL)  # the first is the call alone
    script = tmp_path / "program.py"
    script.write_text(program)
    # PYTHONOPTIMIZE would drop the assert that stands in it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    done = run(sys.executable, *torchrun, str(script), env=environment)
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"rank (\d): \w+ committed \(0, 1, 2\), received (\d+) bytes", done.stdout))
    assert said.keys() == {"0", "1"}
    assert all(int(nbytes) > 0 for nbytes in said.values())


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
