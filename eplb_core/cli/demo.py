"""``eplb demo``: a real architecture's experts on N ranks, moved for a skewed load, every byte checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_core.bench.presets import DEFAULT_PRESET, PRESETS
from eplb_core.cli.console import stderr
from eplb_core.errors import EplbError
from eplb_core.errors.texts import describe

if TYPE_CHECKING:
    from eplb_core.bench.demo import DemoJob
    from eplb_core.cli.demo_view import DemoView

_DEFAULT_RANKS = 4
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_INTERRUPTED = 130


def demo(  # noqa: PLR0913 - one for each option of the command
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=DEFAULT_PRESET, help=f"Published geometry: {', '.join(PRESETS)}."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Safetensors folder with a model's experts, instead of a preset.")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", show_default="8, or all of fewer", help="MoE layers to hold."),
    ] = None,
    scale: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="the least that keeps them small",
            help="Divides both widths of a preset's experts.",
        ),
    ] = None,
    redundant: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", show_default="one a rank, or a few more", help="Redundant experts of each layer."
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", show_default=f"{_DEFAULT_RANKS}, under torchrun all of its", help="Processes."
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="the best usable one", help="Backend to move them with.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rearrangements, each for another load.")] = 1,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the load and of generated contents.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Limit of every wait of a rank.")] = 60.0,
    limit: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Ranks still running then are killed.")
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and no progress.")] = False,
) -> None:
    """Move a real architecture's experts between ranks for a skewed load, and check every byte.

    Started by torchrun, each of its processes is a rank:

    torchrun --nproc-per-node 2 -m eplb_core.cli demo
    """
    if preset is not None and checkpoint is not None:
        raise typer.BadParameter("give a preset or a checkpoint, not both", param_hint="--checkpoint")
    from eplb_core.bench.demo import DemoJob
    from eplb_core.bench.workload import WorkloadOptions
    from eplb_core.cli.demo_view import DemoView

    options = WorkloadOptions(
        **({} if preset is None else {"preset": preset}),
        checkpoint=None if checkpoint is None else str(checkpoint),
        num_layers=layers,
        scale=scale,
        num_redundant_experts=redundant,
        seed=seed,
    )
    job = DemoJob(options, backend=backend, rounds=rounds, timeout_s=timeout)
    view = DemoView(as_json=as_json)
    if all(name in os.environ for name in _TORCHRUN):
        world_size = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, world_size):
            raise typer.BadParameter(f"torchrun started {world_size} ranks", param_hint="--ranks")
        raise typer.Exit(_take_part(job, view))
    raise typer.Exit(_launch(job, ranks or _DEFAULT_RANKS, limit, view))


def _launch(job: DemoJob, num_ranks: int, limit_s: float, view: DemoView) -> int:
    """Run all ranks as processes of this one; return the exit status."""
    import eplb_core as eplb
    from eplb_core.bench.demo import run_launched
    from eplb_core.bench.workload import build_workload, check_memory
    from eplb_core.launch.supervise import launch

    # Errors in the options are raised once, here, and not on every rank.
    check_memory(build_workload(job.workload, num_ranks))
    eplb.select(eplb.EPLBConfig(communicator=job.backend, use_async=False), device_type="cpu")
    try:
        with view.bars:
            failures = launch(
                run_launched,
                job,
                num_ranks=num_ranks,
                limit_s=limit_s,
                on_note=lambda rank, note: view.on_event(rank, *note),
            )
    except KeyboardInterrupt:
        stderr().print("interrupted; all ranks are ended")
        return _INTERRUPTED
    return view.conclude(failures)


def _take_part(job: DemoJob, view: DemoView) -> int:
    """Run the rank that torchrun started; rank 0 shows progress and results, the others only errors."""
    from eplb_core.bench.demo import run_in_environment

    rank = int(os.environ["RANK"])
    try:
        with view.bars:
            run_in_environment(job, lambda kind, data: view.on_event(rank, kind, dict(data)))
    except EplbError as error:
        stderr().print(f"rank {rank}: {describe(error)}", soft_wrap=True)
        return 1
    return view.conclude(()) if rank == 0 else 0
