"""The GPU checks run where there is a GPU, say plainly that they do not elsewhere, and fail when a byte is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))  # ranks inherit it

import check  # noqa: E402
import check_vllm  # noqa: E402

has_gpu = torch.cuda.is_available()


def run_sh(limit_s: float) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": sys.executable}
    return subprocess.run([str(HERE / "run.sh")], env=env, capture_output=True, text=True, timeout=limit_s, check=False)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.skipif(not has_gpu, reason="no GPU")
def test_everything_holds_on_the_gpu():
    run = run_sh(390)
    print(run.stdout)
    assert run.returncode == 0, run.stdout


@pytest.mark.skipif(has_gpu, reason="there is a GPU")
def test_without_a_gpu_one_line_says_that_nothing_was_checked():
    run = run_sh(60)
    assert run.returncode == 0
    assert run.stdout == f"tests/gpu: skipped: torch {torch.__version__} sees no GPU\n"


@pytest.mark.slow
def test_the_checks_can_be_rehearsed_on_host_memory(capsys):
    assert check.main(["--device", "cpu", "--only", "torch_nccl, batches of 4"]) == 0
    assert check.main(["--device", "cpu", "--only", "torch_nccl, peer killed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("torch_nccl, batches of 4  ok" in line and "every byte compared" in line for line in lines)
    assert any("torch_nccl, peer killed  ok" in line and "Rank 1 is gone" in line for line in lines)


@pytest.mark.slow
def test_the_streams_of_eplb_vllm_can_be_rehearsed_on_host_memory(capsys):
    assert check_vllm.main(["--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "torch_gloo" in line and "ok  9 commits" in line and "0 wrong rows" in line]


def test_a_case_that_fails_fails_the_run_and_one_table_shows_all(capsys):
    def run(case, device, folder):
        if case.name == "torch_nccl, batches of 4":
            raise RuntimeError("NCCL is in a bad mood")
        return ("FAILED", "3 wrong rows") if case.name == "torch_gloo" else ("ok", "fine")

    assert check.main(["--device", "cpu"], run) == 1
    out = capsys.readouterr().out
    assert "RuntimeError: NCCL is in a bad mood" in out
    assert "3 wrong rows" in out
    assert " 2 failed, " in out


def test_a_run_in_which_nothing_ran_is_no_success():
    assert check.main(["--device", "cpu", "--only", "cupy_device"]) == 1


LOG = """rank0 NCCL INFO comm 0x1 rank 0 nRanks 2 nNodes {nodes} localRanks 1
Channel 00/0 : 0[0] -> 1[0] [send] via {via}
"""


@pytest.mark.parametrize(
    ("nodes", "via", "problems"),
    [
        (2, "NET/Socket/0", []),
        (1, "NET/Socket/0", ["NCCL's log does not speak of two nodes"]),
        (
            2,
            "SHM/direct",
            ["NCCL's log does not speak of the socket transport", "NCCL took another transport than sockets"],
        ),
    ],
)
def test_nccls_log_must_show_two_nodes_and_sockets(tmp_path, nodes, via, problems):
    (tmp_path / "case.0").write_text(LOG.format(nodes=nodes, via=via))
    assert check.log_problems(str(tmp_path / "case")) == problems
