"""The checks behind run.sh: two ranks on one GPU, each backend and staging allocator, every byte, one table.

Two ranks share the GPU by looking like two hosts to NCCL (NCCL_HOSTID), which then talks over its socket transport;
that it really does is read from NCCL's own log. With ``--device cpu`` the same checks run on host memory, as far as
they go: a rehearsal of this script, not a check of a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eplb_core import hookimpl

BUDGET_S = 330.0
CASE_LIMIT_S = 60.0
ROW_NBYTES = [[1 << 20, 96], [1 << 20, 96], [64 << 10, 1], [5000, 8]]
ROWS, ROUNDS = 8, 3
DTYPES = ["float8_e8m0fnu", "float8_e4m3fn", "bfloat16", "int16", "uint16", "bool", "float32"]


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Modules without which it is left out, with a word about it."""
    nccl: bool = False
    """Does it talk over NCCL?"""
    kill: bool = False
    """Kill rank 1 in the middle, instead of comparing bytes to the end."""


CASES = [
    Case("torch_nccl", "torch_nccl", nccl=True),
    Case("torch_nccl, batches of 4", "torch_nccl", config={"max_ops_per_batch": 4}, nccl=True),
    Case("torch_nccl, peer killed", "torch_nccl", nccl=True, kill=True),
    Case("pynccl through nccl4py", "pynccl", {"binding": "nccl4py"}, needs=("nccl",), nccl=True),
    Case("pynccl, one layer staged", "pynccl", config={"staging_layers": 1}, needs=("nccl",), nccl=True),
    Case("pynccl through CuPy", "pynccl", {"binding": "cupy"}, needs=("cupy",), nccl=True),
    Case("pynccl, peer killed", "pynccl", needs=("nccl",), nccl=True, kill=True),
    Case("torch_gloo", "torch_gloo"),
    Case("torch_gloo, cupy_pinned", "torch_gloo", config={"staging": "cupy_pinned"}, needs=("cupy", "eplb_cupy")),
    Case("nixl, zero copy", "nixl", {"mode": "zero_copy"}, needs=("eplb_nixl", "nixl")),
    Case("nixl, staged", "nixl", {"mode": "staged"}, needs=("eplb_nixl", "nixl")),
    Case(
        "nixl, staged in cupy_device",
        "nixl",
        {"mode": "staged"},
        {"staging": "cupy_device"},
        needs=("eplb_nixl", "nixl", "eplb_cupy", "cupy"),
    ),
]


# --- on the ranks ----------------------------------------------------------------------------------------------------


def rearrange(rank: Any, case: Case, device: str, log: str) -> dict[str, Any]:
    """Move everything back and forth on one rank and compare every byte; return what the table shows."""
    if case.nccl:
        os.environ.update(nccl_environment(rank.rank, log))
    import torch

    import eplb_core as eplb
    from eplb_core.errors import EplbError
    from eplb_core.testing.model import Model, shuffles

    if device == "cuda":
        torch.cuda.set_device(0)
    maps = shuffles(ROUNDS, len(ROW_NBYTES), rank.world_size, ROWS, redundant=4)
    model = Model(rank.rank, ROWS, ROW_NBYTES, device=device)
    model.fill(maps[0])
    group = device_group(rank, device) if case.backend == "torch_nccl" else None
    config = eplb.EPLBConfig(communicator=case.backend, use_async=False, timeout_s=20, **case.config)
    observers = [DiesInTransfer()] if case.kill and rank.rank == 1 else []
    control, options = rank.control(), case.options or None
    comm = eplb.Communicator(config, model.weights, control, group, options=options, observers=observers)
    comm.connect()
    if case.kill:
        return survive(rank, comm, model, maps, EplbError)
    seconds, nbytes, wrong = 0.0, 0, []
    for old, new in itertools.pairwise(maps):
        started_s = time.monotonic()
        nbytes += comm.rearrange(old, new).nbytes_received
        seconds += time.monotonic() - started_s
        wrong += model.wrong_rows(new)
    comm.close()
    dtypes = wrong_dtypes(rank, case, device, group)
    return {"nbytes": nbytes, "seconds": seconds, "wrong": len(wrong), "dtypes": dtypes}


