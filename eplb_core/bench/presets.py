"""Published MoE geometries: the sizes of real architectures' expert weights, whole or scaled down.

The figures are those of each model's ``config.json`` as published under the repository named in `source`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import ceil

from eplb_core.errors import BenchError
from eplb_core.sources.specs import TensorSpec


@dataclass(frozen=True)
class MoeGeometry:
    """Sizes of a model's MoE layers.

    Parameters
    ----------
    name : str
        Preset name.
    source : str
        Repository whose ``config.json`` holds the figures.
    hidden_size : int
        Width of the residual stream.
    moe_intermediate_size : int
        Width of one expert.
    num_experts : int
        Routed (logical) experts of a layer; shared experts do not move and are left out.
    num_moe_layers : int
        Layers that have routed experts.
    top_k : int
        Experts a token is sent to.
    dtype : str
        Name of the weights' torch dtype.
    scale_block : tuple of int or None
        Rows and columns of the weight that one float32 scale covers, for block-scaled fp8.
    """

    name: str
    source: str
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_moe_layers: int
    top_k: int
    dtype: str = "bfloat16"
    scale_block: tuple[int, int] | None = None

    @property
    def nbytes_per_layer(self) -> int:
        """Bytes of all logical experts of one layer."""
        return self.num_experts * sum(spec.nbytes for spec in tensor_specs(self))


_FP8 = "float8_e4m3fn"

PRESETS: dict[str, MoeGeometry] = {
    geometry.name: geometry
    for geometry in (
        MoeGeometry("olmoe-1b-7b", "allenai/OLMoE-1B-7B-0924", 2048, 1024, 64, 16, 8),
        MoeGeometry("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 4096, 14336, 8, 32, 2),
        MoeGeometry("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 2048, 768, 128, 48, 8),
        MoeGeometry("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 4096, 1536, 128, 94, 8),
        MoeGeometry("qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct", 2048, 512, 512, 48, 10),
        MoeGeometry("glm-4.5", "zai-org/GLM-4.5", 5120, 1536, 160, 89, 8),  # 92 layers, the first 3 dense
        MoeGeometry("deepseek-v3", "deepseek-ai/DeepSeek-V3", 7168, 2048, 256, 58, 8, _FP8, (128, 128)),  # 61, 3 dense
        MoeGeometry("kimi-k2", "moonshotai/Kimi-K2-Instruct", 7168, 2048, 384, 60, 8, _FP8, (128, 128)),  # 61, 1 dense
    )
}

DEFAULT_PRESET = "qwen3-30b-a3b"


def preset(name: str) -> MoeGeometry:
    """Return a preset by name, whatever the case.

    Parameters
    ----------
    name : str
        Such as ``"Qwen3-30B-A3B"``.

    Returns
    -------
    MoeGeometry
        The published geometry.

    Raises
    ------
    BenchError
        EPLB-B003, with the names that come close.
    """
    geometry = PRESETS.get(name.strip().lower())
    if geometry is None:
        close = get_close_matches(name.strip().lower(), PRESETS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(PRESETS)}"
        raise BenchError("EPLB-B003", f"unknown preset {name!r}; {hint}")
    return geometry


def scaled(geometry: MoeGeometry, scale: int) -> MoeGeometry:
    """Divide both widths, leaving the number of experts and layers as published.

    Parameters
    ----------
    geometry : MoeGeometry
        As published.
    scale : int
        Divisor of hidden and intermediate width, at least 1; a layer shrinks by its square.

    Returns
    -------
    MoeGeometry
        The smaller geometry; block scales keep their block size.

    Raises
    ------
    BenchError
        EPLB-B003 when a width cannot be divided.
    """
    if scale < 1:
        raise BenchError("EPLB-B003", f"scale must be at least 1, not {scale}")
    for width in ("hidden_size", "moe_intermediate_size"):
        if getattr(geometry, width) % scale:
            problem = f"scale {scale} does not divide the {width} of {geometry.name}, {getattr(geometry, width)}"
            raise BenchError("EPLB-B003", problem)
    return replace(
        geometry,
        hidden_size=geometry.hidden_size // scale,
        moe_intermediate_size=geometry.moe_intermediate_size // scale,
    )


def tensor_specs(geometry: MoeGeometry) -> tuple[TensorSpec, ...]:
    """Name the tensors of one layer as engines hold them: gate and up fused, down, and their scales.

    Parameters
    ----------
    geometry : MoeGeometry
        Published or scaled.

    Returns
    -------
    tuple of TensorSpec
        Per expert: ``w13_weight`` [2 * moe_intermediate_size, hidden_size], ``w2_weight`` [hidden_size,
        moe_intermediate_size], and for block-scaled dtypes one float32 scale per (started) block of either.
    """
    hidden, inter = geometry.hidden_size, geometry.moe_intermediate_size
    specs = [
        TensorSpec("w13_weight", (2 * inter, hidden), geometry.dtype),
        TensorSpec("w2_weight", (hidden, inter), geometry.dtype),
    ]
    if geometry.scale_block is not None:
        rows, columns = geometry.scale_block
        # Gate and up are scaled apart: a block never spans the seam between them.
        specs += [
            TensorSpec("w13_weight_scale_inv", (2 * ceil(inter / rows), ceil(hidden / columns)), "float32"),
            TensorSpec("w2_weight_scale_inv", (ceil(hidden / rows), ceil(inter / columns)), "float32"),
        ]
    return tuple(specs)


def fitting_scale(geometry: MoeGeometry, num_layers: int, budget_nbytes: int) -> int:
    """Find the smallest power of two by which the widths shrink into a budget.

    Parameters
    ----------
    geometry : MoeGeometry
        As published.
    num_layers : int
        Layers that are to be held.
    budget_nbytes : int
        Most bytes that the logical experts of all layers may take.

    Returns
    -------
    int
        1, 2, 4 ... or the largest power of two that still divides both widths.
    """
    scale = 1
    while num_layers * scaled(geometry, scale).nbytes_per_layer > budget_nbytes:
        if geometry.hidden_size % (2 * scale) or geometry.moe_intermediate_size % (2 * scale):
            break
        scale *= 2
    return scale
