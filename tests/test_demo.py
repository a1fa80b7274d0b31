"""``eplb demo``, as a user runs it: weights really move, every byte is checked, and whatever goes wrong is shown."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from eplb_core.balancing import rebalance_experts
from eplb_core.bench.load import zipf_load
from eplb_core.bench.workload import WorkloadOptions, build_workload
from eplb_core.cli.demo_view import DemoView
from eplb_core.launch.failure import RankFailure

pytestmark = pytest.mark.slow

BACKENDS = Path(__file__).parent / "data" / "demo_backends"
SMALL = ("--ranks", "2", "--layers", "3", "--scale", "16")


def environment(**more: str) -> dict[str, str]:
    """Our own, plus the backends made for these tests; torchrun's variables of whoever runs the tests left out."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EPLB_")}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS"):
        kept.pop(name, None)
    paths = os.pathsep.join(filter(None, [str(BACKENDS), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": paths, **more}


def demo(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eplb_core.cli", "demo", *arguments]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=150)


def start(*arguments: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "eplb_core.cli", "demo", *arguments]
    options = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, **options)


def expected_moves(options: WorkloadOptions, world_size: int, rounds: int) -> list[int]:
    """Count the bytes that must cross ranks in each round: each rank needs each expert it newly holds once."""
    workload = build_workload(options, world_size)
    shape = (workload.num_layers, world_size, -1)
    nbytes_expert = sum(spec.nbytes for spec in workload.source.specs[0])
    old, moved = workload.initial_map(), []
    for number in range(1, rounds + 1):
        load = zipf_load(
            workload.num_layers, workload.source.num_experts, workload.top_k, seed=options.seed, round_number=number
        )
        new = rebalance_experts(load, workload.num_physical_experts, num_ranks=world_size)
        pairs = zip(old.reshape(shape), new.reshape(shape), strict=True)
        moved.append(
            sum(len(set(n) - set(o)) for o_l, n_l in pairs for o, n in zip(o_l, n_l, strict=True)) * nbytes_expert
        )
        old = new
    return moved


@pytest.mark.slow
def test_experts_move_and_every_byte_is_checked():
    result = demo("--backend", "torch_gloo", "--rounds", "2", "--json", *SMALL)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["ok"]
    assert document["backend"]["name"] == "torch_gloo"
    workload = document["workload"]
    assert (workload["model"], workload["num_experts"], workload["world_size"]) == ("qwen3-30b-a3b", 128, 2)
    options = WorkloadOptions(num_layers=3, scale=16)
    moved = expected_moves(options, 2, 2)
    assert min(moved) > 0
    assert [done["nbytes_moved"] for done in document["rounds"]] == moved
    for done in document["rounds"]:
        assert done["layers_committed"] == [0, 1, 2]
        assert done["balancedness_after"] > max(0.95, done["balancedness_before"])
        assert done["nbytes_checked"] == workload["nbytes"] == 3 * 130 * workload["nbytes_per_expert"]
        assert done["rows_checked"] == 3 * 130 * 2
        assert done["rows_wrong"] == 0
        assert done["gb_per_s"] == pytest.approx(done["nbytes_moved"] / done["seconds"] / 1e9)
    assert document["failures"] == document["wrong"] == []


@pytest.mark.slow
def test_fp8_experts_with_block_scales_move_and_the_report_is_readable():
    result = demo(
        "--preset", "DeepSeek-V3", "--backend", "torch_gloo", "--ranks", "2", "--layers", "1", "--scale", "32"
    )
    assert result.returncode == 0, result.stderr
    shown = " ".join(result.stdout.split())
    assert "deepseek-v3 (deepseek-ai/DeepSeek-V3): 1 of 58 MoE layers, 256 experts, top-8" in shown
    assert "one expert of a layer, widths divided by 32: " in shown
    assert "w13_weight float8_e4m3fn [128, 224]" in shown
    assert "w13_weight_scale_inv float32 [2, 2]" in shown
    assert "backend torch_gloo: named in the configuration" in shown
    assert "committed 1 of 1 layer " in shown
    assert "checked 1032 rows" in shown
    assert "all right" in shown
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.slow
def test_nothing_wraps_on_a_narrow_terminal_and_what_needs_no_repeating_is_said_once():
    result = demo("--backend", "torch_gloo", "--rounds", "2", "--ranks", "2", "--layers", "8", COLUMNS="80")
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\n    (mean" in result.stdout
    assert not re.search(r"^    (?!\(mean)", result.stdout, re.MULTILINE)  # four blanks begin a wrapped line
    assert result.stdout.count("1 is perfect") == 1
    assert len(re.findall(r"moved [\d.]+ [MG]B between ranks and .* s, [\d.]+ GB/s$", result.stdout, re.MULTILINE)) == 2


@pytest.mark.slow
def test_one_is_no_plural_and_of_nothing_moved_there_is_no_rate():
    result = demo("--backend", "torch_gloo", "--ranks", "1", "--layers", "1", "--scale", "16")
    assert result.returncode == 0, result.stderr
    assert "\n1 rank x 129 physical experts (1 redundant)" in result.stdout
    assert re.search(r"^  moved 0 B between ranks and [\d.]+ MB within them in [\d.]+ s$", result.stdout, re.MULTILINE)
    assert re.search(r"^  committed 1 of 1 layer$", result.stdout, re.MULTILINE)
    assert re.search(r"^  checked 258 rows, [\d.]+ MB: all right$", result.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_backend_that_moves_rows_over_the_hosts_group_is_given_one():
    result = demo("--backend", "torch_nccl", "--json", *SMALL)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["rounds"][0]["nbytes_moved"] > 0


@pytest.mark.slow
def test_the_automatic_choice_is_shown_with_its_reason():
    result = demo("--json", *SMALL)
    assert result.returncode == 0, result.stderr
    backend = json.loads(result.stdout)["backend"]
    assert backend["why"].startswith("highest auto_priority")
    assert backend["rejected"]["through_store"] == "taken only when named"


@pytest.mark.slow
def test_a_checkpoint_moves(tmp_path):
    tensors = {}
    for layer in (1, 2):
        for expert in range(6):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            for name, shape in (("w1", (32, 16)), ("w3", (32, 16)), ("w2", (16, 32))):
                tensors[f"{prefix}.{name}.weight"] = torch.randn(shape).to(torch.float8_e5m2)
                tensors[f"{prefix}.{name}.weight_scale"] = torch.randn(())
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_experts_per_tok": 2}))
    result = demo("--checkpoint", str(tmp_path), "--ranks", "2", "--backend", "torch_gloo", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["workload"]["top_k"] == 2
    assert {tensor["name"] for tensor in document["workload"]["tensors"]} == {
        "w13_weight", "w2_weight", "w1_weight_scale", "w2_weight_scale", "w3_weight_scale",
    }  # fmt: skip
    (done,) = document["rounds"]
    assert done["nbytes_moved"] > 0
    assert done["rows_checked"] == 2 * 8 * 5


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_single_wrong_bit_fails_the_demo_and_the_row_is_named():
    result = demo("--backend", "flips_a_byte", "--json", *SMALL)
    assert result.returncode == 1
    document = json.loads(result.stdout)
    assert not document["ok"]
    assert document["rounds"][0]["rows_wrong"] == len(document["wrong"]) == 2
    assert [(failure["rank"], failure["code"]) for failure in document["failures"]] == [(1, "EPLB-B006")]
    assert "rank 1, round 1: layer 1 w13_weight row" in result.stderr
    assert "from byte 5 on" in result.stderr
    assert "rank 1: BenchError: Verification failed: 2 of 390 rows on rank 1" in " ".join(result.stderr.split())
    assert "'eplb explain EPLB-B006'" in result.stderr


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_demo_and_the_others_name_it():
    result = demo("--backend", "kills_a_rank", "--ranks", "3", "--layers", "3", "--scale", "16", "--json")
    assert result.returncode == 1
    document = json.loads(result.stdout)
    found = {failure["rank"]: failure for failure in document["failures"]}
    assert found[1]["error"] == "Died"
    assert "SIGKILL" in found[1]["message"]
    for survivor in (0, 2):
        assert found[survivor]["code"] == "EPLB-T003"
        assert found[survivor]["message"].startswith("Rank 1 is gone")


@pytest.mark.slow
def test_the_typed_error_of_a_failing_rank_is_shown():
    result = demo("--backend", "raises", *SMALL)
    assert result.returncode == 1
    shown = " ".join(result.stderr.split())
    assert "ranks 0, 1: TransferError: raises transfer failed with state=BROKEN" in shown
    assert "'eplb explain EPLB-T001'" in shown


@pytest.mark.slow
def test_a_rank_that_hangs_is_reported_by_the_others_within_the_timeout_and_then_killed():
    started = time.monotonic()
    result = demo("--backend", "hangs", "--timeout", "5", *SMALL)
    assert time.monotonic() - started < 90
    assert result.returncode == 1
    assert "StalledError: Stalled for" in result.stderr
    assert "rank 1: Killed: it did not answer the failure of another rank" in result.stderr


@pytest.mark.slow
def test_an_interrupt_ends_all_ranks_promptly():
    with start("--backend", "hangs", "--ranks", "2", "--layers", "3", "--scale", "16") as process:
        while "backend hangs" not in process.stdout.readline():
            pass
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = [child for child in children if child.ppid() != process.pid]  # a server forks them
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in err
    assert len(ranks) == 2
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--preset", "qwen"), "unknown preset 'qwen'"),
        (("--redundant", "3"), "--redundant 4 does"),
        (("--layers", "49"), "49 layers asked for; qwen3-30b-a3b has 48 MoE layers"),
        (("--scale", "7"), "scale 7 does not divide the hidden_size"),
        (("--checkpoint", "/nowhere"), "/nowhere is not a folder"),
        (("--backend", "pigeon"), "Unknown communicator 'pigeon'"),
        (("--preset", "kimi-k2", "--layers", "60", "--scale", "1"), "are available; use fewer --layers"),
        (("--ranks", "10000", "--layers", "1", "--scale", "64"), "GB of it for the processes themselves, and"),
        (("--ranks", "10000", "--layers", "1", "--scale", "64"), "GB are available; use fewer --ranks ["),
    ],
)
def test_what_cannot_be_is_said_before_any_rank_starts(arguments, text):
    result = demo(*arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    assert text in " ".join(result.stderr.split())
    assert "'eplb explain EPLB-" in result.stderr


@pytest.mark.parametrize(
    "arguments", [("--ranks", "0"), ("--rounds", "0"), ("--preset", "qwen3-30b-a3b", "--checkpoint", "x"), ("--nope",)]
)
def test_impossible_options_are_usage_errors(arguments):
    result = demo(*arguments)
    assert result.returncode == 2
    assert arguments[-2 if len(arguments) > 1 else -1] in result.stderr


def test_ranks_that_failed_alike_are_listed_in_order(capsys):
    view = DemoView(as_json=False)
    failures = [RankFailure(rank, "StalledError", "EPLB-T002", "Stalled for 3.0 s", "") for rank in (3, 0, 10, 2)]
    assert view.conclude(failures) == 1
    assert "ranks 0, 2, 3, 10: StalledError" in capsys.readouterr().err


def test_the_help_says_how_torchrun_starts_it_and_what_the_defaults_are():
    shown = " ".join(demo("--help").stdout.replace("│", "").split())
    assert "torchrun --nproc-per-node 2 -m eplb_core.cli demo" in shown
    assert f"[default: ({WorkloadOptions().preset})]" in shown
    assert "[default: (4," in shown


# --- under torchrun ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_under_torchrun_each_process_is_a_rank_and_only_the_first_shows_results():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    processes = [
        start(
            *("--layers", "1", "--scale", "16", "--backend", "torch_gloo", "--json"),
            env=environment(
                RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo"
            ),
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    document = json.loads(outputs[0][0])
    assert document["ok"]
    assert document["workload"]["world_size"] == 2
    assert outputs[1][0] == ""


def test_under_torchrun_another_number_of_ranks_is_refused():
    with start("--ranks", "3", env=environment(RANK="0", WORLD_SIZE="2", MASTER_ADDR="x", MASTER_PORT="1")) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "torchrun started 2 ranks" in err
