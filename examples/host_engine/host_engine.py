"""A real model served while its experts change places: a Qwen3-MoE of transformers under expert parallelism.

    python host_engine.py --ranks 4

What a host does for eplb-core is in `serve_rank`, in `Engine.place`, and in the loop of `serving.serve`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

import eplb_core as eplb
from checkpoint import write_checkpoint
from engine import TENSOR_NAMES, Engine
from experts import rows_of_a_block
from figures import figures_of, lines
from serving import gathered, serve
from traffic import STEPS_OF_A_BATCH, Traffic

REDUNDANT_OF_A_RANK = 2
INTERVALS_OF_A_TOPIC = 2


def serve_rank(rank: int, options: argparse.Namespace, folder: Path, rendezvous: str) -> None:
    """Run one rank of the engine: rounds with the experts where they are, and rounds while they move."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.ranks)
    say = print if rank == 0 else lambda *_: None

    # 1. The model, loaded as usual; `engine.map` says which expert every slot of the ranks holds.
    config = config_of(options)
    batches_of_a_topic = max(1, INTERVALS_OF_A_TOPIC * options.interval // STEPS_OF_A_BATCH)
    traffic = Traffic(rank, options.ranks, batches_of_a_topic)
    engine = Engine(folder, traffic, options.steps, config.num_redundant_experts, dist.group.WORLD)
    say(described(engine))
    choice = eplb.select(config, device_type="cpu")
    say(f"backend {choice.name}: {choice.reasons[choice.name]}")

    still, moving = [], []
    control = eplb.ControlPlane.from_process_group(dist.group.WORLD)
    for number in range(options.rounds):
        still.append(gathered(serve(engine, options.steps, None), dist.group.WORLD))
        # 2. The communicator registers the live tensors: from here on their memory stays where it is.
        # 3. The load balancer is told of every step, moves experts, and says when they have moved.
        with (
            eplb.Communicator(
                config, engine.weights, control, dist.group.WORLD, tensor_names=TENSOR_NAMES, name=f"round {number}"
            ) as communicator,
            eplb.LoadBalancer(
                config, communicator, engine.map, engine.model.config.num_experts, on_commit=engine.place
            ) as balancer,
        ):
            moving.append(gathered(serve(engine, options.steps, balancer), dist.group.WORLD))
    for line in lines(figures_of(still), figures_of(moving)):
        say(line)
    say(f"all {options.ranks} ranks: logits equal to the bit in every step, experts to the byte after every round")
    dist.destroy_process_group()


def config_of(options: argparse.Namespace) -> eplb.EPLBConfig:
    """Return what these options ask for."""
    return eplb.EPLBConfig(
        communicator=options.backend,
        use_async=not options.synchronous,
        window_size=options.interval,
        step_interval=options.interval,
        num_redundant_experts=REDUNDANT_OF_A_RANK * options.ranks,
        timeout_s=60,
    )


def described(engine: Engine) -> str:
    """Say which model is served and what its logits are compared with, on all ranks; collective."""
    config, layer = engine.model.config, engine.experts[0]
    rows = rows_of_a_block(config.hidden_size, config.moe_intermediate_size, layer.down_proj.dtype, layer.activation)
    changed = torch.tensor([not engine.reference.of_transformers, engine.reference.difference], dtype=torch.float64)
    dist.all_reduce(changed, dist.ReduceOp.MAX)
    way = f"with experts' products in blocks of {rows}, within {changed[1]:.1g} of it as it comes"
    if not changed[0]:
        way = "as it comes"
    return (
        f"Qwen3-MoE, {config.num_hidden_layers} layers, {config.num_experts} experts and "
        f"{engine.map.shape[1] - config.num_experts} redundant ones of {engine.nbytes_of_an_expert / 1e6:.1f} MB "
        f"({config.num_experts_per_tok} for each token) on {layer.world_size} ranks\n"
        f"reference: the logits of transformers {transformers.__version__} {way}"
    )


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes on this machine, a divisor of 32 experts")
    parser.add_argument("--steps", type=int, default=288, help="forward steps of a round")
    parser.add_argument("--rounds", type=int, default=2, help="rounds without rearrangement, and as many with it")
    parser.add_argument("--interval", type=int, default=64, help="forward steps from one rearrangement to the next")
    parser.add_argument("--layers", type=int, default=4, help="MoE layers of the model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the weights")
    parser.add_argument("--backend", help="backend; by default the best usable one")
    parser.add_argument(
        "--synchronous", action="store_true", help="rearrange between two forward steps, while none is served"
    )
    options = parser.parse_args()
    if options.ranks < 1 or 32 % options.ranks:
        parser.error("--ranks must divide the 32 experts")
    if min(options.steps, options.rounds, options.interval, options.layers) < 1:
        parser.error("--steps, --rounds, --interval and --layers must be 1 or more")
    try:  # what is wrong with the backend is said once, here, and not by every rank
        eplb.select(config_of(options), device_type="cpu")
    except eplb.EplbError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    # gloo would look up the host's own name, and containers often cannot.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_checkpoint(folder / "checkpoint", options.layers, getattr(torch, options.dtype))
        rendezvous = (folder / "rendezvous").as_uri()
        mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
            serve_rank, (options, folder / "checkpoint", rendezvous), nprocs=options.ranks
        )


if __name__ == "__main__":
    main()
