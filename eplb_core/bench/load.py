"""A skewed load: which experts tokens go to when few are hot, drawn the same way on every rank."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def zipf_load(
    num_layers: int,
    num_experts: int,
    top_k: int,
    *,
    seed: int,
    round_number: int = 0,
    num_tokens: int = 1024,
    exponent: float = 1.0,
) -> IntArray:
    """Count the tokens of every expert when its popularity falls off as a power of its rank.

    Each token chooses `top_k` different experts, with probabilities that follow Zipf's law over a permutation of the
    experts of its own per layer, so that no expert can be sent more tokens than there are. Drawing without
    replacement is done by adding Gumbel noise to the log-probabilities and taking the largest (Kool et al. 2019).

    Parameters
    ----------
    num_layers, num_experts, top_k : int
        Sizes of the model.
    seed, round_number : int
        Seed, equal on all ranks; each pair gives another load.
    num_tokens : int
        Tokens that are routed.
    exponent : float
        0 is uniform; 1 is Zipf's law.

    Returns
    -------
    IntArray
        ``[num_layers, num_experts]``, tokens per logical expert; every row sums to ``num_tokens * top_k``.
    """
    rng = np.random.default_rng([seed, round_number])
    popularity = -exponent * np.log(np.arange(1, num_experts + 1))
    counts = np.empty((num_layers, num_experts), np.int64)
    for layer in range(num_layers):
        keys = rng.gumbel(size=(num_tokens, num_experts)) + rng.permutation(popularity)
        chosen = np.argpartition(keys, num_experts - top_k, axis=1)[:, num_experts - top_k :]
        counts[layer] = np.bincount(chosen.ravel(), minlength=num_experts)
    return counts
