"""Which expert every row holds, as far as this rank knows: layers committed, decided and in doubt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.memory.commit import CommitCopies
from eplb_core.plan.maps import check_maps, map_digest
from eplb_core.rearrange.inheritance import Inheritance

UNKNOWN = -2
"""In a placement: nobody has told what this row holds."""


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
        ``[num_physical_experts]``: the layer's placement if it was committed.
    copies : CommitCopies
        Copies of its commit, which can still be made: landing memory is kept.
    """

    rearrangement: str
    layer: int
    row: IntArray
    copies: CommitCopies


@dataclass(eq=False)
class HeldPlacement:
    """The placement that the rows hold now, kept over all epochs of a communicator.

    Parameters
    ----------
    num_layers, world_size, num_local : int
        Shape: layers, ranks, local physical experts.
    num_experts : sequence of int or None
        ``[num_layers]``, local physical experts of each layer, where they differ.
    """

    num_layers: int
    world_size: int
    num_local: int
    num_experts: Sequence[int] | None = None
    map: IntArray = field(init=False)
    """``[num_layers, world_size * num_local]``, -1 for an empty row or one that no member has, `UNKNOWN` in layers that
    no rearrangement named yet; without columns as long as nothing is known."""
    known: bool = field(default=False, init=False)
    """Was it agreed, reloaded, or learnt from other members? Until then `old_map` of the host is believed."""
    committed: list[int] = field(default_factory=list, init=False)
    """Layers of the current rearrangement that moved rows and are committed on this rank."""
    decided: list[int] = field(default_factory=list, init=False)
    """Decided layers: voted for commit, not yet copied here."""
    doubts: list[Doubt] = field(default_factory=list, init=False)
    inherited: Inheritance | None = field(default=None, init=False)
    """What a communicator before this one holds; compared until something is known here."""
    newcomers: set[int] = field(default_factory=set, init=False)
    """Ranks that did not know what their rows hold when the members met; the host's map is believed for them once."""
    rearrangement: str = field(default="", init=False)
    """Unique name of the current rearrangement: the epoch's namespace and the generation."""
    history: dict[str, list[int]] = field(default_factory=dict, init=False)
    """Layers whose commit this rank has seen, by rearrangement; of the last two rearrangements."""

    def __post_init__(self) -> None:
        self.map = np.empty((self.num_layers, 0), dtype=np.int64)
        self._new: IntArray | dict[int, IntArray] = self.map

    # --- a rearrangement's life --------------------------------------------------------------------------------------

    def entered(self) -> None:
        """Note that a rearrangement was asked for."""
        self.committed, self.decided = [], []

    def assume(self, old: IntArray, layers: Sequence[int] | None = None) -> None:
        """Believe the host's map, of all layers or of some, until a first rearrangement is agreed."""
        if not self.known:
            self._take(old, layers)

    def agreed(
        self,
        rearrangement: str,
        old: IntArray,
        new: IntArray,
        moving: Iterable[int],
        layers: Sequence[int] | None = None,
    ) -> None:
        """Note that all ranks agreed; layers that move nothing are on the new placement from now on.

        Parameters
        ----------
        rearrangement : str
            Its unique name.
        old, new : IntArray
            ``[num_layers, num_physical_experts]``, or a row for each of `layers`.
        moving : iterable of int
            Layers that move anything.
        layers : sequence of int or None
            The layers that it is about; None is all.
        """
        self._take(old, layers)
        self.known, self.inherited = True, None
        self.newcomers = set()
        self.rearrangement = rearrangement
        numbers = range(self.num_layers) if layers is None else layers
        self._new = new if layers is None else dict(zip(layers, new, strict=True))
        for layer in set(numbers).difference(moving):
            self.map[layer] = self._new[layer]
        # A rank that lags is at most one rearrangement behind, for agreeing needs all.
        while len(self.history) > 1:
            del self.history[next(iter(self.history))]
        self.history[rearrangement] = []

    def _take(self, old: IntArray, layers: Sequence[int] | None) -> None:
        if layers is None:
            self.map = old.copy()
            return
        if not self.known:
            there = None if self.inherited is None else self.inherited.map()
            self.map = np.full((self.num_layers, old.shape[1]), UNKNOWN) if there is None else there
        self.map[list(layers)] = old

    def note_decided(self, layer: int) -> None:
        """Note that a layer's decision is commit."""
        self.history[self.rearrangement].append(layer)
        self.decided.append(layer)

    def note_committed(self, layer: int) -> None:
        """Note that a decided layer was copied, or that its copies are queued on the stream of later forwards."""
        self.decided.remove(layer)
        self.committed.append(layer)
        self.map[layer] = self._new[layer]

    def note_discarded(self, layer: int) -> None:
        """Note that the host dropped a decided layer, which stays old on every rank."""
        self.decided.remove(layer)
        self.history[self.rearrangement].remove(layer)

    def doubt(self, layer: int, copies: CommitCopies) -> None:
        """Note a layer whose outcome is unknown because the store is lost."""
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
        """Note that the host rewrote the weights; an invalid map is refused (EPLB-P001)."""
        mapping, _ = check_maps(
            given,
            given,
            num_layers=self.num_layers,
            world_size=self.world_size,
            num_local_physical_experts=self.num_local,
            num_experts=self.num_experts,
        )
        self.known, self.inherited = True, None
        self.newcomers = set()
        self.map = mapping.copy()
        self.committed, self.decided = [], []

    # --- among members -----------------------------------------------------------------------------------------------

    def first_difference(
        self, old: IntArray, members: Iterable[int], layers: Sequence[int] | None = None
    ) -> tuple[int, int] | None:
        """Return the first (row, slot) at which a map, of all layers or of some, differs from what is held.

        Notes
        -----
        Columns of newcomers are left out, and layers of which nothing is known.
        """
        comparable = set(members) - self.newcomers
        if not self.known:
            there = None if self.inherited is None else self.inherited.map()
            if self.inherited is None or there is None:
                return None
            self.map, comparable = there, comparable & self.inherited.continuing
        slots = self._slots(comparable)
        if not len(slots):
            return None
        held = (self.map if layers is None else self.map[list(layers)])[:, slots]
        wrong = np.argwhere((held != old[:, slots]) & (held != UNKNOWN))
        return None if len(wrong) == 0 else (int(wrong[0, 0]), int(slots[wrong[0, 1]]))

    def known_map(self) -> IntArray | None:
        """Return the map that holds now; None as long as nobody knows."""
        return self.map if self.known else None

    def own_columns(self, rank: int) -> IntArray:
        """Return what this rank's rows hold, ``[num_layers, num_local]``."""
        return self.map[:, rank * self.num_local : (rank + 1) * self.num_local]

    def digest(self, members: Iterable[int]) -> str:
        """Return a digest of what the members' rows hold; empty when nothing is known."""
        return map_digest(self.map[:, self._slots(members)]).hex() if self.known else ""

    def keep_only(self, members: Iterable[int]) -> None:
        """Clear the columns of ranks that take no part: nothing can be moved from them or routed to them."""
        if self.map.shape[1]:
            absent = np.ones(self.map.shape[1], dtype=bool)
            absent[self._slots(members)] = False
            self.map[:, absent] = -1
            if isinstance(self._new, dict):
                self._new = {layer: np.where(absent, -1, row) for layer, row in self._new.items()}
            elif self._new.shape == self.map.shape and absent.any():
                self._new = np.where(absent, -1, self._new)

    def merge(self, columns: Mapping[int, IntArray | None]) -> None:
        """Believe each member about its own rows; None stands for a member that does not know."""
        self.map = np.full((self.num_layers, self.world_size * self.num_local), -1, dtype=np.int64)
        self.newcomers = {rank for rank, own in columns.items() if own is None}
        for rank, own in columns.items():
            if own is not None:
                self.own_columns(rank)[...] = own
        self.known = True

    def _slots(self, members: Iterable[int]) -> IntArray:
        first = np.array(sorted(members), dtype=np.int64)[:, None] * self.num_local
        return (first + np.arange(self.num_local)).ravel()
