"""What a source of experts is: it says which it holds, and writes their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from eplb_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

ByteArray = npt.NDArray[np.uint8]


class SourceProvider(Protocol):
    """Source of the bytes of logical experts; what `Communicator` takes in ``sources=``.

    Asked only for experts that no live rank holds, on the rank that needs them, in a thread that rearranges. Ranks may
    have different sources, or none: they agree on what can be supplied before a byte moves.
    """

    def holds(self, layer: int, expert: int) -> bool:
        """Can every tensor of an expert be read here?

        Parameters
        ----------
        layer : int
            Index of the layer, as registered.
        expert : int
            Logical expert.
        """
        ...

    def read(self, layer: int, tensor: int, expert: int, out: ByteArray) -> None:
        """Write one expert's row of one tensor, whole.

        Parameters
        ----------
        layer, tensor : int
            Indices, as registered: ``weights[layer][tensor]``.
        expert : int
            Logical expert, one that it `holds`.
        out : ndarray, uint8 [nbytes_per_expert]
            Host memory to be filled, in the byte order of the registered tensor's memory.

        Raises
        ------
        Exception
            Anything: the layer is aborted on every rank, naming this rank and the expert (EPLB-T024).
        """
        ...


def checked_sources(sources: object) -> tuple[SourceProvider, ...]:
    """Return a host's sources; what is none is refused (EPLB-C010)."""
    if isinstance(sources, (str, bytes)) or not isinstance(sources, Sequence):
        problem = f"sources= should be a sequence of sources, got {type(sources).__name__}"
        raise ConfigError("EPLB-C010", problem=problem)
    for source in sources:
        for method in ("holds", "read"):
            if not callable(getattr(source, method, None)):
                raise ConfigError("EPLB-C010", problem=f"the source {source!r} has no {method}()")
    return tuple(sources)


def byte_rows(tensor: torch.Tensor) -> ByteArray:
    """View a contiguous CPU tensor as uint8 ``[num_rows, nbytes_per_row]``."""
    import torch

    rows: ByteArray = tensor.reshape(tensor.shape[0], -1).view(torch.uint8).numpy()
    return rows
