"""Counters of one communicator that a host can export."""

from __future__ import annotations

import copy
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eplb_core.backend import Event
from eplb_core.observers.base import Observer, Step, StepName

if TYPE_CHECKING:
    from eplb_core.backend import TransferPlan

_CODE = re.compile(r"\[(EPLB-[A-Z]\d{3})\]$")
_STEPS: tuple[StepName, ...] = ("transfer", "wait", "vote")


def _zeros() -> dict[str, Any]:
    return dict.fromkeys(_STEPS, 0)


@dataclass
class Counts:
    """Counts of a `Stats` at one moment. All but the first and the last two only rise.

    Parameters
    ----------
    communicator : str
        Name of the communicator; empty before the first rearrangement.
    rearrangements : int
        Rearrangements begun: this rank was about to cast its ballot on the maps.
    layers_committed : int
        Layers that this rank committed.
    aborts : dict of str to int
        Rearrangements that ended in an aborted layer, by error code.
    rows_received, rows_sent, nbytes_received, nbytes_sent : int
        Counted for layers whose wait succeeded.
    steps, seconds, failures : dict of str to int or float
        By step ("transfer", "wait", "vote", see `Step`): how many ended, their seconds together, and how many of them
        raised, or for "vote" came to an abort.
    slowest_s : dict of str to float
        The longest of each step so far, seconds.
    layers_in_flight : int
        Layers between the start of their transfer and their commit, now.
    """

    communicator: str = ""
    rearrangements: int = 0
    layers_committed: int = 0
    aborts: dict[str, int] = field(default_factory=dict)
    rows_received: int = 0
    rows_sent: int = 0
    nbytes_received: int = 0
    nbytes_sent: int = 0
    steps: dict[str, int] = field(default_factory=_zeros)
    seconds: dict[str, float] = field(default_factory=_zeros)
    failures: dict[str, int] = field(default_factory=_zeros)
    slowest_s: dict[str, float] = field(default_factory=_zeros)
    layers_in_flight: int = 0


class Stats(Observer):
    """Counts of one communicator; `snapshot` may be called from any thread at any time.

    Examples
    --------
    >>> stats = Stats()                                   # Communicator(..., observers=[stats])
    >>> stats.snapshot().layers_committed
    0
    """

    name = "stats"

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._counts = Counts()
        self._in_flight: set[int] = set()

    def snapshot(self) -> Counts:
        """Return a copy of the counts as they are now; they belong together."""
        with self._lock:
            self._counts.layers_in_flight = len(self._in_flight)
            return copy.deepcopy(self._counts)

    def as_dict(self) -> dict[str, str | int | float]:
        """Return the counts flat, such as ``{"nbytes_sent": 96, "seconds.wait": 0.004, "aborts.EPLB-T003": 1}``."""
        flat: dict[str, str | int | float] = {}
        for name, value in vars(self.snapshot()).items():
            if isinstance(value, dict):
                flat.update({f"{name}.{key}": number for key, number in value.items()})
            else:
                flat[name] = value
        return flat

    def starts(self, name: StepName, plan: TransferPlan) -> None:
        """Count a layer in."""
        if name == "transfer":
            with self._lock:
                self._in_flight.add(plan.layer)

    def ends(self, step: Step) -> None:
        """Count a step."""
        with self._lock:
            counts = self._counts
            counts.steps[step.name] += 1
            counts.seconds[step.name] += step.seconds
            counts.slowest_s[step.name] = max(counts.slowest_s[step.name], step.seconds)
            counts.failures[step.name] += step.aborted or step.error is not None
            if step.receipt is not None:
                counts.nbytes_received += step.receipt.nbytes_received
                counts.nbytes_sent += step.receipt.nbytes_sent
                counts.rows_received += len(step.plan.receives)
                counts.rows_sent += len(step.plan.sends)

    def told(self, event: Event) -> None:
        """Count rearrangements and their outcomes."""
        with self._lock:
            counts = self._counts
            counts.communicator = event.name
            if event.kind == "agree":
                counts.rearrangements += 1
                self._in_flight.clear()
            elif event.kind == "commit":
                counts.layers_committed += 1
                if event.layer is not None:
                    self._in_flight.discard(event.layer)
            elif event.kind == "abort":
                found = _CODE.search(event.reason)
                code = found.group(1) if found else "unknown"
                counts.aborts[code] = counts.aborts.get(code, 0) + 1
                self._in_flight.clear()
