"""Names of expert tensors, for messages and for the comparison between ranks: those of the layers' parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def tensor_names(weights: Sequence[Sequence[Any]], layers: Iterable[Any]) -> list[list[str]]:
    """Name every tensor after the parameter that has its memory, or else after its place.

    Parameters
    ----------
    weights : sequence of sequence of torch.Tensor
        ``[num_moe_layers][num_tensors]``.
    layers : iterable of torch.nn.Module
        Layers whose parameters they may be.

    Returns
    -------
    list of list of str
        ``[num_moe_layers][num_tensors]``, different within a layer.
    """
    known: dict[int, str] = {}
    for layer in layers:
        for name, parameter in layer.named_parameters():
            known.setdefault(parameter.data_ptr(), name.rpartition(".")[2])
    return [
        _distinct([known.get(tensor.data_ptr(), str(place)) for place, tensor in enumerate(row)]) for row in weights
    ]


def _distinct(names: list[str]) -> list[str]:
    return [f"{name}.{place}" if names.count(name) > 1 else name for place, name in enumerate(names)]
