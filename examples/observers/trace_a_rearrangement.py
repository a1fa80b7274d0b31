"""Record where the time of two rearrangements goes, on every rank, and put the ranks side by side for Perfetto.

    python trace_a_rearrangement.py --ranks 3 --folder traces

Then open ``traces/all-ranks.trace.json`` at https://ui.perfetto.dev or in chrome://tracing.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path

import eplb_core as eplb
from eplb_core.observers import ChromeTrace, merge_traces
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks

NUM_LAYERS, ROWS_PER_RANK = 8, 8
ROW_NBYTES = [512 << 10, 256 << 10, 64]  # of each tensor: two matrices and their scales


def serve(rank: Rank, backend: str | None, folder: str) -> str:
    """Be one rank; return where its trace is."""
    maps = shuffles(3, NUM_LAYERS, rank.world_size, ROWS_PER_RANK)
    model = Model(rank.rank, ROWS_PER_RANK, [ROW_NBYTES] * NUM_LAYERS)
    model.fill(maps[0])
    trace = ChromeTrace(rank.rank)
    config = eplb.EPLBConfig(communicator=backend, use_async=False)
    with eplb.Communicator(config, model.weights, rank.control(), rank.device_group(), observers=[trace]) as comm:
        for old, new in pairwise(maps):
            comm.rearrange(old, new)
    return str(trace.write(folder))


def main() -> None:
    """Run the ranks and merge what they wrote."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3, help="processes on this machine")
    parser.add_argument("--folder", type=Path, default=Path("traces"), help="where the traces go")
    parser.add_argument("--backend", help="backend that moves the weights; the best usable one by default")
    options = parser.parse_args()
    if options.ranks < 1:
        parser.error("--ranks must be 1 or more")
    try:  # what is wrong with the backend is said once, here, and not by every rank
        eplb.select(eplb.EPLBConfig(communicator=options.backend, use_async=False), device_type="cpu")
    except eplb.EplbError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    options.folder.mkdir(parents=True, exist_ok=True)
    paths = run_ranks(options.ranks, serve, options.backend, str(options.folder), timeout_s=120)
    merged = merge_traces(paths, options.folder / "all-ranks.trace.json")
    print("\n".join([*paths, str(merged)]))


if __name__ == "__main__":
    main()