class DiesInTransfer:
    """Kills its rank at the start of a transfer, which the peer waits for."""

    name = "dies in transfer"

    @hookimpl(wrapper=True)
    def transfer(self, plan: Any) -> Any:
        """Let the first rearrangement pass."""
        if plan.generation > 1 and plan.layer == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return (yield)


def survive(rank: Any, comm: Any, model: Any, maps: list[Any], error_type: type[Exception]) -> dict[str, Any]:
    """Rearrange until the peer, which kills itself, is gone; the error, and whether whole layers hold."""
    comm.rearrange(maps[0], maps[1])
    started_s = time.monotonic()
    try:
        comm.rearrange(maps[1], maps[2])
    except error_type as error:
        seconds = time.monotonic() - started_s
        wrong = model.wrong_rows(error.report.physical_to_logical_map)  # type: ignore[attr-defined]
        closing_s = time.monotonic()
        comm.close(force=True)
        late = seconds > 5 or time.monotonic() - closing_s > 3
        return {"nbytes": 0, "seconds": seconds, "wrong": len(wrong) + late, "dtypes": [], "error": str(error)}
    return {"nbytes": 0, "seconds": 0.0, "wrong": 1, "dtypes": [], "error": "the peer's death went unnoticed"}


def wrong_dtypes(rank: Any, case: Case, device: str, group: Any) -> list[str]:
    """Move one layer of many dtypes; return those whose bytes are not as they were."""
    import numpy as np
    import torch

    import eplb_core as eplb

    old, new = np.arange(8)[None], np.arange(8)[None, ::-1].copy()
    mine = slice(rank.rank * 4, rank.rank * 4 + 4)
    generator = torch.Generator().manual_seed(7)
    raw = [torch.randint(0, 2, (8, 64), dtype=torch.uint8, generator=generator) * 255 for _ in DTYPES]
    raw = [bits & 1 if name == "bool" else bits for bits, name in zip(raw, DTYPES, strict=True)]
    held = [bits[old[0, mine]].to(device).view(getattr(torch, name)) for bits, name in zip(raw, DTYPES, strict=True)]
    config = eplb.EPLBConfig(communicator=case.backend, use_async=False, timeout_s=20, **case.config)
    control = rank.control("dtypes")
    with eplb.Communicator(config, [held], control, group, options=case.options or None, name="dtypes") as comm:
        comm.rearrange(old, new)
    return [
        name
        for name, tensor, bits in zip(DTYPES, held, raw, strict=True)
        if not torch.equal(tensor.view(torch.uint8).cpu(), bits[new[0, mine]])
    ]


def device_group(rank: Any, device: str) -> Any:
    """Make the group an engine would have: NCCL's, or in a rehearsal gloo's."""
    if device != "cuda":
        return rank.device_group()
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "nccl",
        store=rank.store("world"),
        rank=rank.rank,
        world_size=rank.world_size,
        device_id=torch.device("cuda", 0),
    )
    return dist.group.WORLD


def nccl_environment(rank: int, log: str) -> dict[str, str]:
    """Two ranks of one GPU: two hosts to NCCL, which talk over loopback, and write down that they do."""
    return {
        "NCCL_HOSTID": f"eplb-gpu-check-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": f"{log}.{rank}",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch ends the process when a peer dies
    }


# --- around them -----------------------------------------------------------------------------------------------------


