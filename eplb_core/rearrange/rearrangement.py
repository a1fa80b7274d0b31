"""One rearrangement: for each layer transfer, wait, vote and commit, all members in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from eplb_core.errors import EplbError, PlanError
from eplb_core.rearrange.giving_up import GivingUp
from eplb_core.rearrange.layers import MovingLayers
from eplb_core.rearrange.steps import LayerSteps, Voting

if TYPE_CHECKING:
    import torch

    from eplb_core.plan import PlacementPlan
    from eplb_core.rearrange.epoch import Epoch
    from eplb_core.rearrange.state import CommunicatorState


class Rearrangement:
    """An agreed rearrangement. `Communicator.begin` makes it; every rank makes the same calls in the same order.

    Parameters
    ----------
    epoch : Epoch
        The epoch in which it was agreed.
    plan : PlacementPlan
        The moves of all layers.
    state : CommunicatorState
        Keeps the outcome of each layer.

    Attributes
    ----------
    layers : tuple of int
        Ascending: every layer that moves anything on any rank.
    """

    def __init__(self, epoch: Epoch, plan: PlacementPlan, state: CommunicatorState) -> None:
        self.layers = plan.layers
        self._epoch = epoch
        self._state = state
        self._members, _ = epoch.entered
        self._moving = MovingLayers(epoch, plan, state)
        self._steps = LayerSteps(epoch, state, self._moving)
        self._giving_up = GivingUp(epoch, state, self._moving, self._steps.failure)
        self._next_stage = 0

    # --- the host's calls --------------------------------------------------------------------------------------------

    def stage(self, layer: int) -> None:
        """Bring one layer's rows into landing memory on every rank and decide about it; blocks.

        With two staging layers it also starts the next layer's transfer, which then runs beside this layer's vote.

        Parameters
        ----------
        layer : int
            The next of `layers`; every rank stages in that order.

        Raises
        ------
        PlanError
            Out of order, or ``staging_layers`` layers are staged and uncommitted (EPLB-P004).
        TransferError
            The layer was aborted: nobody commits it, and all live ranks raise the same error. Layers decided before it
            are the host's to commit: ``.report.decided_layers``.
        """
        with self._state.calling():
            self._check_stage(layer)
            self._stage(layer)

    def landed(self, layer: int) -> list[tuple[int, int, torch.Tensor]]:
        """Return what landed of a decided layer, for hosts that put rows in place themselves; local.

        Parameters
        ----------
        layer : int
            A layer that is decided, and neither committed nor discarded.

        Returns
        -------
        list of (int, int, torch.Tensor)
            Tensor, row of this rank, and the row's bytes, uint8 [nbytes], on the device where landing memory is; valid
            until the layer is committed or discarded. Rows that this rank holds already are not among them, and an
            expert that takes several rows is there once, for the lowest.

        Raises
        ------
        PlanError
            The layer is not decided, or committed already (EPLB-P004).
        """
        with self._state.committing():
            self._state.check_open()
            decided = self._moving.decided.get(layer)
            if decided is None:
                raise PlanError("EPLB-P004", problem=f"landed({layer}) of a layer that is not staged")
            return self._moving.landed(decided)

    def commit(self, layer: int, by_host: bool = False) -> None:
        """Copy a decided layer's rows into the live rows of this rank; local, on the caller's current stream.

        May be called from another thread than the one that stages the next layer, and after a later layer failed.

        Parameters
        ----------
        layer : int
            A decided layer.
        by_host : bool
            The host has put all rows of the layer in place itself (see `landed`): nothing is copied.

        Raises
        ------
        PlanError
            The layer is not decided, or committed already (EPLB-P004).
        CommitError
            A copy failed: this rank's weights are invalid, and its peers see it as gone.
        """
        with self._state.committing():
            self._state.check_open()
            self._steps.commit(layer, by_host=by_host)

    def discard(self, layer: int) -> None:
        """Drop a decided layer instead of committing it; the same on every rank. Its rows stay as they are.

        Raises
        ------
        PlanError
            The layer is not decided, or committed already (EPLB-P004).
        """
        with self._state.committing():
            self._state.check_open()
            self._giving_up.discard(layer)

    def abort(self, reason: str) -> EplbError:
        """Refuse the next layer on this rank, in place of its `stage`: a check of the host's own failed; collective.

        Parameters
        ----------
        reason : str
            What every rank is told.

        Returns
        -------
        EplbError
            What the other ranks' `stage` raises (EPLB-T007, or what another rank found first). The rearrangement is
            over; layers decided before are the host's to commit or discard.

        Raises
        ------
        PlanError
            Every layer was staged, or the rearrangement is over (EPLB-P004).
        """
        with self._state.calling():
            following = self._next
            if following is None:
                raise PlanError("EPLB-P004", problem="abort() when no layer is left to be staged")
            return self._giving_up.refuse(following, reason)

    def cancel(self) -> None:
        """Give the rest up on every rank: drain, drop what no rank has committed, and end; collective, and no failure.

        A layer that another rank has committed is committed here as well, inside this call; nothing of this
        rearrangement is written after it. A rank that is inside `stage` meanwhile gets EPLB-T021, and cancels too. May
        be called after a failure, and again.

        Raises
        ------
        TransferError
            A member is gone, or did not come.
        """
        with self._state.calling(), self._state.committing():
            self._state.check_open()
            self._giving_up.cancel(self._next, self._steps.commit)

    def end(self) -> None:
        """End the rearrangement, after every layer is committed.

        Raises
        ------
        PlanError
            Layers are left (EPLB-P004).
        """
        with self._state.calling():
            self._end()

    def run(self) -> None:
        """Stage and commit every layer, then end; this is `Communicator.rearrange`.

        Notes
        -----
        The copies of a layer's commit, and the start of the transfer that takes its slot, run while the next layer's
        vote is under way.
        """
        with self._state.calling():
            before: int | None = None

            def commit_before() -> None:
                if before is not None:
                    self._steps.commit(before)
                    self._moving.start_next()

            try:
                for layer in self.layers:
                    self._stage(layer, meanwhile=commit_before)
                    before = layer
                    if self._moving.slots == 1:
                        commit_before()
                        before = None
            except KeyboardInterrupt:  # after the last layer's decision; before it, the layer's abort has ended all
                self._state.ended(self)
                raise
            finally:
                self.commit_decided()
            self._end()

    # --- in which order ----------------------------------------------------------------------------------------------

    def _check_stage(self, layer: int) -> None:
        self._state.check_usable()
        if self._state.open is not self:
            raise PlanError("EPLB-P004", problem=f"stage({layer}) of a rearrangement that is over")
        if self._next_stage >= len(self.layers):
            raise PlanError("EPLB-P004", problem=f"stage({layer}) after every layer was staged")
        expected = self.layers[self._next_stage]
        if layer != expected:
            raise PlanError("EPLB-P004", problem=f"stage({layer}) where layer {expected} is next")
        if len(self._moving.decided) >= self._moving.slots:
            problem = f"stage({layer}) while layer(s) {list(self._moving.decided)} are staged and uncommitted"
            raise PlanError("EPLB-P004", problem=problem)

    def _stage(self, number: int, *, meanwhile: Callable[[], None] | None = None, voting: Voting | None = None) -> None:
        self._steps.stage(number, self._following(), meanwhile=meanwhile, voting=voting)
        self._next_stage += 1

    @property
    def _next(self) -> int | None:
        """The layer to be staged next; None when there is none, or the rearrangement is over."""
        if self._state.open is not self or self._next_stage >= len(self.layers):
            return None
        return self.layers[self._next_stage]

    def _following(self) -> int | None:
        """Return the layer after the one being staged, or None."""
        after = self.layers[self._next_stage + 1 : self._next_stage + 2]
        return after[0] if after else None

    def commit_decided(self) -> None:
        """Commit the layers that are decided and not yet committed."""
        for number in list(self._moving.decided):
            self._steps.commit(number)

    def let_go(self) -> None:
        """Drop references to memory."""
        self._moving.started.clear()
        self._moving.decided.clear()

    def _end(self) -> None:
        self._state.check_open()
        left = [*self._moving.decided, *self._moving.copying, *self.layers[self._next_stage :]]
        if left:
            raise PlanError("EPLB-P004", problem=f"end() before layer(s) {left} were staged and committed")
        self._members.keys.forget_later(self._moving.votes)
        self._state.ended(self)
