"""Tokens per physical expert of one rank, added up where they are counted, without waiting for a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from eplb_core.errors import PlanError

if TYPE_CHECKING:
    import torch

Sums: TypeAlias = "npt.NDArray[np.float64] | torch.Tensor"
"""Of numpy on the host, where small additions cost it a tenth of what they cost torch; of torch on a device."""

_NEVER = -1


class TokenCounter:
    """Adds what one rank records, step by step, and gives the sums away.

    Where the sums live is settled by the first counts: on the host, or on their device, added by kernels on the
    caller's current stream. Nothing here waits for a device.

    Parameters
    ----------
    num_layers, num_physical_experts : int
        All MoE layers of the model, and the slots of all ranks.

    Notes
    -----
    A step's own counts stay apart until the layer is recorded again, for a step may turn out to have been a dummy. So
    nothing is added when a step ends, and layers that are not recorded cost nothing.

    On the host sums are float64, exact for whole tokens up to 2**53; on a device they are int64 unless the counts are
    floating-point numbers.
    """

    def __init__(self, num_layers: int, num_physical_experts: int) -> None:
        self._shape = (num_layers, num_physical_experts)
        self._layers = range(num_layers)
        self._recorded_at = [_NEVER] * num_layers
        self._sums: Any = None  # Sums, of one kind or the other
        self._of_step: Any = None
        self._sum_rows: list[Any] = []
        self._step_rows: list[Any] = []

    def record(self, layer: int, counts: object, step: int) -> None:
        """Add the counts of one layer in one step.

        Parameters
        ----------
        layer : int
            Number of the MoE layer.
        counts : numpy.ndarray or torch.Tensor, real [num_physical_experts]
            This rank's tokens for each physical expert of all ranks.
        step : int
            Forward step in which they were counted; the steps of a layer do not decrease.

        Raises
        ------
        PlanError
            EPLB-P010: no such layer, another shape, no real numbers, or another device than before. Values are not
            looked at here, for that would wait for the device; `LoadSnapshot.of_logical_experts` does.
        """
        layer, numbers = self.check(layer, counts)
        if self._sums is None or type(numbers) is not type(self._sums) or not isinstance(numbers, np.ndarray):
            self._make_room(layer, numbers)
        before, self._recorded_at[layer] = self._recorded_at[layer], step
        of_step = self._step_rows[layer]
        if before == step:
            of_step += numbers
            return
        if before != _NEVER:
            self._sum_rows[layer] += of_step
        of_step[:] = numbers

    def check(self, layer: int, counts: object) -> tuple[int, Any]:
        """Return them as `record` needs them; what it refuses is refused (EPLB-P010)."""
        if type(layer) is not int or layer not in self._layers:
            layer = self._checked_layer(layer)
        if type(counts) is not np.ndarray or counts.dtype.kind not in "iuf" or counts.shape != self._shape[1:]:
            return layer, self._checked(layer, counts)
        return layer, counts

    def drop_step(self, step: int) -> None:
        """Forget what was recorded in a step."""
        if step in self._recorded_at:
            self._recorded_at = [_NEVER if at == step else at for at in self._recorded_at]

    def take(self) -> Sums | None:
        """Give the sums away, [num_layers, num_physical_experts], and begin at zero; None when nothing was recorded."""
        if self._sums is None:
            return None
        for layer, at in enumerate(self._recorded_at):
            if at != _NEVER:
                self._sum_rows[layer] += self._step_rows[layer]
        taken: Sums = self._sums
        self._recorded_at = [_NEVER] * self._shape[0]
        self._sums = np.zeros_like(taken) if isinstance(taken, np.ndarray) else taken.new_zeros(self._shape)
        self._sum_rows = list(self._sums)
        return taken

    def take_layer(self, layer: int) -> Sums | None:
        """Give one layer's sums away, [num_physical_experts], and begin it at zero; None when nothing was recorded."""
        if self._sums is None:
            return None
        taken: Sums = self._sum_rows[layer] + 0
        if self._recorded_at[layer] != _NEVER:
            taken += self._step_rows[layer]
        self._sum_rows[layer][:] = 0
        self._recorded_at[layer] = _NEVER
        return taken

    def _make_room(self, layer: int, counts: Any) -> None:
        import torch

        where = "cpu" if isinstance(counts, np.ndarray) else counts.device
        if self._sums is None:
            if isinstance(counts, np.ndarray):
                self._sums, self._of_step = np.zeros(self._shape), np.zeros(self._shape)
            else:
                dtype = torch.float64 if counts.is_floating_point() else torch.int64
                self._sums = torch.zeros(self._shape, dtype=dtype, device=counts.device)
                self._of_step = torch.zeros_like(self._sums)
        else:
            held = "cpu" if isinstance(self._sums, np.ndarray) else self._sums.device
            if held != where:
                problem = f"the counts of layer {layer} are on {where}, earlier ones were on {held}"
                raise PlanError("EPLB-P010", problem=problem)
            if isinstance(counts, np.ndarray) or not counts.is_floating_point() or self._sums.dtype == torch.float64:
                return
            self._sums, self._of_step = self._sums.double(), self._of_step.double()
        self._sum_rows, self._step_rows = list(self._sums), list(self._of_step)

    def _checked_layer(self, layer: object) -> int:
        if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)) or int(layer) not in self._layers:
            raise PlanError("EPLB-P010", problem=f"layer {layer!r} is none of the {self._shape[0]} layers")
        return int(layer)

    def _checked(self, layer: int, counts: Any) -> Sums:
        """Return counts as an array of numpy's when they are on the host, else as the tensor that they are."""
        import torch

        found: Any = counts
        try:
            if isinstance(counts, torch.Tensor):
                real, shape = _is_real(counts), tuple(counts.shape)
                found = counts.detach()
                if real and counts.device.type == "cpu":  # numpy has no bfloat16, and no view that is yet to be negated
                    plain = not counts.is_floating_point() or counts.dtype in (torch.float64, torch.float32)
                    found = (found if plain else found.double()).resolve_neg().numpy()
            else:
                found = np.asarray(counts)
                real, shape = found.dtype.kind in "biuf", found.shape
        except Exception as error:  # ragged lists, arrays of a host's own kind: what they raise is theirs to choose
            problem = f"the counts of layer {layer} cannot be read as an array: {error}"
            raise PlanError("EPLB-P010", problem=problem) from error
        if not real or shape != self._shape[1:]:
            problem = f"the counts of layer {layer} should be real [{self._shape[1]}], one per physical expert"
            kind = counts.dtype if hasattr(counts, "dtype") else type(counts).__name__
            raise PlanError("EPLB-P010", problem=f"{problem}, got {kind} {list(shape)}")
        return cast("Sums", found)


def _is_real(counts: torch.Tensor) -> bool:
    """Are they plain real numbers: neither sparse nor quantized?"""
    import torch

    return not (counts.is_complex() or counts.is_quantized) and counts.layout == torch.strided
