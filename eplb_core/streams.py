"""Device streams and events, in terms that every torch accelerator has; on CPU there is nothing to wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Streams:
    """The streams of one communicator.

    Parameters
    ----------
    device : torch.device
        Where the weights live.
    stream : torch.Stream or None
        For the backend's own copies; None is a stream of our own, or nothing on CPU.
    """

    def __init__(self, device: torch.device, stream: Any | None) -> None:
        import torch

        self._device = device
        self._is_cpu = device.type == "cpu"
        self.side: Any = None if self._is_cpu else stream if stream is not None else torch.Stream(device=device)

    def mark(self) -> Any:
        """Record an event after everything that the caller has enqueued on its current stream; None on CPU."""
        if self._is_cpu:
            return None
        import torch

        event = torch.Event(device=self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def hold_side_until(self, event: Any) -> None:
        """Let the side stream start nothing before an event of `mark`."""
        if event is not None:
            self.side.wait_event(event)

    @staticmethod
    def synchronise(event: Any) -> None:
        """Block this thread until an event of `mark` has happened on the device."""
        if event is not None:
            event.synchronize()
