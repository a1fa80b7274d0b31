"""The workload of the demo: the experts of a published geometry or of a checkpoint, over a number of ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.bench.memory import available_nbytes
from eplb_core.bench.presets import DEFAULT_PRESET, fitting_scale, preset, scaled, tensor_specs
from eplb_core.bench.tensors import ExpertSource, GeneratedExperts
from eplb_core.errors import BenchError
from eplb_core.sources.checkpoint_files import CheckpointExperts

IntArray = npt.NDArray[np.int64]

BUDGET_NBYTES = 5 << 29
"""Most bytes of the logical experts of all layers, unless the user sets layers and scale."""

_DEFAULT_LAYERS = 8
_LANDING_LAYERS = 2
_RANK_NBYTES = 350 << 20  # an interpreter with torch imported, measured


@dataclass(frozen=True)
class WorkloadOptions:
    """Options that a user gave; equal on all ranks, JSON-able.

    Parameters
    ----------
    preset : str
        Name of a published geometry; unused with a checkpoint.
    checkpoint : str or None
        Folder with safetensors.
    num_layers, scale, num_redundant_experts : int or None
        None leaves the choice to `build_workload`.
    seed : int
        Seed of the generated contents and of the load.
    """

    preset: str = DEFAULT_PRESET
    checkpoint: str | None = None
    num_layers: int | None = None
    scale: int | None = None
    num_redundant_experts: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Workload:
    """Sizes, and the source of the right bytes; equal on all ranks.

    Parameters
    ----------
    source : ExpertSource
        Contents of the experts.
    title, origin : str
        Name of the model, and where its sizes or bytes come from.
    scale : int
        Divisor of both widths.
    num_layers, num_layers_found : int
        MoE layers taken, and layers that the model has.
    top_k : int
        Experts a token is sent to.
    num_redundant_experts : int
        Physical experts beyond one for each logical expert.
    world_size : int
        Number of ranks.
    """

    source: ExpertSource
    title: str
    origin: str
    scale: int
    num_layers: int
    num_layers_found: int
    top_k: int
    num_redundant_experts: int
    world_size: int

    @property
    def num_physical_experts(self) -> int:
        """Slots of a layer over all ranks."""
        return self.source.num_experts + self.num_redundant_experts

    @property
    def num_local_physical_experts(self) -> int:
        """Slots of a layer on each rank."""
        return self.num_physical_experts // self.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of weights over all ranks."""
        return self.num_physical_experts * sum(spec.nbytes for layer in self.source.specs for spec in layer)

    def initial_map(self) -> IntArray:
        """Return the placement that engines start with: experts in order, then the redundant ones from expert 0 on."""
        slots = np.arange(self.num_physical_experts, dtype=np.int64) % self.source.num_experts
        return np.tile(slots, (self.num_layers, 1))

    def describe(self) -> dict[str, Any]:
        """Describe it for people and programs; JSON-able."""
        first = self.source.specs[0]
        return {
            "model": self.title,
            "origin": self.origin,
            "scale": self.scale,
            "num_layers": self.num_layers,
            "num_layers_found": self.num_layers_found,
            "num_experts": self.source.num_experts,
            "num_redundant_experts": self.num_redundant_experts,
            "top_k": self.top_k,
            "world_size": self.world_size,
            "tensors": [{**asdict(spec), "shape": list(spec.shape)} for spec in first],
            "nbytes_per_expert": sum(spec.nbytes for spec in first),
            "nbytes": self.nbytes,
        }


def build_workload(options: WorkloadOptions, world_size: int) -> Workload:
    """Check the options and settle all sizes.

    Parameters
    ----------
    options : WorkloadOptions
        As the user gave them.
    world_size : int
        Number of ranks.

    Returns
    -------
    Workload
        With `BUDGET_NBYTES` of experts at most where layers and scale were left open.

    Raises
    ------
    BenchError
        EPLB-B003 when the numbers do not fit together, EPLB-B004 and B005 for a checkpoint that cannot be read.
    """
    if options.checkpoint is not None:
        return _of_checkpoint(options, options.checkpoint, world_size)
    geometry = preset(options.preset)
    found = geometry.num_moe_layers
    num_layers = min(_DEFAULT_LAYERS, found) if options.num_layers is None else options.num_layers
    if not 1 <= num_layers <= found:
        raise BenchError("EPLB-B003", f"{num_layers} layers asked for; {geometry.name} has {found} MoE layers")
    scale = fitting_scale(geometry, num_layers, BUDGET_NBYTES) if options.scale is None else options.scale
    specs = [tensor_specs(scaled(geometry, scale))] * num_layers
    return Workload(
        source=GeneratedExperts(specs, geometry.num_experts, options.seed),
        title=geometry.name,
        origin=geometry.source,
        scale=scale,
        num_layers=num_layers,
        num_layers_found=found,
        top_k=geometry.top_k,
        num_redundant_experts=_num_redundant(options.num_redundant_experts, geometry.num_experts, world_size),
        world_size=world_size,
    )


def check_memory(workload: Workload) -> None:
    """Refuse a workload that does not fit into the memory of this host, where all its ranks run.

    Parameters
    ----------
    workload : Workload
        The workload of all ranks.

    Raises
    ------
    BenchError
        EPLB-B003; it names the memory available and options that make the workload smaller.
    """
    available = available_nbytes()
    landing = _LANDING_LAYERS * workload.nbytes // workload.num_layers
    weights, processes = workload.nbytes + landing, workload.world_size * _RANK_NBYTES
    if available is None or weights + processes <= available:
        return
    remedy = (
        "fewer --layers" if isinstance(workload.source, CheckpointExperts) else "fewer --layers or a larger --scale"
    )
    if processes > weights:
        remedy = "fewer --ranks"
    elif processes > available:
        remedy = f"fewer --ranks, and {remedy}"
    layers = f"{workload.num_layers} layer{'s' * (workload.num_layers != 1)} of {workload.title}"
    ranks = f"{workload.world_size} rank{'s' * (workload.world_size != 1)}"
    raise BenchError(
        "EPLB-B003",
        f"{layers} on {ranks} would take {(weights + processes) / 1e9:.1f} GB, {processes / 1e9:.1f} GB of it for the "
        f"processes themselves, and {available / 1e9:.1f} GB are available; use {remedy}",
    )


def _of_checkpoint(options: WorkloadOptions, folder: str, world_size: int) -> Workload:
    if options.scale is not None:
        raise BenchError("EPLB-B003", "a checkpoint's tensors are as large as they are: --scale is for presets")
    experts = CheckpointExperts(folder, options.num_layers, BUDGET_NBYTES)
    return Workload(
        source=experts,
        title=experts.title,
        origin=folder,
        scale=1,
        num_layers=len(experts.specs),
        num_layers_found=experts.num_layers_found,
        top_k=experts.top_k,
        num_redundant_experts=_num_redundant(options.num_redundant_experts, experts.num_experts, world_size),
        world_size=world_size,
    )


def _num_redundant(asked: int | None, num_experts: int, world_size: int) -> int:
    """Return the number asked for, or one per rank and as many more as spread the slots evenly over the ranks."""
    if asked is None:
        return world_size + -num_experts % world_size
    lacking = -(num_experts + asked) % world_size
    if asked < 0 or lacking:
        fitting = asked + lacking if asked >= 0 else -num_experts % world_size
        raise BenchError(
            "EPLB-B003",
            f"{num_experts} experts and {asked} redundant ones do not spread evenly over {world_size} ranks; "
            f"--redundant {fitting} does",
        )
    return asked
