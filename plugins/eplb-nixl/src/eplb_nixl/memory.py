"""Registered memory: kept for as long as it is registered, and looked at, for a host can still take it away."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain

import torch

from eplb_core.backend import Buffers, RowList

_LOOK_EVERY_S = 10e-3
_FEW = 24
"""Storages; a look takes 0.3 microseconds each."""


class _Storages:
    """Distinct storages, and where each was when it was registered.

    Parameters
    ----------
    tensors : iterable of (str, torch.Tensor)
        By key; a storage is known by the key of the first tensor in it.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        found: dict[int, tuple[str, torch.UntypedStorage]] = {}
        for key, tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), (key, storage))
        self._keys = [key for key, _ in found.values()]
        self._storages = [storage for _, storage in found.values()]
        self._registered = self._places()

    def __len__(self) -> int:
        return len(self._storages)

    def missing(self) -> str | None:
        """Return the key of the first storage whose memory went away, if one did."""
        places = self._places()
        if places == self._registered:  # the usual case, looked at in every wait: one comparison of lists
            return None
        for key, (address, nbytes), (was_at, needed) in zip(self._keys, places, self._registered, strict=True):
            if address != was_at or nbytes < needed:
                return key
        return None

    def _places(self) -> list[tuple[int, int]]:
        return [(storage.data_ptr(), storage.nbytes()) for storage in self._storages]


def live_tensors(buffers: Buffers, layer: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the live rows of a layer, or of all, each with a name: by tensor, or by row where rows lie apart.

    Parameters
    ----------
    buffers : Buffers
        What is registered.
    layer : int or None
        The layer; None is all.
    """
    for number in range(len(buffers.rows)) if layer is None else (layer,):
        for tensor, rows in enumerate(buffers.rows[number]):
            key = f"layer {number} tensor {tensor}"
            if isinstance(rows, RowList):
                yield from ((f"{key} expert {expert}", row) for expert, row in enumerate(rows.unbind()))
            else:
                yield key, rows


class RegisteredMemory:
    """The storages behind live rows and landing rows.

    Holding a storage keeps its memory from being freed when the host drops its tensors or gives them other storages. It
    does not keep the host from resizing it (``untyped_storage().resize_(0)``, a usual way to put weights to sleep): the
    memory is then gone under the registration, and UCX, which serves peers' READs over TCP from here, would read what
    is no longer mapped. So it is looked at before anything that makes progress.

    Parameters
    ----------
    buffers : Buffers
        What is registered.
    """

    def __init__(self, buffers: Buffers) -> None:
        layers = [list(live_tensors(buffers, layer)) for layer in range(len(buffers.rows))]
        own = buffers.landing_rows or []
        landing = [
            *((f"landing slot {slot}", memory) for slot, memory in enumerate(buffers.landing)),
            *(
                (f"landing slot {slot} tensor {n}", rows)
                for slot, tensors in enumerate(own)
                for n, rows in enumerate(tensors)
            ),
        ]
        self._all = _Storages((*chain.from_iterable(layers), *landing))
        self._of_layer = [_Storages((*rows, *landing)) for rows in layers]
        self._looked_at_s = 0.0
        self.missing: str | None = None
        """Key of the first tensor whose memory was found gone; it stays gone."""

    def is_there(self) -> bool:
        """Look at everything: each time where that costs a few microseconds, else at most every 10 ms."""
        now = time.monotonic()
        if self.missing is None and (len(self._all) <= _FEW or now - self._looked_at_s >= _LOOK_EVERY_S):
            self._looked_at_s = now
            self.missing = self._all.missing()
        return self.missing is None

    def layer_is_there(self, layer: int) -> bool:
        """Look at one layer's rows and at landing memory, now."""
        if self.missing is None:
            self.missing = self._of_layer[layer].missing()
        return self.missing is None
