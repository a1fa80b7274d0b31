"""The stream that operations are queued on, as NCCL and this backend see it."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class OperationStream(Protocol):
    """A device stream: its address for NCCL, and marks that say how far it has come."""

    pointer: int
    """Never 0: the default stream would order itself against every other one of the host's."""

    def mark(self) -> Any:
        """Return a mark after everything that is queued."""
        ...

    def reached(self, mark: Any) -> bool:
        """Is everything before the mark done? RuntimeError when the device failed."""
        ...

    def copy_order(self) -> Any:
        """Return a context manager inside which torch queues on this stream, and this is the current device."""
        ...


class CudaStream:
    """See `OperationStream`.

    Parameters
    ----------
    stream : torch.Stream
        The backend's own, from its context.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._stream: Any = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        self.pointer = int(self._stream.cuda_stream)

    def mark(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def copy_order(self) -> Any:
        return torch.cuda.stream(self._stream)
