"""The rank that hosts the store dies and takes experts with it; the others serve on over a new store, with all experts.

python lost_store.py --ranks 3
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import eplb_core as eplb
from eplb_core.balancing import rebalance_experts
from eplb_core.errors import PeerLostError, StoreLostError
from eplb_core.sources import HostMemorySource

NUM_LAYERS, NUM_EXPERTS, NUM_LOCAL, NUM_ELEMENTS = 4, 8, 6, 1000
IntArray = npt.NDArray[np.int64]


def expert(number: int) -> torch.Tensor:
    """Return the weights of an expert, which are its number."""
    return torch.full((NUM_ELEMENTS,), float(number))


def serve(rank: int, ranks: int, backend: str, folder: str) -> None:
    """Rearrange; rank 0 dies in between, and the others go on without it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    placement = np.tile(np.arange(ranks * NUM_LOCAL) % NUM_EXPERTS, (NUM_LAYERS, 1))
    placement[:, placement[0] == 5] = 4
    placement[:, 3] = 5  # expert 5 is on rank 0 alone
    mine = slice(rank * NUM_LOCAL, (rank + 1) * NUM_LOCAL)
    weights = [[torch.stack([expert(number) for number in row[mine]])] for row in placement]
    everything = {(layer, number): [expert(number)] for layer in range(NUM_LAYERS) for number in range(NUM_EXPERTS)}

    # standby=True: every rank keeps a port, and all know which; so a new store needs nobody to be asked.
    control = eplb.ControlPlane.from_process_group(dist.group.WORLD, standby=True)
    config = eplb.EPLBConfig(communicator=backend, use_async=False, timeout_s=10)
    comm = eplb.Communicator(config, weights, control, sources=[HostMemorySource(everything)])
    try:
        comm.rearrange(placement, placement)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            comm.rearrange(placement, placement)
    except (PeerLostError, StoreLostError) as error:
        started = time.perf_counter()
        print(f"rank {rank}: {error.code}", flush=True)

    # Who is left is for the host to say: here everyone but rank 0. The lowest of them hosts the new store.
    survivors = list(range(1, ranks))
    control = control.renewed(survivors, timeout_s=10)
    held = comm.rebuild(10, control=control, ranks=survivors).physical_to_logical_map
    active = np.isin(np.arange(ranks), survivors)
    load = np.ones((NUM_LAYERS, NUM_EXPERTS))
    wanted = rebalance_experts(load, held.shape[1], num_ranks=ranks, active=active)
    report = comm.rearrange(held, wanted, missing="report")
    seconds = time.perf_counter() - started
    right = all(
        torch.equal(weights[layer][0][row], expert(int(number)))
        for layer, numbers in enumerate(report.physical_to_logical_map[:, mine])
        for row, number in enumerate(numbers)
    )
    print(
        f"rank {rank}: {'right' if right else 'WRONG'} bytes, {len(report.unmet)} experts unmet, "
        f"{report.nbytes_supplied} bytes from the source, {seconds:.2f} s after it knew",
        flush=True,
    )
    comm.close()
    os._exit(0 if right else 1)  # the default process group waits for rank 0


def main() -> int:
    """Run it in as many processes as there are ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--backend", default="torch_gloo")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=serve, args=(rank, given.ranks, given.backend, folder))
            for rank in range(given.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        codes = [process.exitcode for process in processes]
    print(f"exit codes {codes}")
    return 0 if codes[0] == -signal.SIGKILL and not any(codes[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
