"""Registered memory: kept for as long as it is registered, and looked at, for a host can still take it away."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from eplb_core.backend import Buffers

_LOOK_EVERY_S = 10e-3
_FEW = 24
"""Storages; a look takes 0.3 microseconds each."""


class _Storage(NamedTuple):
    key: str
    """Of the first tensor in it."""
    storage: torch.UntypedStorage
    address: int
    nbytes: int

    @property
    def is_there(self) -> bool:
        return self.storage.data_ptr() == self.address and self.storage.nbytes() >= self.nbytes


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
        self._layers = [
            _storages((f"layer {layer} tensor {number}", rows) for number, rows in enumerate(tensors))
            for layer, tensors in enumerate(buffers.rows)
        ]
        own = buffers.landing_rows or []
        landing = [
            *((f"landing slot {slot}", memory) for slot, memory in enumerate(buffers.landing)),
            *(
                (f"landing slot {slot} tensor {n}", rows)
                for slot, tensors in enumerate(own)
                for n, rows in enumerate(tensors)
            ),
        ]
        self._landing = _storages(landing)
        self._looked_at_s = 0.0
        self._is_small = sum(map(len, (*self._layers, self._landing))) <= _FEW
        self.missing: str | None = None
        """Key of the first tensor whose memory was found gone; it stays gone."""

    def is_there(self) -> bool:
        """Look at everything: each time where that costs a few microseconds, else at most every 10 ms."""
        now = time.monotonic()
        if self.missing is None and (self._is_small or now - self._looked_at_s >= _LOOK_EVERY_S):
            self._looked_at_s = now
            for storages in (*self._layers, self._landing):
                self._look(storages)
        return self.missing is None

    def layer_is_there(self, layer: int) -> bool:
        """Look at one layer's rows and at landing memory, now."""
        self._look(self._layers[layer])
        self._look(self._landing)
        return self.missing is None

    def _look(self, storages: Sequence[_Storage]) -> None:
        if self.missing is None:
            self.missing = next((each.key for each in storages if not each.is_there), None)


def _storages(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[_Storage]:
    found: dict[int, _Storage] = {}
    for key, tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), _Storage(key, storage, storage.data_ptr(), storage.nbytes()))
    return list(found.values())
