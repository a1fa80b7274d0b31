"""The layers of one rearrangement between start and commit, each with its landing slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from eplb_core.backend import TransferPlan
from eplb_core.memory.commit import NOTHING, CommitCopies, commit_copies
from eplb_core.plan.rank_plan import RankMoves
from eplb_core.plan.rules import TransferRules
from eplb_core.rearrange.sourcing import Fill, fills_of
from eplb_core.voting.vote import Vote

if TYPE_CHECKING:
    import torch

    from eplb_core.backend import MoveColumns
    from eplb_core.plan import PlacementPlan
    from eplb_core.rearrange.epoch import Epoch
    from eplb_core.rearrange.state import CommunicatorState


@dataclass(eq=False)
class MovingLayer:
    """A layer between the start of its transfer and its commit.

    Parameters
    ----------
    number : int
        Index of the layer.
    slot : int
        Landing slot of its rows.
    vote : Vote
        The vote on this layer.
    copies : CommitCopies
        The copies that commit it on this rank.
    receives : MoveColumns or None
        What lands on this rank, once it was planned.
    fills : sequence of Fill
        Rows that a source of this rank supplies.
    handle : object
        Handle that the backend's `transfer` returned.
    failure : BaseException or None
        Why the transfer could not be started; kept for the layer's own vote.
    landed : bool
        Are this rank's reads and sends of it done?
    phase : {"transfer", "wait", "vote"}
        The step that it has come to.
    """

    number: int
    slot: int
    vote: Vote
    copies: CommitCopies = NOTHING
    receives: MoveColumns | None = None
    fills: Sequence[Fill] = ()
    handle: object = None
    failure: BaseException | None = None
    landed: bool = False
    phase: str = "transfer"

    @property
    def where(self) -> str:
        """Layer and phase, for messages."""
        return f"layer {self.number}, phase {self.phase}"


class MovingLayers:
    """One rank's part of a rearrangement, layer by layer.

    Parameters
    ----------
    epoch : Epoch
        The epoch of the rearrangement.
    plan : PlacementPlan
        The moves of all layers.
    state : CommunicatorState
        Keeps the outcome of each layer.

    Attributes
    ----------
    started : dict of int to MovingLayer
        Layers with a started transfer and no decision yet, by number.
    decided : dict of int to MovingLayer
        Layers that every rank commits, not yet copied here.
    copying : dict of int to MovingLayer
        Layers being copied, perhaps by another thread; they still occupy their slot.
    votes : list of Vote
        All votes on layers so far.
    """

    def __init__(self, epoch: Epoch, plan: PlacementPlan, state: CommunicatorState) -> None:
        self.numbers = plan.layers
        self.slots = epoch.setup.config.staging_layers
        self.started: dict[int, MovingLayer] = {}
        self.decided: dict[int, MovingLayer] = {}
        self.copying: dict[int, MovingLayer] = {}
        self.votes: list[Vote] = []
        self._epoch = epoch
        self._plan = plan
        self._state = state
        self._next_start = 0
        rules = TransferRules.of(epoch.backend, epoch.setup.info, epoch.setup.config)
        work_out = partial(plan.layer_moves, rank=epoch.rank, rules=rules)
        self._moves = RankMoves(plan, epoch.setup.layout.geometries, work_out)

    @property
    def slot_is_free(self) -> bool:
        """Is a landing slot left for a layer after the one that is staged next?"""
        return len(self.decided) + len(self.copying) + 1 < self.slots

    def prepare(self, number: int) -> MovingLayer:
        """Return the next layer to wait for, whether its transfer was started or not."""
        if number not in self.started:
            members, _ = self._epoch.entered
            vote = members.vote(str(number), f"layer {number}, phase vote")
            self.started[number] = MovingLayer(number, self._next_start % self.slots, vote)
            self._next_start += 1
            self.votes.append(vote)
        return self.started[number]

    def start(self, layer: MovingLayer) -> None:
        """Start a layer's transfer unless it was started; a failure is kept for the layer's own vote."""
        if layer.handle is not None or layer.failure is not None:
            return
        with self._state.counts.phase("transfer"):
            try:
                self._transfer(layer)
            except BaseException as error:
                layer.failure = error
                if not isinstance(error, Exception):
                    raise

    def start_next(self) -> None:
        """Start the next layer's transfer, if there is one."""
        if self._next_start < len(self.numbers):
            self.start(self.prepare(self.numbers[self._next_start]))

    def _transfer(self, layer: MovingLayer) -> None:
        epoch, number = self._epoch, layer.number
        members, _ = epoch.entered
        # The copies out of this slot may still run on the device; they end before anything lands in it again.
        epoch.setup.streams.wait_for(self._state.take_slot_events(layer.slot))
        share = self._moves.of(number)
        # Both ends must agree on this number, whatever each has started before; so it is computed, not counted.
        sequence = members.generation * len(epoch.setup.layout.geometries) + number
        plan = TransferPlan(members.generation, sequence, number, layer.slot, *share)
        layer.receives = plan.receives
        geometry = epoch.setup.layout.geometries[number]
        needs = self._plan.sourced_rows(number, epoch.rank)
        layer.fills, rows = fills_of(needs, geometry, plan.receives, epoch.landing, layer.slot)
        layer.copies = commit_copies(
            epoch.setup.layout.row_views(number),
            geometry,
            self._plan.commit_plan(number, epoch.rank),
            plan.receives,
            epoch.landing,
            layer.slot,
            [(tensor, row, fill.target) for (tensor, row), fill in zip(rows, layer.fills, strict=True)],
        )
        self._state.nbytes_spare = epoch.landing.nbytes_spare
        layer.handle = epoch.hooks.transfer(plan)

    def landed(self, layer: MovingLayer) -> list[tuple[int, int, torch.Tensor]]:
        """Return what landed of a layer: (tensor, row, uint8 view)."""
        receives = layer.receives
        if receives is None or not len(receives):
            return []
        views = self._epoch.landing.landed_rows(layer.slot, receives)
        return list(zip(receives.tensor.tolist(), receives.row.tolist(), views, strict=True))

    def note_decided(self, layer: MovingLayer) -> None:
        """Note, once and from any thread, that a layer is decided: it must be committed, whatever else happens."""
        if self.started.pop(layer.number, None) is not None:
            self.decided[layer.number] = layer
            self._state.held.note_decided(layer.number)

    def drain(self, reason: str) -> bool:
        """Stop every transfer in flight; True when none can touch memory any more."""
        drained = True
        for layer in self.started.values():
            if layer.failure is not None:
                drained = False  # it is unknown how far it came
            elif layer.handle is not None and not layer.landed:
                try:
                    drained = bool(self._epoch.backend.abort(layer.handle, reason)) and drained
                except Exception as error:
                    self._state.note(f"abort of layer {layer.number} raised {error!r}")
                    drained = False
        return drained

    def in_doubt(self) -> list[MovingLayer]:
        """Return the layers on which this rank voted and whose outcome it does not know."""
        return [layer for layer in self.started.values() if layer.vote.balloted and layer.vote.decision is None]
