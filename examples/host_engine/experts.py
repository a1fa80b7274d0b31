"""The experts' arithmetic: the same bits for a token, whichever rank computes it and beside whichever other tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

Activation = Callable[[torch.Tensor], torch.Tensor]

BLOCK = 16


class LoadedExperts(Protocol):
    """What this example knows of `Qwen3MoeExperts`: all experts of a layer, fused.

    Parameters
    ----------
    gate_up_proj, down_proj : torch.Tensor
        [num_experts, 2 * intermediate, hidden] and [num_experts, hidden, intermediate].
    act_fn : callable
        Of the gate.
    """

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    act_fn: Activation


def apply_experts(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """Apply experts to tokens in products of a fixed number of rows, as fused MoE kernels do.

    The library's product may add up in another order where it has another number of rows (MKL in float32 does below
    four), and which tokens an expert is given together depends on the placement. Rows of one product do not see each
    other.

    Parameters
    ----------
    tokens : torch.Tensor
        [rows, hidden].
    experts : torch.Tensor
        int64 [rows]: which of the experts each is for.
    gate_up_proj, down_proj : torch.Tensor
        [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate].
    activation : callable
        Of the gate.

    Returns
    -------
    torch.Tensor
        [rows, hidden].
    """
    num_experts, hidden, intermediate = down_proj.shape
    size = rows_of_a_block(hidden, intermediate, down_proj.dtype, activation)
    results = torch.empty_like(tokens)
    order = experts.argsort(stable=True)
    first = 0
    for expert, count in enumerate(torch.bincount(experts, minlength=num_experts).tolist()):
        for begin in range(first, first + count, size):
            rows = order[begin : min(begin + size, first + count)]
            block = tokens.new_zeros(size, hidden)
            block[: len(rows)] = tokens[rows]
            results[rows] = _expert(block, gate_up_proj[expert], down_proj[expert], activation)[: len(rows)]
        first += count
    return results


def weighted_sum(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Add up what a token's experts made of it, in the order of its router, as ``grouped_mm`` of transformers does.

    Parameters
    ----------
    results : torch.Tensor
        [tokens * top_k, hidden].
    weights : torch.Tensor
        [tokens, top_k].

    Returns
    -------
    torch.Tensor
        [tokens, hidden].
    """
    weighted = (results * weights.reshape(-1, 1)).view(*weights.shape, results.shape[1])
    return weighted.sum(dim=1).to(results.dtype)


@lru_cache
def rows_of_a_block(hidden: int, intermediate: int, dtype: torch.dtype, activation: Activation) -> int:
    """Try out whether a row's place in a product matters here; where it does, each row gets a product of its own."""
    drawn = torch.Generator().manual_seed(0)
    block = torch.randn(BLOCK, hidden, generator=drawn).to(dtype)
    gate_up_proj = torch.randn(2 * intermediate, hidden, generator=drawn).to(dtype) / hidden**0.5
    down_proj = torch.randn(hidden, intermediate, generator=drawn).to(dtype) / intermediate**0.5
    expected = _expert(block, gate_up_proj, down_proj, activation)
    for places in range(1, BLOCK):
        if not torch.equal(
            _expert(block.roll(places, 0), gate_up_proj, down_proj, activation), expected.roll(places, 0)
        ):
            return 1
    return BLOCK


def _expert(
    block: torch.Tensor, gate_up_proj: torch.Tensor, down_proj: torch.Tensor, activation: Activation
) -> torch.Tensor:
    gate, up = F.linear(block, gate_up_proj).chunk(2, dim=-1)
    return F.linear(activation(gate) * up, down_proj)
