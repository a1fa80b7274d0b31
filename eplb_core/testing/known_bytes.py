"""The bytes of an expert that everybody knows: they follow from which tensor of which layer it is, and a version."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def known_bytes(layer: int, tensor: int, expert: int, nbytes: int, version: int = 0) -> npt.NDArray[np.uint8]:
    """Return one row of an expert; any bit pattern may occur, NaNs included, and no two long rows are alike.

    Parameters
    ----------
    layer, tensor, expert : int
        Indices of the row.
    nbytes : int
        Size of the row.
    version : int
        Other bytes for every row: a seed, or how often the host has changed the weights.

    Returns
    -------
    npt.NDArray[np.uint8]
        ``[nbytes]``.

    Notes
    -----
    The first byte is no random one: it differs between neighbours, so that rows of one byte can be told apart, too.

    Examples
    --------
    >>> known_bytes(0, 1, 2, 3).tolist() == known_bytes(0, 1, 2, 3).tolist()
    True
    >>> known_bytes(0, 0, 2, 1) == known_bytes(0, 0, 3, 1)
    array([False])
    """
    bits = np.random.SFC64(np.random.SeedSequence([version, layer, tensor, expert]))
    words = np.random.Generator(bits).integers(0, 1 << 64, -(-nbytes // 8), dtype=np.uint64)
    row = words.view(np.uint8)[:nbytes]
    row[:1] = (layer * 7919 + tensor * 104729 + expert * 1299709 + version * 31) % 251
    return row
