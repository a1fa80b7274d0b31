"""The load balancer: what a host engine embeds to have its experts rearranged while it serves."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy.typing as npt

from eplb_core.arrays import IntArray
from eplb_core.balancing.background import BackgroundRearrangement
from eplb_core.balancing.comparison import given_here
from eplb_core.balancing.core_access import CoreAccess
from eplb_core.balancing.draining import Draining
from eplb_core.balancing.engine_side import EngineSide, OnCommit
from eplb_core.balancing.handover import CLOSING, Handover, let_go
from eplb_core.balancing.load_window import LoadWindow
from eplb_core.balancing.placing import Placing, log_balancedness
from eplb_core.balancing.policy import load_policy
from eplb_core.balancing.progress import LoadBalancerStatus, Progress
from eplb_core.balancing.promise import PromiseBook
from eplb_core.balancing.rearranger import Rearranger
from eplb_core.balancing.setup import check_arguments, checked_experts, checked_placement, config_for
from eplb_core.balancing.worker import Worker
from eplb_core.communicator import Communicator
from eplb_core.config import EPLBConfig
from eplb_core.errors import PlanError, error_for

if TYPE_CHECKING:
    from eplb_core.report import RearrangeReport

_CLOSE_GRACE_S = 10.0


class LoadBalancer(Draining):
    """Watches which experts are busy, and rearranges them over the ranks while the model serves.

    Built on every rank of the expert-parallel group, at the same forward step; it connects the communicator, and uses
    it alone from then on. All methods are for the engine's thread, none but `record` inside `step` (EPLB-P004).

    With ``use_async`` a worker thread gathers loads, agrees, and moves rows layer by layer; `step` only copies what has
    landed, at a forward step that all ranks know in advance. Without, `step` does all of it at the interval.

    Parameters
    ----------
    config : EPLBConfig
        When, how, and what becomes of failures.
    communicator : Communicator
        Over the weights.
    physical_to_logical_map : array-like of int, [num_moe_layers, num_physical_experts]
        Logical expert of every slot now; -1 is an empty slot.
    num_logical_experts : int
        Logical experts of each layer; with ``num_redundant_experts`` they make the slots.
    on_commit : callable or None
        ``on_commit(layer, old_row, new_row)`` is called after each layer's weights and map have changed, in `step` and
        on its stream, for what a host derives from weights. What it raises leaves `step`.
    num_expert_groups : int
        Groups of consecutive logical experts that the router picks from.

    Raises
    ------
    ConfigError
        An argument does not fit or differs between ranks (EPLB-C015), or the policy is not installed (EPLB-C012).
    PlanError
        The map has another shape than the weights (EPLB-P001), differs between ranks (EPLB-P003), or is not what a
        rank holds (EPLB-P008).
    MetadataError, TransferError
        The members do not come together; see `Communicator.connect`.
    """

    def __init__(
        self,
        config: EPLBConfig,
        communicator: Communicator,
        physical_to_logical_map: npt.ArrayLike,
        num_logical_experts: int,
        on_commit: OnCommit | None = None,
        *,
        num_expert_groups: int = 1,
    ) -> None:
        check_arguments(config, communicator, on_commit, num_expert_groups)
        self.config = config
        self._on_commit, self._num_expert_groups = on_commit, num_expert_groups
        self._policy = load_policy(config)
        self._closed = self._inside_step = False
        self._worker: Worker | None = None
        core = CoreAccess(communicator, config)
        placement = checked_placement(core, physical_to_logical_map)
        self._num_logical_experts = checked_experts(config, num_logical_experts, placement)
        self._begin(core, placement)

    def _begin(self, core: CoreAccess, placement: IntArray) -> None:
        """Connect, and count from 0."""
        experts = {"num_logical_experts": self._num_logical_experts, "num_expert_groups": self._num_expert_groups}
        core.connect(placement, given_here(core.config, placement, **experts))
        self._core, config, self._stopped = core, core.config, False
        self._book, self._progress = PromiseBook(), Progress()
        size, interval = config.window_size, config.step_interval
        self._handover = Handover(self._book, placement, interval)
        self._let_go = weakref.finalize(self, let_go, core, self._handover)  # a worker ends when nobody steps any more
        self._let_go.atexit = False  # it ends then by itself; in a forked child, a lock may be held by nobody
        self._window = LoadWindow(placement, self._num_logical_experts, window_size=size, step_interval=interval)
        self._engine = EngineSide(core, self._book, self._handover, self._progress, self._window, self._on_commit)
        self._placing = placing = Placing(core, self._policy, progress=self._progress, **experts)
        shared = (core, self._book, self._handover, self._progress)
        if config.use_async:
            self._rearranger = Rearranger(*shared, placing, BackgroundRearrangement(*shared).run)
            tries = self._rearranger.run, self._rearranger.recover
            self._worker = self._engine.worker = Worker(core, self._handover, self._progress, *tries)
        else:
            self._rearranger = Rearranger(*shared, placing, self._engine.move_now)

    # --- every forward step -------------------------------------------------------------------------------------------

    def record(self, layer: int, counts: object) -> None:
        """Tell how many tokens of this rank went to each physical expert of a layer in this forward step.

        Parameters
        ----------
        layer : int
            MoE layer.
        counts : numpy.ndarray or torch.Tensor, real [num_physical_experts]
            Tokens by slot of all ranks. Counts on a device are added there, on the current stream, and not waited for.

        Raises
        ------
        PlanError
            They are no such counts (EPLB-P010).
        """
        self._window.record(layer, counts, self._book.step + 1)

    def step(self, is_dummy: bool = False) -> tuple[int, ...]:
        """End a forward step: called once per step on every rank, dummy and idle steps too.

        Parameters
        ----------
        is_dummy : bool
            What was recorded in this step is no load.

        Returns
        -------
        tuple of int
            Layers whose weights and map changed in this step, the same on every rank.

        Raises
        ------
        PlanError
            It is called inside itself (EPLB-P004).
        StoreLostError
            A promise cannot be kept: nobody can tell what was decided (EPLB-T005).
        EplbError
            A rearrangement failed, with ``on_failure="raise"``; once, and in a step that commits nothing. ``.report``
            says what holds.
        CommitError
            A copy failed: the weights of this rank are invalid.

        Notes
        -----
        A step that a lost store or an interrupt (Ctrl-C) leaves is not over: the next call takes it up, and it counts
        once.
        """
        self._check_open("step()")
        self._inside_step = True
        try:
            return self._step(is_dummy)
        finally:
            self._inside_step = False

    def _step(self, is_dummy: bool) -> tuple[int, ...]:
        self._engine.end_step(is_dummy=is_dummy)
        committed = self._engine.commit_due()
        snapshot = self._engine.take_snapshot()
        if self.config.log_balancedness:
            log_balancedness(self._core, self._progress, self._book.step)
        if snapshot is not None:
            if self._worker is None:
                self._rearranger.run(snapshot)
                self._progress.enter("idle")
                committed += self._engine.take_moved()
            else:
                self._handover.offer(snapshot)
        self._engine.raise_problem()
        if not committed:
            self._engine.raise_failure()
        return tuple(committed)

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def physical_to_logical_map(self) -> IntArray:
        """Which expert every slot holds, [num_moe_layers, num_physical_experts]; a copy."""
        return self._handover.map()

    @property
    def report(self) -> RearrangeReport:
        """What holds now, and what the last rearrangement did."""
        return self._core.communicator.report

    @property
    def status(self) -> LoadBalancerStatus:
        """What it is doing, for which layer, for whom it waits and since when."""
        backend = self._core.communicator.backend
        status = self._progress.status(self._book, next_step=self._handover.next_step, backend=backend)
        return replace(status, phase="closed") if self._closed else status

    # --- what the host does otherwise ---------------------------------------------------------------------------------

    def invalidate(self, physical_to_logical_map: npt.ArrayLike | None = None) -> None:
        """Call off what is under way, on every rank after the same step: the host is about to rewrite weights.

        Every layer whose step has not come stays as it is, on every rank the same ones.

        Parameters
        ----------
        physical_to_logical_map : array-like of int, [num_moe_layers, num_physical_experts], or None
            What the slots hold when the weights are rewritten; None leaves the map as it is.
        """
        self._check_open("invalidate()")
        given = physical_to_logical_map
        self._engine.drop(None if given is None else checked_placement(self._core, given))

    def adopt(self, communicator: Communicator, physical_to_logical_map: npt.ArrayLike) -> None:
        """Go on with another communicator, or with the same after the host rebuilt it; collective, counts from 0.

        Called on every rank after the same step. Layers whose step has not come are dropped first, as by `invalidate`.

        Parameters
        ----------
        communicator : Communicator
            Over the same layers.
        physical_to_logical_map : array-like of int, [num_moe_layers, num_physical_experts]
            Logical expert of every slot now.

        Raises
        ------
        EplbError
            See `LoadBalancer`. EPLB-T004: a transfer that was under way had to be broken off; rebuild, and adopt again.
        """
        self._check_open("adopt()")
        check_arguments(self.config, communicator, self._on_commit, self._num_expert_groups)
        placement = checked_placement(core := CoreAccess(communicator, self.config), physical_to_logical_map)
        self.config = core.config = config_for(self.config, self._num_logical_experts, placement)
        self._engine.drop(None)  # the map that was given is to hold
        self._stop(together=True)
        self._begin(core, placement)

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop, commit what is decided, and leave no thread; the communicator stays the host's.

        Called on all ranks. Where one does not come, or a transfer under way had to be broken off, the communicator
        needs `Communicator.rebuild` before it is used again. Returns within ``timeout_s`` and 20 s.

        Raises
        ------
        TransferError
            The worker is inside a call of a library that does not return (EPLB-T022).
        PlanError
            It is called inside `step` (EPLB-P004); nothing was done.
        """
        self._close(together=True)

    def _close(self, *, together: bool) -> None:
        if not self._core.is_inherited:
            self._check_outside_step("close()")
            self._closed = True
            self._stop(together=together)

    def _stop(self, *, together: bool) -> None:
        if self._stopped:  # else a stop that was interrupted, or whose worker did not end, is taken up again
            return
        self._let_go.detach()
        self._handover.call_off(CLOSING, stopping=True)
        if self._worker is not None and not self._worker.join(self._core.timeout_s + _CLOSE_GRACE_S):
            raise error_for("EPLB-T022", problem=f"does not end: it {self._progress.place()}")
        self._core.release()
        self._engine.commit_all()
        if together:
            self._core.leave()
        self._stopped = True
        self._engine.raise_problem()

    def _check_open(self, call: str) -> None:
        self._core.check_open()
        self._check_outside_step(call)
        if self._closed:
            raise error_for("EPLB-T008", name=f"{self._core.communicator.name} (LoadBalancer)")

    def _check_outside_step(self, call: str) -> None:
        if self._inside_step:
            problem = f"{call} inside step(): on_commit called it, a signal handler, or another thread"
            raise PlanError("EPLB-P004", problem=problem)

    def __enter__(self) -> LoadBalancer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._close(together=error is None)
