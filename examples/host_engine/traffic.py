"""The traffic: batches of prompts that are about one topic for a while, and about another one afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import Qwen3MoeForCausalLM

from checkpoint import NUM_TOPICS, TOKENS_OF_A_TOPIC

REQUESTS = 8
PROMPT_TOKENS = 16
STEPS_OF_A_BATCH = 16
"""One prefills, and the others decode a token of each request."""


class Batch:
    """Requests that are served together: prefilled in one forward step, then decoded greedily, one token a step."""

    def __init__(self, prompts: torch.Tensor) -> None:
        self._tokens = prompts
        self._cache = None

    def step(self, model: Qwen3MoeForCausalLM) -> torch.Tensor:
        """Run one forward step: the logits of each request's next token, [requests, vocab_size]."""
        with torch.inference_mode():
            output = model(input_ids=self._tokens, cache=self._cache, use_cache=True, logits_to_keep=1)
            self._cache = output.cache
            logits: torch.Tensor = output.logits[:, -1]
            self._tokens = logits.argmax(dim=-1, keepdim=True)
        return logits


@dataclass(frozen=True)
class Work:
    """What a rank does in a forward step: step `position` of a batch about `topic`."""

    topic: int
    position: int

    @property
    def tokens(self) -> int:
        """That go through the model."""
        return REQUESTS * (1 if self.position else PROMPT_TOKENS)


class Traffic:
    """What comes to one rank.

    Parameters
    ----------
    rank, world_size : int
        Ranks begin one after the other, so that one prefills while others decode, and idle until they do.
    batches_of_a_topic : int
        After so many the topic changes, for all ranks.
    """

    def __init__(self, rank: int, world_size: int, batches_of_a_topic: int) -> None:
        self._late = rank * STEPS_OF_A_BATCH // world_size
        self._batches_of_a_topic = batches_of_a_topic
        self.prompts = [_prompts(rank, topic) for topic in range(NUM_TOPICS)]

    def at(self, step: int) -> Work | None:
        """Return what is to do in a forward step, counted from 0; None while there is nothing yet."""
        batch, position = divmod(step - self._late, STEPS_OF_A_BATCH)
        return Work(batch // self._batches_of_a_topic % NUM_TOPICS, position) if batch >= 0 else None


def _prompts(rank: int, topic: int) -> torch.Tensor:
    """Draw prompts of which every fourth token may be any, [REQUESTS, PROMPT_TOKENS]."""
    drawn = torch.Generator().manual_seed(1000 * rank + topic)
    shape = (REQUESTS, PROMPT_TOKENS)
    about = topic * TOKENS_OF_A_TOPIC + torch.randint(TOKENS_OF_A_TOPIC, shape, generator=drawn)
    anything = torch.randint(NUM_TOPICS * TOKENS_OF_A_TOPIC, shape, generator=drawn)
    return torch.where(torch.rand(shape, generator=drawn) < 0.25, anything, about)
