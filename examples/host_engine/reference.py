"""The reference: logits of the whole model on one rank, by transformers, which serving must repeat to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from experts import LoadedExperts, apply_experts, weighted_sum
from traffic import STEPS_OF_A_BATCH, Batch, Traffic

TOLERANCE = 0.05
"""Of the largest logit, between two orders of adding up."""


@dataclass(frozen=True)
class Reference:
    """What a rank's batches must give.

    Parameters
    ----------
    logits : dict
        ``logits[topic][position]``: [requests, vocab_size].
    of_transformers : bool
        They are those of transformers as it comes, to the bit. Else transformers computed them with the experts'
        products in blocks.
    difference : float
        Of the prompts' logits to those of transformers as it comes, at most.
    """

    logits: dict[int, list[torch.Tensor]]
    of_transformers: bool
    difference: float

    def check(self, logits: torch.Tensor, topic: int, position: int) -> None:
        """Raise unless these are the same bits."""
        expected = self.logits[topic][position]
        if not same_bits(logits, expected):
            difference = (logits.double() - expected.double()).abs().max().item()
            raise RuntimeError(f"logits changed by {difference:g}, topic {topic}, step {position} of its batch")


def make_reference(model: Qwen3MoeForCausalLM, traffic: Traffic, topics: Iterable[int]) -> Reference:
    """Serve every topic's batch once with all experts here: as transformers comes, and with products in blocks."""
    topics = sorted(set(topics))
    own = {topic: _served(model, traffic, topic) for topic in topics}
    ALL_EXPERTS_FUNCTIONS.register("in_blocks", _in_blocks)
    model.set_experts_implementation("in_blocks")
    blocks = {topic: _served(model, traffic, topic) for topic in topics}
    same = all(same_bits(mine, its) for topic in topics for mine, its in zip(blocks[topic], own[topic], strict=True))
    difference = 0.0
    for topic in topics:  # of the prompts alone: after them another token may follow
        difference = max(difference, (blocks[topic][0].double() - own[topic][0].double()).abs().max().item())
        if difference > TOLERANCE * own[topic][0].abs().max().item():
            raise RuntimeError(f"products in blocks change the logits of topic {topic} by {difference:g}")
    return Reference(blocks, same, difference)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are the same to the bit: 0 is not -0, and a NaN is itself."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def _served(model: Qwen3MoeForCausalLM, traffic: Traffic, topic: int) -> list[torch.Tensor]:
    batch = Batch(traffic.prompts[topic])
    return [batch.step(model) for _ in range(STEPS_OF_A_BATCH)]


def _in_blocks(layer: LoadedExperts, tokens: torch.Tensor, top_k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows = tokens.repeat_interleave(top_k.shape[1], dim=0)
    done = apply_experts(rows, top_k.reshape(-1), layer.gate_up_proj, layer.down_proj, layer.act_fn)
    return weighted_sum(done, weights)
