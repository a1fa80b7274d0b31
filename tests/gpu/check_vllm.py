"""What eplb-vllm promises about streams, on one GPU and without vLLM: two ranks, a worker thread, a captured graph.

As in vLLM, the engine's thread has a stream of its own that nothing orders with the default one; it captures a CUDA
graph that reads every live row, and replays it between commits. The worker waits for an event of the engine's before it
begins. Right before that event the engine rewrites all weights, behind a kernel that takes long: rows that are read too
early are old ones. With ``--device cpu`` the same steps run on host memory, without streams: a rehearsal.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
from contextlib import nullcontext
from typing import Any

LAYERS, LOCAL, COLUMNS, CYCLES = 3, 8, 1 << 16, 3
SPIN = 200_000_000
"""GPU clock cycles of the long kernel: about 0.1 s."""


def serve(rank: Any, device: str, communicator: str) -> dict[str, Any]:
    """Serve on one rank; return what the graph saw wrong, and how many commits it ran across."""
    import numpy as np
    import torch

    import eplb_core as eplb
    from eplb_vllm.mover import Mover

    cuda = device == "cuda"
    mine = slice(rank.rank * LOCAL, (rank.rank + 1) * LOCAL)
    generator = np.random.default_rng(5)
    slots = rank.world_size * LOCAL
    maps = [np.stack([generator.permutation(slots) for _ in range(LAYERS)]) for _ in range(CYCLES + 1)]
    weights = [[torch.zeros(LOCAL, COLUMNS, device=device)] for _ in range(LAYERS)]
    buffer = [torch.zeros_like(weights[0][0])]
    config = eplb.EPLBConfig(communicator=communicator, timeout_s=20, staging_layers=1)
    landing = [buffer] if communicator == "nixl" else None
    comm = eplb.Communicator(config, weights, rank.control(), landing=landing)
    mover = Mover(comm, weights)

    engine_stream = torch.cuda.Stream() if cuda else None
    worker_stream = torch.cuda.Stream() if cuda else None
    seen = torch.zeros(LAYERS, LOCAL, device=device)

    def on(stream: Any) -> Any:
        return torch.cuda.stream(stream) if cuda else nullcontext()

    def forward() -> None:
        for layer, (weight,) in enumerate(weights):
            seen[layer] = weight.amax(dim=1) + weight.amin(dim=1)  # a torn row shows as well

    replay = forward
    if cuda:
        with on(engine_stream):
            forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=engine_stream):
            forward()
        replay = graph.replay

    ask: queue.Queue[Any] = queue.Queue()
    staged: queue.Queue[Any] = queue.Queue()
    consumed = threading.Semaphore(0)

    def worker() -> None:
        while (job := ask.get()) is not None:
            old, new, event = job
            with on(worker_stream):
                if cuda:
                    worker_stream.wait_event(event)
                mover.begin(old, new)
                for layer in range(LAYERS):
                    staged.put(mover.stage(layer, old[layer], new[layer], weights[layer]))
                    consumed.acquire(timeout=60)

    thread = threading.Thread(target=worker)
    thread.start()
    wrong, commits = 0, 0
    holds = maps[0].copy()
    try:
        with on(engine_stream):
            for cycle in range(CYCLES):
                value = cycle * 1000
                if cuda:
                    torch.cuda._sleep(SPIN)
                for layer, (weight,) in enumerate(weights):  # the host reloads its weights, on its own stream
                    column = torch.from_numpy(holds[layer, mine] + value + layer * 100).float()
                    weight.copy_(column[:, None].to(device).expand_as(weight))
                event = torch.cuda.Event() if cuda else None
                if cuda:
                    event.record(engine_stream)
                ask.put((holds.copy(), maps[cycle + 1], event))
                for layer in range(LAYERS):
                    transfer = staged.get(timeout=60)
                    if transfer.error is not None:
                        raise transfer.error
                    replay()  # enqueued before the copies of the commit, so it sees the old rows
                    before = seen.clone()
                    transfer.commit()
                    replay()
                    after = seen.clone()
                    consumed.release()
                    commits += 1
                    wrong += differing(before, holds, mine, value)
                    holds[layer] = maps[cycle + 1][layer]
                    wrong += differing(after, holds, mine, value)
    finally:
        ask.put(None)
        consumed.release(LAYERS)
        thread.join(60)
    comm.close()
    return {"wrong": wrong, "commits": commits, "graph": cuda}


def differing(seen: Any, holds: Any, mine: slice, value: int) -> int:
    """Count rows that were not seen as a map says."""
    import torch

    layers = torch.arange(LAYERS)[:, None] * 100
    expected = 2.0 * (torch.from_numpy(holds[:, mine]) + value + layers)
    return int((seen.cpu() != expected).sum())


def main(arguments: list[str] | None = None) -> int:
    """Run both backends that are there; 0 where every row was seen as it should be."""
    from importlib.util import find_spec

    from eplb_core.testing.ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    given = parser.parse_args(arguments)
    failed = False
    for communicator in ("torch_gloo", "nixl"):
        if find_spec("nixl") is None and communicator == "nixl":
            print("eplb-vllm, nixl        left out: NIXL is not installed")
            continue
        ranks = run_ranks(2, serve, given.device, communicator, timeout_s=120)
        wrong, commits = sum(rank["wrong"] for rank in ranks), ranks[0]["commits"]
        failed |= bool(wrong) or commits != LAYERS * CYCLES
        replayed = "a CUDA graph replayed across them" if given.device == "cuda" else "without streams"
        verdict = "FAILED" if wrong else "ok"
        print(f"eplb-vllm, {communicator:11} {verdict}  {commits} commits, {replayed}, {wrong} wrong rows", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