def run_case(case: Case, device: str, folder: Path) -> tuple[str, str]:
    """Run one case on two ranks; return (outcome, what it measured or why it failed)."""
    from eplb_core.testing.ranks import Ranks

    log = str(folder / re.sub(r"\W+", "-", case.name))
    with Ranks(2, rearrange, case, device, log, env=case.env) as ranks:
        outcomes = ranks.join(CASE_LIMIT_S)
    for outcome in outcomes[: 1 if case.kill else 2]:
        if outcome.error or outcome.killed:
            return "FAILED", (outcome.error or "a rank ended without a word").strip().splitlines()[-1]
    values = [outcome.value for outcome in outcomes if outcome.value]
    problems = [f"{value['wrong']} wrong rows" for value in values if value["wrong"]]
    problems += [f"{', '.join(value['dtypes'])} damaged" for value in values if value["dtypes"]]
    if case.nccl and device == "cuda":
        problems += log_problems(log)
    said = values[0].get("error", "")
    if problems:
        return "FAILED", "; ".join([*problems, *([said] if said else [])])
    if case.kill:
        return "ok", f"{values[0]['seconds']:.2f} s: {said[:70]}"
    nbytes, seconds = sum(value["nbytes"] for value in values), max(value["seconds"] for value in values)
    return "ok", f"{nbytes / 2**20:.0f} MiB in {seconds:.2f} s, every byte compared"


def log_problems(log: str) -> list[str]:
    """Read from NCCL's log that the two ranks are two nodes to it, and which transport it took."""
    texts = [path.read_text(errors="replace") for path in sorted(Path(log).parent.glob(f"{Path(log).name}.*"))]
    text = "\n".join(texts)
    problems = []
    if not re.search(r"\bnNodes 2\b", text):
        problems.append("NCCL's log does not speak of two nodes")
    if not re.search(r"NET/Socket", text):
        problems.append("NCCL's log does not speak of the socket transport")
    if re.search(r"via (P2P|SHM)", text):
        problems.append("NCCL took another transport than sockets")
    return problems


def why_left_out(case: Case, device: str) -> str | None:
    """Return why a case cannot run here, if so."""
    missing = [module for module in case.needs if find_spec(module) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if device != "cuda" and (case.backend == "pynccl" or "staging" in case.config):
        return "only on a GPU"
    return None


def main(arguments: list[str], run: Callable[[Case, str, Path], tuple[str, str]] = run_case) -> int:
    """Run all cases and print the table; 0 when none failed and at least one ran."""
    parser = argparse.ArgumentParser(description="GPU checks of eplb-core and its plugins")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    options = parser.parse_args(arguments)
    import torch

    where = torch.cuda.get_device_name(0) if options.device == "cuda" else "host memory (a rehearsal)"
    print(f"torch {torch.__version__}, {where}, two ranks")
    started_s, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="eplb-gpu-") as folder:
        for case in CASES:
            if options.only not in case.name:
                continue
            reason = why_left_out(case, options.device)
            begun_s = time.monotonic()
            if reason is not None:
                outcome, said = "left out", reason
            elif begun_s - started_s > BUDGET_S:
                outcome, said = "FAILED", "no time left"
            else:
                try:
                    outcome, said = run(case, options.device, Path(folder))
                except Exception as error:  # one case must not hide the others
                    outcome, said = "FAILED", f"{type(error).__name__}: {error}"
            rows.append((case.name, outcome, f"{time.monotonic() - begun_s:.1f}", said))
            print(f"  {case.name}: {outcome}", file=sys.stderr, flush=True)
    widths = [max(len(row[i]) for row in [*rows, ("case", "outcome", "s", "")]) for i in range(3)]
    for row in [("case", "outcome", "s", "measured"), *rows]:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]))
    outcomes = [row[1] for row in rows]
    print(
        f"{outcomes.count('ok')} ok, {outcomes.count('FAILED')} failed, {outcomes.count('left out')} left out", end=""
    )
    print(f" in {time.monotonic() - started_s:.0f} s")
    return 0 if "ok" in outcomes and "FAILED" not in outcomes else 1


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]
    # Ranks find these functions by the module's name, which `__main__` is not.
    import check

    sys.exit(check.main(sys.argv[1:]))
