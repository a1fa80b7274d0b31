"""Which expert every row holds, as this rank knows it: what was committed, what is decided, and what is in doubt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.memory.commit import CommitCopies
from eplb_core.plan.maps import check_maps, map_digest


@dataclass(frozen=True, eq=False)
class Doubt:
    """A layer on which this rank voted without learning the outcome.

    Parameters
    ----------
    rearrangement : str
        The rearrangement it belongs to; see `HeldPlacement.rearrangement`.
    layer : int
        Index of the layer.
    row : IntArray
        ``[num_physical_experts]``, its placement if it was committed.
    copies : CommitCopies
        Its commit, which can still be made: landing memory is kept.
    """

    rearrangement: str
    layer: int
    row: IntArray
    copies: CommitCopies


@dataclass(eq=False)
class HeldPlacement:
    """The placement of the bytes that now hold, over all epochs of a communicator.

    Parameters
    ----------
    num_layers, world_size, num_local : int
        Shape: layers, ranks, local physical experts.
    """

    num_layers: int
    world_size: int
    num_local: int
    map: IntArray = field(init=False)
    """``[num_layers, world_size * num_local]``, -1 for an empty row, or one whose content nobody vouches for; without
    columns while nothing was ever said."""
    known: bool = field(default=False, init=False)
    """Was it agreed, reloaded, or learnt from the other members? Until then the host's word holds."""
    committed: list[int] = field(default_factory=list, init=False)
    """Layers of the rearrangement at hand that moved something and are copied here."""
    decided: list[int] = field(default_factory=list, init=False)
    """Those that are voted and not yet copied here."""
    doubts: list[Doubt] = field(default_factory=list, init=False)
    newcomers: set[int] = field(default_factory=set, init=False)
    """Ranks that did not know what their rows hold when the members met: of these the host's word is taken once."""
    rearrangement: str = field(default="", init=False)
    """The rearrangement at hand: namespace of the epoch and generation, so no other life has one of that name."""
    history: dict[str, list[int]] = field(default_factory=dict, init=False)
    """By rearrangement: the layers whose commit this rank has seen; of the last two."""

    def __post_init__(self) -> None:
        self.map = np.empty((self.num_layers, 0), dtype=np.int64)
        self._new = self.map

    # --- a rearrangement's life --------------------------------------------------------------------------------------

    def entered(self) -> None:
        """A rearrangement is asked for."""
        self.committed, self.decided = [], []

    def assume(self, old: IntArray) -> None:
        """Take the host's word for what holds, until a first rearrangement is agreed."""
        if not self.known:
            self.map = old.copy()

    def agreed(self, rearrangement: str, old: IntArray, new: IntArray, moving: Iterable[int]) -> None:
        """All ranks agreed; layers that move nothing are on the new placement from here on."""
        self.known = True
        self.newcomers = set()
        self.rearrangement = rearrangement
        self.map, self._new = old.copy(), new
        still = np.ones(self.num_layers, dtype=bool)
        still[list(moving)] = False
        self.map[still] = new[still]
        # A rank that lags is at most one rearrangement behind, for agreeing needs all.
        while len(self.history) > 1:
            del self.history[next(iter(self.history))]
        self.history[rearrangement] = []

    def note_decided(self, layer: int) -> None:
        """A layer's decision is commit."""
        self.history[self.rearrangement].append(layer)
        self.decided.append(layer)

    def note_committed(self, layer: int) -> None:
        """A decided layer's copies are made, or on their way on the stream on which forwards follow."""
        self.decided.remove(layer)
        self.committed.append(layer)
        self.map[layer] = self._new[layer]

    def note_discarded(self, layer: int) -> None:
        """A decided layer stays old on every rank, for the host does not want it any more."""
        self.decided.remove(layer)
        self.history[self.rearrangement].remove(layer)

    def doubt(self, layer: int, copies: CommitCopies) -> None:
        """A layer's outcome cannot be learnt: the store is lost."""
        self.doubts.append(Doubt(self.rearrangement, layer, self._new[layer].copy(), copies))

    def roll_forward(self, committed: Mapping[str, Iterable[int]]) -> None:
        """Commit the layers in doubt that another member saw committed; the others stay old."""
        for doubt in self.doubts:
            if doubt.layer in committed.get(doubt.rearrangement, ()):
                doubt.copies.run()
                self.map[doubt.layer] = doubt.row
                self.committed.append(doubt.layer)
        self.doubts = []

    def reloaded(self, given: npt.ArrayLike) -> None:
        """The host rewrote the weights; a map that is none is refused (EPLB-P001)."""
        mapping, _ = check_maps(
            given,
            given,
            num_layers=self.num_layers,
            world_size=self.world_size,
            num_local_physical_experts=self.num_local,
        )
        self.known = True
        self.newcomers = set()
        self.map = mapping.copy()
        self.committed, self.decided = [], []

    # --- among members -----------------------------------------------------------------------------------------------

    def first_difference(self, old: IntArray, members: Iterable[int]) -> tuple[int, int] | None:
        """Return the first (layer, slot), among those of members that know, at which a map is not what is held."""
        slots = self._slots(set(members) - self.newcomers)
        if not self.known or not len(slots):
            return None
        wrong = np.argwhere(self.map[:, slots] != old[:, slots])
        return None if len(wrong) == 0 else (int(wrong[0, 0]), int(slots[wrong[0, 1]]))

    def own_columns(self, rank: int) -> IntArray:
        """Return what this rank's rows hold, ``[num_layers, num_local]``."""
        return self.map[:, rank * self.num_local : (rank + 1) * self.num_local]

    def digest(self, members: Iterable[int]) -> str:
        """Digest what the members' rows hold; empty when nothing is known."""
        return map_digest(self.map[:, self._slots(members)]).hex() if self.known else ""

    def keep_only(self, members: Iterable[int]) -> None:
        """Rows of ranks that take no part hold nothing that can be moved or routed to."""
        if self.known:
            absent = np.ones(self.map.shape[1], dtype=bool)
            absent[self._slots(members)] = False
            self.map[:, absent] = -1

    def merge(self, columns: Mapping[int, IntArray | None]) -> None:
        """Take each member's word for its own rows; None: it does not know what they hold."""
        self.map = np.full((self.num_layers, self.world_size * self.num_local), -1, dtype=np.int64)
        self.newcomers = {rank for rank, own in columns.items() if own is None}
        for rank, own in columns.items():
            if own is not None:
                self.own_columns(rank)[...] = own
        self.known = True

    def _slots(self, members: Iterable[int]) -> IntArray:
        first = np.array(sorted(members), dtype=np.int64)[:, None] * self.num_local
        return (first + np.arange(self.num_local)).ravel()
