"""The checkpoint: a small Qwen3-MoE with random weights, written and read by transformers as safetensors."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

NUM_TOPICS = 8
"""Vocabularies within the vocabulary: a trained model's tokens lie near those that they occur with."""
TOKENS_OF_A_TOPIC = 128

_SEED = 20

logging.disable_progress_bar()


def write_checkpoint(folder: Path, num_layers: int, dtype: torch.dtype) -> None:
    """Draw the weights of a model of `num_layers` MoE layers, the same at every call, and save it."""
    config = Qwen3MoeConfig(
        dtype=dtype,
        vocab_size=NUM_TOPICS * TOKENS_OF_A_TOPIC,
        hidden_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        max_position_embeddings=512,
    )
    torch.manual_seed(_SEED)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        topics = torch.randn(NUM_TOPICS, 1, config.hidden_size)
        # Large beside what the layers add, as trained ones are, so that a router sees which token it is.
        tokens = topics + torch.randn(NUM_TOPICS, TOKENS_OF_A_TOPIC, config.hidden_size)
        model.model.embed_tokens.weight.copy_(tokens.flatten(0, 1))
        # A token is followed by another of its topic, mostly.
        model.lm_head.weight.copy_(tokens.roll(1, dims=1).flatten(0, 1))
    model.to(dtype).save_pretrained(folder)


def read_checkpoint(folder: Path) -> Qwen3MoeForCausalLM:
    """Load a model; experts, apart in the file, become ``[num_experts, ...]`` tensors of their layers."""
    model: Qwen3MoeForCausalLM = Qwen3MoeForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    return model
