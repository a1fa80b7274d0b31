"""Count what a communicator does, and show it as JSON or as Prometheus would scrape it.

python export_stats.py
python export_stats.py --prometheus        # needs eplb-core[prometheus]
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise

import eplb_core as eplb
from eplb_core.observers import Stats
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks

NUM_LAYERS, ROWS_PER_RANK, ROW_NBYTES = 4, 6, [64 << 10, 4]


def serve(rank: Rank, backend: str | None, prometheus: bool) -> str:
    """Be one rank; return its counts."""
    maps = shuffles(4, NUM_LAYERS, rank.world_size, ROWS_PER_RANK)
    model = Model(rank.rank, ROWS_PER_RANK, [ROW_NBYTES] * NUM_LAYERS)
    model.fill(maps[0])
    stats = Stats()
    config = eplb.EPLBConfig(communicator=backend, use_async=False)
    with eplb.Communicator(
        config, model.weights, rank.control(), rank.device_group(), observers=[stats], name="main"
    ) as comm:
        for old, new in pairwise(maps):
            comm.rearrange(old, new)
    if not prometheus:
        return json.dumps(stats.as_dict(), indent=2)
    from prometheus_client import CollectorRegistry, generate_latest

    from eplb_core.observers.prometheus import StatsCollector

    registry = CollectorRegistry()  # a host has one, and serves it with prometheus_client.start_http_server
    registry.register(StatsCollector({"main": stats}))
    return generate_latest(registry).decode()


def main() -> None:
    """Run the ranks and print what rank 0 counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--prometheus", action="store_true", help="as text for Prometheus")
    parser.add_argument("--backend", help="backend that moves the weights; the best usable one by default")
    options = parser.parse_args()
    if options.ranks < 1:
        parser.error("--ranks must be 1 or more")
    try:  # what is wrong with the backend is said once, here, and not by every rank
        eplb.select(eplb.EPLBConfig(communicator=options.backend, use_async=False), device_type="cpu")
    except eplb.EplbError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(run_ranks(options.ranks, serve, options.backend, options.prometheus, timeout_s=120)[0])


if __name__ == "__main__":
    main()
