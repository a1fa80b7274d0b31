"""Flip one byte of one row that has just landed on one rank, and see that no rank commits the layer.

python catch_a_flipped_byte.py --layer 2
"""

from __future__ import annotations

import argparse
import sys

import eplb_core as eplb
from eplb_core.errors import TransferError
from eplb_core.observers import Checksums, Observer
from eplb_core.testing.faults import FaultInjector
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks

NUM_LAYERS, ROWS_PER_RANK = 4, 6
NAMES, ROW_NBYTES = ["w13", "w2", "scale"], [64 << 10, 32 << 10, 4]
FAULTY = 1


def serve(rank: Rank, backend: str | None, layer: int) -> list[str]:
    """Be one rank; return what there is to say."""
    old, new = shuffles(2, NUM_LAYERS, rank.world_size, ROWS_PER_RANK)
    model = Model(rank.rank, ROWS_PER_RANK, [ROW_NBYTES] * NUM_LAYERS)
    model.fill(old)
    observers: list[Observer] = [Checksums(NAMES)]  # on every rank
    if rank.rank == FAULTY:
        observers.insert(0, FaultInjector("landed", "corrupt", layer=layer, landed_row=2))
    config = eplb.EPLBConfig(communicator=backend, use_async=False, timeout_s=30)
    given = {"tensor_names": NAMES, "observers": observers, "device_group": rank.device_group()}
    with eplb.Communicator(config, model.weights, rank.control(), **given) as comm:
        said = []
        try:
            comm.rearrange(old, new)
            held = new
        except TransferError as error:
            if error.report is None:
                raise
            held = error.report.physical_to_logical_map
            said = [str(error), f"committed before it: layers {list(error.report.committed_layers)}"]
        said.append(f"rows that hold wrong bytes: {len(model.wrong_rows(held))}")
        # Some backends cannot call off the layers behind the faulty one.
        report = comm.rebuild(30, device_group=rank.device_group(topic="rebuilt"))
        held = report.physical_to_logical_map
        comm.rearrange(held, new)  # the injector acts once
        said.append(f"after another try: {len(model.wrong_rows(new))}")
    return said


def main() -> None:
    """Run the ranks; all of them say the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3, help="processes on this machine, at least 2")
    parser.add_argument("--layer", type=int, default=2, help=f"where the byte is flipped, below {NUM_LAYERS}")
    parser.add_argument("--backend", help="backend that moves the weights; the best usable one by default")
    options = parser.parse_args()
    if options.ranks < 2 or not 0 <= options.layer < NUM_LAYERS:
        parser.error(f"--ranks must be 2 or more, --layer one of 0 to {NUM_LAYERS - 1}")
    try:  # what is wrong with the backend is said once, here, and not by every rank
        eplb.select(eplb.EPLBConfig(communicator=options.backend, use_async=False), device_type="cpu")
    except eplb.EplbError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    for rank, said in enumerate(run_ranks(options.ranks, serve, options.backend, options.layer, timeout_s=120)):
        print(f"rank {rank}:", *said, sep="\n  ")


if __name__ == "__main__":
    main()
