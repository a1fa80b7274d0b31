"""Device streams and events through the API that every torch accelerator has; on CPU there is nothing to wait for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from eplb_core.errors import error_for

if TYPE_CHECKING:
    import torch


class Streams:
    """The streams of one communicator; on CPU there are none, and nothing is waited for.

    Notes
    -----
    ``side`` is for the backend's own copies: the host's ``stream``, or one of our own.
    """

    def __init__(self, device: torch.device, stream: Any | None, timeout_s: float) -> None:
        import torch

        self._device = device
        self._timeout_s = timeout_s
        self._is_cpu = device.type == "cpu"
        self.side: Any = None if self._is_cpu else stream if stream is not None else torch.Stream(device=device)

    def mark(self) -> Any:
        """Record an event after everything that the caller has enqueued on its current stream; None on CPU."""
        if self._is_cpu:
            return None
        import torch

        event = torch.Event(device=self._device)
        # By name, for the current stream depends on the calling thread.
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def wait_for(self, events: Iterable[Any]) -> None:
        """Block this thread until the events have happened, at most for the communicator's limit (EPLB-T002).

        Notes
        -----
        It polls: ``synchronize`` has no limit, and a device may hang.
        """
        until = time.monotonic() + self._timeout_s
        for event in events:
            pause_s = 20e-6
            while event is not None and not event.query():
                if time.monotonic() >= until:
                    raise error_for(
                        "EPLB-T002",
                        seconds=self._timeout_s,
                        where="this rank's own stream",
                        waiting_for=str(self._device),
                    )
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, 1e-3)
