"""Tokens per physical expert of one rank, added up where they are counted, without waiting for a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_core.errors import PlanError

if TYPE_CHECKING:
    import torch

_NEVER = -1


class TokenCounter:
    """Adds what one rank records, step by step, and gives the sums away.

    Where the sums live is settled by the first counts: on the host, or on their device, added by kernels on the
    caller's current stream. Nothing here waits for a device.

    Parameters
    ----------
    num_layers, num_physical_experts : int
        Of the model: all MoE layers, and the slots of all ranks.

    Notes
    -----
    A step's own counts stay apart until the layer is recorded again, for a step may turn out to have been a dummy. So
    nothing is added when a step ends, and layers that are not recorded cost nothing.

    On the host sums are float64, exact for whole tokens up to 2**53; on a device they are int64 unless the counts are
    floating-point numbers.
    """

    def __init__(self, num_layers: int, num_physical_experts: int) -> None:
        self._shape = (num_layers, num_physical_experts)
        self._recorded_at = [_NEVER] * num_layers
        self._sums: torch.Tensor | None = None
        self._of_step: torch.Tensor | None = None

    def record(self, layer: int, counts: object, step: int) -> None:
        """Add the counts of one layer in one step.

        Parameters
        ----------
        layer : int
            Which MoE layer.
        counts : numpy.ndarray or torch.Tensor, real [num_physical_experts]
            This rank's tokens for each physical expert of all ranks.
        step : int
            Of which forward step; the steps of a layer do not decrease.

        Raises
        ------
        PlanError
            EPLB-P008: no such layer, another shape, no real numbers, or another device than before. Values are not
            looked at here, for that would wait for the device; `LoadSnapshot.of_logical_experts` does.
        """
        self._check_layer(layer)
        tensor = self._checked(layer, counts)
        sums, of_step = self._room(layer, tensor)
        before, self._recorded_at[layer] = self._recorded_at[layer], step
        if before == step:
            of_step[layer].add_(tensor.to(of_step.dtype))
            return
        if before != _NEVER:
            sums[layer].add_(of_step[layer])
        of_step[layer].copy_(tensor)

    def drop_step(self, step: int) -> None:
        """Forget what was recorded in a step."""
        if step in self._recorded_at:
            self._recorded_at = [_NEVER if at == step else at for at in self._recorded_at]

    def take(self) -> torch.Tensor | None:
        """Give the sums away, [num_layers, num_physical_experts], and begin at zero; None when nothing was recorded."""
        if self._sums is None or self._of_step is None:
            return None
        for layer, at in enumerate(self._recorded_at):
            if at != _NEVER:
                self._sums[layer].add_(self._of_step[layer])
        taken, self._sums = self._sums, self._sums.new_zeros(self._shape)
        self._recorded_at = [_NEVER] * self._shape[0]
        return taken

    def take_layer(self, layer: int) -> torch.Tensor | None:
        """Give one layer's sums away, [num_physical_experts], and begin it at zero; None when nothing was recorded."""
        if self._sums is None or self._of_step is None:
            return None
        taken = self._sums[layer].clone()
        if self._recorded_at[layer] != _NEVER:
            taken.add_(self._of_step[layer])
        self._sums[layer].zero_()
        self._recorded_at[layer] = _NEVER
        return taken

    def _room(self, layer: int, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        if self._sums is None or self._of_step is None:
            whole = counts.device.type != "cpu" and not counts.is_floating_point()
            dtype = torch.int64 if whole else torch.float64
            self._sums = torch.zeros(self._shape, dtype=dtype, device=counts.device)
            self._of_step = torch.zeros_like(self._sums)
        elif counts.device != self._sums.device:
            problem = f"the counts of layer {layer} are on {counts.device}, earlier ones were on {self._sums.device}"
            raise PlanError("EPLB-P008", problem=problem)
        elif counts.is_floating_point() and not self._sums.is_floating_point():
            self._sums, self._of_step = self._sums.double(), self._of_step.double()
        return self._sums, self._of_step

    def _check_layer(self, layer: object) -> None:
        if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)) or not 0 <= layer < self._shape[0]:
            raise PlanError("EPLB-P008", problem=f"layer {layer!r} is none of the {self._shape[0]} layers")

    def _checked(self, layer: int, counts: Any) -> torch.Tensor:
        import torch

        if isinstance(counts, torch.Tensor):
            tensor, real = counts.detach(), not counts.is_complex()
        else:
            try:
                array = np.asarray(counts)
            except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, arrays of a host's own kind
                problem = f"the counts of layer {layer} cannot be read as an array: {error}"
                raise PlanError("EPLB-P008", problem=problem) from error
            real = array.dtype.kind in "biuf"
            # torch has not every integer type of numpy's; float64 has all of their tokens.
            tensor = torch.from_numpy(array.astype(np.float64)) if real else torch.empty(array.shape)
        if not real or tuple(tensor.shape) != self._shape[1:]:
            found = f"{counts.dtype if hasattr(counts, 'dtype') else type(counts).__name__} {list(tensor.shape)}"
            problem = f"the counts of layer {layer} should be real [{self._shape[1]}], one per physical expert"
            raise PlanError("EPLB-P008", problem=f"{problem}, got {found}")
        return tensor
