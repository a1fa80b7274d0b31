"""One model's rearrangement, between vLLM's calls: begun, staged layer by layer, committed, or dropped.

No part of vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eplb_core.errors import CommitError, TransferError
from eplb_vllm.cycle import Cycle, IntArray, RearrangeFailedError

if TYPE_CHECKING:
    import torch

    from eplb_core import Communicator, Rearrangement

Tensors = Sequence["torch.Tensor"]


@dataclass(frozen=True, eq=False)
class CoreTransfer:
    """What the patched ``transfer_layer`` returns where vLLM has its ``TransferMetadata``.

    Parameters
    ----------
    mover : Mover
        Runs the rearrangement that the layer is part of.
    layer : int
        Index of the layer.
    error : Exception or None
        The rearrangement failed: the layer keeps its placement on every rank, and so do all later ones.
    is_first : bool
        Is it the first layer with that error?
    """

    mover: Mover
    layer: int
    error: Exception | None = None
    is_first: bool = False

    def commit(self) -> None:
        """Copy what landed into the live rows of this rank.

        Raises
        ------
        CommitError
            A copy failed: this rank's weights are invalid.
        """
        self.mover.commit(self.layer)


class Mover:
    """Runs rearrangements of one communicator in the order in which vLLM asks for them.

    Its methods are called by vLLM's worker thread (`begin`, `stage`) and by its main thread (the others); vLLM hands
    each layer from one to the other and back, so that they never run at the same time.

    Parameters
    ----------
    comm : Communicator
        Over the model's expert weights.
    weights : sequence of sequence of torch.Tensor
        ``[num_moe_layers][num_tensors]``, as they were registered.
    fresh_landing : callable
        Makes new landing rows for a rebuild that cannot have the old ones, or None where the core has its own.
    """

    def __init__(
        self,
        comm: Communicator,
        weights: Sequence[Tensors],
        fresh_landing: Callable[[], Sequence[Tensors] | None] = lambda: None,
    ) -> None:
        self.comm = comm
        self._fresh_landing = fresh_landing
        self._memory = [[_memory(tensor) for tensor in layer] for layer in weights]
        self._cycle: Cycle | None = None

    # --- on vLLM's worker thread -------------------------------------------------------------------------------------

    def begin(self, old: npt.ArrayLike, new: npt.ArrayLike) -> None:
        """Agree on a rearrangement of all layers; collective. A failure surfaces at the first layer that moves.

        Parameters
        ----------
        old, new : array-like of int, [num_moe_layers, num_physical_experts]
            Logical expert of every physical slot.
        """
        cycle = Cycle(np.array(old, dtype=np.int64), np.array(new, dtype=np.int64))
        try:
            self.cancel()
            self._make_usable()
            self._begun(cycle, self.comm.begin(cycle.old, cycle.new))
        except Exception as error:
            cycle.failure = error
        self._cycle = cycle

    def stage(self, layer: int, old_row: npt.ArrayLike, new_row: npt.ArrayLike, tensors: Tensors) -> CoreTransfer:
        """Bring a layer's rows into landing memory on every rank, and decide about it; collective.

        Parameters
        ----------
        layer : int
            Index of the layer.
        old_row, new_row : array-like of int, [num_physical_experts]
            Its placements. Where they are not those of the rearrangement that was begun, one of this layer alone is
            begun.
        tensors : sequence of torch.Tensor
            ``[num_tensors]``, the layer's weights.

        Returns
        -------
        CoreTransfer
            With the error, where it failed.
        """
        old_row, new_row = np.array(old_row, dtype=np.int64), np.array(new_row, dtype=np.int64)
        cycle = self._cycle
        if cycle is None or not cycle.covers(layer, old_row, new_row):
            cycle = self._begin_one(layer, old_row, new_row)
        if not cycle.moves(layer):
            return CoreTransfer(self, layer)
        if cycle.failure is None:
            try:
                self._stage(cycle, layer, tensors)
            except Exception as error:
                cycle.failure = error
                if layer in self.comm.report.decided_layers:  # every rank commits it; the failure is the next one's
                    cycle.staged = layer
                    return CoreTransfer(self, layer)
        if cycle.failure is None:
            return CoreTransfer(self, layer)
        is_first, cycle.told = not cycle.told, True
        return CoreTransfer(self, layer, cycle.failure, is_first)

    def _begin_one(self, layer: int, old_row: IntArray, new_row: IntArray) -> Cycle:
        cycle = Cycle(old_row[None], new_row[None], layer)
        try:
            self.cancel()
            self._make_usable()
            self._begun(cycle, self.comm.begin(old_row, new_row, layer=layer))
        except Exception as error:
            cycle.failure = error
        self._cycle = cycle
        return cycle

    def _begun(self, cycle: Cycle, gen: Rearrangement) -> None:
        cycle.left = len(gen.layers)
        if cycle.left:
            cycle.gen = gen
        else:
            gen.end()

    def _stage(self, cycle: Cycle, layer: int, tensors: Tensors) -> None:
        gen = cycle.gen
        if gen is None or layer not in gen.layers:  # nothing moves: a slot becomes empty
            return
        if cycle.staged is not None:  # vLLM has dropped it, which it does on every rank
            gen.discard(cycle.staged)
            cycle.left -= 1
            cycle.staged = None
        problem = self._moved(layer, tensors)
        if problem is not None:
            raise gen.abort(problem)
        gen.stage(layer)
        cycle.staged = layer

    # --- on vLLM's main thread ---------------------------------------------------------------------------------------

    def commit(self, layer: int) -> None:
        """Copy a staged layer's rows into the live rows of this rank; local, on the current stream.

        Raises
        ------
        CommitError
            A copy failed: this rank's weights are invalid.
        """
        cycle = self._cycle
        if cycle is None or cycle.gen is None or cycle.staged != layer:
            return
        cycle.gen.commit(layer)
        cycle.staged = None
        cycle.left -= 1
        if not cycle.left and cycle.failure is None:
            cycle.gen.end()
            cycle.gen = None

    def cancel(self) -> None:
        """Drop what is open, uncommitted; no row is written. Collective, at the same layer on every rank.

        Raises
        ------
        EplbError
            A member is gone, or did not come. Nothing is open afterwards all the same.
        """
        cycle, self._cycle = self._cycle, None
        if cycle is None or cycle.gen is None:
            return
        gen, staged = cycle.gen, cycle.staged
        try:
            if cycle.failure is None:
                gen.cancel()
                staged = None
        finally:
            if staged is not None:  # it is over, and no rank commits this layer: vLLM has dropped it on all of them
                gen.discard(staged)

    def rearrange(self, old: npt.ArrayLike, new: npt.ArrayLike, weights: Sequence[Tensors]) -> None:
        """Bring all layers from one placement to another; collective and synchronous.

        Parameters
        ----------
        old, new : array-like of int, [num_moe_layers, num_physical_experts]
            Logical expert of every physical slot.
        weights : sequence of sequence of torch.Tensor
            ``[num_moe_layers][num_tensors]``, as vLLM has them now.

        Raises
        ------
        RearrangeFailedError
            With the placement that holds now on every rank.
        """
        old = np.array(old, dtype=np.int64)
        begun = False
        try:
            self.cancel()
            self._make_usable()
            gen = self.comm.begin(old, np.array(new, dtype=np.int64))
            begun = True
            problem = next(
                (problem for layer in gen.layers if (problem := self._moved(layer, weights[layer])) is not None), None
            )
            if problem is not None:
                raise gen.abort(problem)
            gen.run()
        except Exception as error:
            holds = self.comm.report.physical_to_logical_map if begun else old
            raise RearrangeFailedError(error, holds, final=self.is_final(error)) from error

    def is_final(self, error: Exception) -> bool:
        """Can no placement be vouched for after this error: weights invalid, or layers in doubt?"""
        return isinstance(error, CommitError) or bool(self.comm.report.layers_in_doubt)

    def close(self, force: bool = False) -> None:
        """Release everything; see `Communicator.close`."""
        self._cycle = None
        self.comm.close(force=force)

    # --- what both need ----------------------------------------------------------------------------------------------

    def _make_usable(self) -> None:
        if self.comm.poisoned is None:
            return
        limit_s = float(self.comm.config.timeout_s)
        try:
            self.comm.rebuild(limit_s)
        except TransferError as error:
            # The landing rows that vLLM gave may still be written by a transfer that nothing could stop.
            landing = self._fresh_landing() if error.code == "EPLB-T009" else None
            if landing is None:
                raise
            self.comm.rebuild(limit_s, landing=landing)

    def _moved(self, layer: int, tensors: Tensors) -> str | None:
        """Say whether a layer's tensors are no longer those that were registered."""
        try:
            if [_memory(tensor) for tensor in tensors] == self._memory[layer]:
                return None
        except Exception as error:  # the other ranks are not to wait for this one
            return f"vLLM's weights of layer {layer} cannot be looked at: {type(error).__name__}: {error}"
        return f"vLLM's weights of layer {layer} are in other memory than when the communicator was built"


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
