"""The smallest host: ranks serve a Mixture-of-Experts model, and its experts change places between forward steps.

    python minimal_host.py --ranks 4

What a host does for eplb-core is in `serve`; all above it is the model that is served.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812 - its usual name

import eplb_core as eplb
from eplb_core.balancing import balancedness, rebalance_experts

IntArray = npt.NDArray[np.int64]

NUM_LAYERS = 3
NUM_EXPERTS = 32
TOP_K = 4
HIDDEN = 128
LENGTH: float = HIDDEN**0.5  # of a token's vector, so that its elements are about 1
INTERMEDIATE = 64
TOKENS = 48  # of each rank in a forward step


class MoeModel:
    """One rank's part of a stack of MoE layers under expert parallelism.

    Every rank has tokens of its own and the whole router; the physical experts are spread over the ranks. A token
    travels to the ranks that hold the experts it is routed to, and its results travel back.
    """

    def __init__(self, placement: IntArray, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.num_slots = placement.shape[1]
        self.num_local = self.num_slots // world_size
        mine = placement[:, rank * self.num_local : (rank + 1) * self.num_local]
        self.routers = [_drawn((NUM_EXPERTS, HIDDEN), layer) for layer in range(NUM_LAYERS)]
        # As engines hold them: one tensor a layer for gate and up, one for down, first axis the local physical expert.
        self.w13 = [
            torch.stack([_drawn((2 * INTERMEDIATE, HIDDEN), layer, 13, int(expert)) for expert in mine[layer]])
            for layer in range(NUM_LAYERS)
        ]
        self.w2 = [
            torch.stack([_drawn((HIDDEN, INTERMEDIATE), layer, 2, int(expert)) for expert in mine[layer]])
            for layer in range(NUM_LAYERS)
        ]
        self.tokens_per_slot = torch.zeros(NUM_LAYERS, self.num_slots, dtype=torch.int64)
        self.place(placement)

    def place(self, placement: IntArray) -> None:
        """Route by this ``physical_to_logical_map`` from now on, and start counting anew."""
        self.placement = placement
        self.slots_of = [
            [torch.from_numpy(np.flatnonzero(row == expert)) for expert in range(NUM_EXPERTS)] for row in placement
        ]
        self.tokens_per_slot.zero_()

    def forward(self, x: torch.Tensor, count: bool = True) -> torch.Tensor:
        """Serve this rank's tokens, [tokens, HIDDEN]; a collective, which every rank must call."""
        for layer in range(NUM_LAYERS):
            x = x + self._moe(layer, F.rms_norm(x, (HIDDEN,)), count)
        return x

    def _moe(self, layer: int, x: torch.Tensor, count: bool) -> torch.Tensor:
        gates, experts = (x @ self.routers[layer].T).softmax(dim=1).topk(TOP_K, dim=1)
        slots = self._pick_slots(layer, experts).reshape(-1)
        if count:
            self.tokens_per_slot[layer] += torch.bincount(slots, minlength=self.num_slots)
        # Dispatch: rows sorted by slot lie together by rank, which is what an all-to-all sends.
        order = slots.argsort(stable=True)
        num_sent = torch.bincount(slots // self.num_local, minlength=self.world_size)
        num_received = torch.empty_like(num_sent)
        dist.all_to_all_single(num_received, num_sent)
        sent, received = num_sent.tolist(), num_received.tolist()
        rows = _exchange(x.repeat_interleave(TOP_K, dim=0)[order], received, sent)
        local = _exchange(slots[order], received, sent) - self.rank * self.num_local
        # Token by token: a batched product may add up in another order when another token joins an expert's batch,
        # and then outputs would only be nearly equal before and after.
        done = torch.empty_like(rows)
        for i, slot in enumerate(local.tolist()):
            gate, up = (self.w13[layer][slot] @ rows[i]).chunk(2)
            done[i] = self.w2[layer][slot] @ (F.silu(gate) * up)
        # Combine: back to where they came from, into the tokens' own order.
        results = torch.empty(len(slots), HIDDEN)
        results[order] = _exchange(done, sent, received)
        return (gates[:, :, None] * results.view(len(x), TOP_K, HIDDEN)).sum(dim=1)

    def _pick_slots(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        """Choose a replica for each (token, expert): tokens take turns."""
        picked = [
            [self.slots_of[layer][expert][token % len(self.slots_of[layer][expert])] for expert in chosen]
            for token, chosen in enumerate(experts.tolist())
        ]
        return torch.tensor(picked)


def serve(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    """Run one rank of the host engine."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.ranks)
    say = print if rank == 0 else lambda *_: None

    # 1. What may move the weights here? A host chooses once, at start-up, and logs why.
    config = eplb.EPLBConfig(
        communicator=options.backend,
        use_async=False,
        step_interval=options.interval,
        num_redundant_experts=options.ranks,
        timeout_s=30,
    )
    choice = eplb.select(config, device_type="cpu", catalog=eplb.discover())
    say(f"backend {choice.name}: {choice.reasons[choice.name]}")

    # 2. The model as it is loaded: experts in order, the redundant ones from the first on.
    num_slots = NUM_EXPERTS + config.num_redundant_experts
    placement = np.tile(np.arange(num_slots) % NUM_EXPERTS, (NUM_LAYERS, 1))
    model = MoeModel(placement, rank, options.ranks)

    # 3. The communicator registers the live tensors; from here on their memory stays where it is.
    control = eplb.ControlPlane.from_process_group(dist.group.WORLD)
    weights = [[w13, w2] for w13, w2 in zip(model.w13, model.w2, strict=True)]
    # The group of the weights' device, for backends that move weights over the host's own.
    with eplb.Communicator(config, weights, control, dist.group.WORLD, tensor_names=["w13", "w2"]) as comm:
        canary = _drawn((TOKENS, HIDDEN), 1000 + rank) * LENGTH
        for step in range(1, options.steps + 1):
            model.forward(_traffic(step // config.step_interval, step, rank))
            if step % config.step_interval:
                continue

            # 4. Between two steps: count, place anew, move. All ranks reach this line at the same step.
            load = _tokens_per_expert(model)
            wanted = rebalance_experts(load, num_slots, num_ranks=options.ranks)
            expected = model.forward(canary, count=False)
            even_before = balancedness(load, model.placement, options.ranks).mean()
            report = comm.rearrange(model.placement, wanted)
            model.place(report.physical_to_logical_map)
            even_after = balancedness(load, model.placement, options.ranks).mean()

            # 5. The model is the same function of its tokens as before, to the last bit.
            difference = (model.forward(canary, count=False) - expected).abs().max().item()
            if difference:
                raise RuntimeError(f"rank {rank}, step {step}: outputs changed by {difference:g}")
            say(
                f"step {step}: moved {len(report.committed_layers)} layers in {report.seconds:.3f} s, "
                f"balancedness {even_before:.3f} -> {even_after:.3f}, outputs equal bit for bit"
            )
    dist.destroy_process_group()


def _tokens_per_expert(model: MoeModel) -> IntArray:
    """Sum what all ranks counted, and the replicas of an expert: [NUM_LAYERS, NUM_EXPERTS]."""
    dist.all_reduce(model.tokens_per_slot)
    load = torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.int64)
    load.scatter_add_(1, torch.from_numpy(model.placement), model.tokens_per_slot)
    tokens: IntArray = load.numpy()
    return tokens


def _exchange(rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
    """Send each rank its part of the rows and return what the others sent."""
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows, received, sent)
    return arrived


def _traffic(topic: int, step: int, rank: int) -> torch.Tensor:
    """Draw tokens that are about something: half of them are near one direction, which changes with the topic."""
    tokens = _drawn((TOKENS, HIDDEN), 2000 + step, rank) * LENGTH
    tokens[::2] += 2 * _drawn((1, HIDDEN), 3000 + topic) * LENGTH
    return tokens


def _drawn(shape: tuple[int, ...], *seed: int) -> torch.Tensor:
    """Return float32 values of unit rows that depend on the seed alone, the same on every rank."""
    values = np.random.default_rng(seed).standard_normal(shape) / shape[-1] ** 0.5
    tensor: torch.Tensor = torch.from_numpy(values.astype(np.float32))
    return tensor


def main() -> None:
    """Start the ranks, or be one of those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks",
        type=int,
        default=4,
        help=f"processes on this machine, a divisor of {NUM_EXPERTS}",
    )
    parser.add_argument("--steps", type=int, default=12, help="forward steps")
    parser.add_argument("--interval", type=int, default=4, help="forward steps from one rearrangement to the next")
    parser.add_argument("--backend", help="backend; by default the best usable one")
    options = parser.parse_args()
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if under_torchrun:
        options.ranks = int(os.environ["WORLD_SIZE"])
    if options.ranks < 1 or NUM_EXPERTS % options.ranks:
        parser.error(f"--ranks must divide the {NUM_EXPERTS} experts")
    if options.steps < 1 or options.interval < 1:
        parser.error("--steps and --interval must be 1 or more")
    try:  # what is wrong with the backend is said once, here, and not by every rank
        eplb.select(eplb.EPLBConfig(communicator=options.backend, use_async=False), device_type="cpu")
    except eplb.EplbError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if under_torchrun:
        serve(int(os.environ["RANK"]), options, "env://")
        return
    # gloo would look up the host's own name, and containers often cannot.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        mp.spawn(serve, (options, rendezvous), nprocs=options.ranks)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
