"""One NCCL communicator among the members: made within a limit, fed with batches in order, ended one way or another."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from eplb_core.backend import BackendContext
from eplb_core.backend.toolkit import RowMove, Wait
from eplb_core.errors import TransferError
from eplb_pynccl.binding import Binding, NcclError
from eplb_pynccl.hooks import NAME
from eplb_pynccl.streams import OperationStream

_ABORT_LIMIT_S = 0.8
_FINALIZE_LIMIT_S = 5.0


@dataclass(eq=False)
class Batch:
    """Operations that start together, and how far they are."""

    operations: Sequence[RowMove]
    mark: Any = None
    """On the stream, after them; None until NCCL has launched them."""
    done: bool = False

    @property
    def peers(self) -> set[int]:
        """Ranks at the other ends."""
        return {operation.peer for operation in self.operations}


@dataclass(eq=False)
class _Bounded:
    """A call into NCCL that may block, in a thread of its own."""

    call: Callable[[], Any] | None
    result: Any = None
    error: Exception | None = None
    finished: threading.Event = field(default_factory=threading.Event)

    def start(self, name: str) -> _Bounded:
        # A daemon: what NCCL never returns from must not keep the process. Whoever started it reports that.
        threading.Thread(target=self._run, name=name, daemon=True).start()
        return self

    def _run(self) -> None:
        call, self.call = self.call, None  # it refers to the one that keeps this
        try:
            self.result = call() if call is not None else None
        except Exception as error:
            self.error = error
        self.finished.set()


class Connection:
    """An NCCL communicator of this rank and the other members.

    Parameters
    ----------
    binding : Binding
        Binding through which NCCL is called.
    stream : OperationStream
        What operations are queued on.
    context : BackendContext
        Says who the members are, and what was called off.
    unique_id : bytes
        Shared by the members.
    expected : iterable of int
        Ranks to name when they do not come; without any, all the others.
    wait : Wait
        Limit of the construction.

    Raises
    ------
    NcclError
        NCCL refused, or failed.
    StalledError, TransferError
        Members did not come within the limit, or the construction was cancelled.
    """

    def __init__(
        self,
        binding: Binding,
        stream: OperationStream,
        context: BackendContext,
        *,
        unique_id: bytes,
        expected: Iterable[int],
        wait: Wait,
    ) -> None:
        self._binding = binding
        self._stream = stream
        self._context = context
        self._place = {member: place for place, member in enumerate(context.members)}
        self._waiting: deque[Batch] = deque()
        self._launched: deque[Batch] = deque()
        self._launching: Batch | None = None
        self._ended = False
        others = [rank for rank in context.members if rank != context.rank]
        self._handle = self._init(unique_id, list(expected) or others, wait)

    # --- batches --------------------------------------------------------------------------------------------------

    def enqueue(self, batches: Sequence[Batch]) -> None:
        """Put batches into the queue; they start in this order, each when NCCL has taken the one before it."""
        self._waiting.extend(batches)

    def advance(self) -> None:
        """Launch what can be launched, note what is complete; never blocks where the binding does not.

        Raises
        ------
        NcclError
            NCCL or the device reports a failure.
        """
        if self._ended:
            raise NcclError("the communicator was aborted")
        try:
            while not self._binding.in_progress(self._handle):
                if self._launching is not None:
                    # Not before: until NCCL says so the operations may not be on the stream yet.
                    self._launching.mark = self._stream.mark()
                    self._launched.append(self._launching)
                    self._launching = None
                if not self._waiting:
                    break
                batch = self._waiting.popleft()
                self._launch(batch)
                self._launching = batch
            over = list(itertools.takewhile(lambda batch: self._stream.reached(batch.mark), self._launched))
            if over:
                # Asked after the marks: a group that fails leaves the stream just as one that came through does.
                self._binding.in_progress(self._handle)
            for batch in over:
                self._launched.popleft()
                batch.done = True
        except RuntimeError as error:  # the device's own
            raise NcclError(f"the device failed: {error}") from error

    def finish(self, batches: Sequence[Batch], wait: Wait) -> None:
        """Advance until these batches are complete, on the device too.

        Raises
        ------
        NcclError
            See `advance`.
        StalledError, TransferError
            The limit ran out, or the wait was cancelled.
        """
        self.advance()
        while silent := silent_in(batches):
            wait.pause(silent)
            self.advance()

    def abort(self) -> bool:
        """Stop everything outstanding, within a second.

        Returns
        -------
        bool
            True when NCCL has let go of everything, and nothing is queued on the stream any more.
        """
        if not self._ended:
            self._ended = True
            call = _Bounded(lambda: self._binding.abort(self._handle)).start("eplb-pynccl-abort")
            self._ending = call
        if not self._ending.finished.wait(_ABORT_LIMIT_S) or self._ending.error is not None:
            return False
        self._waiting.clear()
        try:
            return self._stream.reached(self._stream.mark())
        except RuntimeError:
            return False

    def close(self) -> None:
        """Flush and free the communicator, on which nothing may be outstanding; abort it when that takes too long.

        Raises
        ------
        NcclError
            NCCL refused.
        """
        if self._ended:
            return
        wait = Wait(self._context, _FINALIZE_LIMIT_S, label=NAME, where="phase close")
        try:
            self._binding.finalize(self._handle)
            while self._binding.in_progress(self._handle):
                wait.pause("NCCL")
        except (NcclError, TransferError):
            self.abort()
            return
        self._ended = True
        self._ending = _Bounded(lambda: self._binding.destroy(self._handle)).start("eplb-pynccl-destroy")
        self._ending.finished.wait(wait.deadline.left_s)
        if isinstance(self._ending.error, NcclError):
            raise self._ending.error

    # --- behind it ------------------------------------------------------------------------------------------------

    def _init(self, unique_id: bytes, expected: Sequence[int], wait: Wait) -> Any:
        size, own = len(self._place), self._place[self._context.rank]
        if not self._binding.nonblocking:
            return self._init_blocking(lambda: self._binding.init(size, unique_id, own), expected, wait)
        handle = self._binding.init(size, unique_id, own)
        try:
            while self._binding.in_progress(handle):
                wait.pause(expected)
        except (NcclError, TransferError):
            _Bounded(lambda: self._binding.abort(handle)).start("eplb-pynccl-abort").finished.wait(_ABORT_LIMIT_S)
            raise
        return handle

    def _init_blocking(self, make: Callable[[], Any], expected: Sequence[int], wait: Wait) -> Any:
        def init() -> Any:
            with self._stream.copy_order():  # the current device is a thread's own
                return make()

        call = _Bounded(init).start("eplb-pynccl-init")
        while not call.finished.is_set():
            wait.pause(expected)
        if call.error is not None:
            raise call.error
        return call.result

    def _launch(self, batch: Batch) -> None:
        """Hand one group to NCCL, and close it whatever happens: an open one swallows this thread's next calls."""
        self._binding.group_start()
        try:
            for peer, is_send, buffer in batch.operations:
                operate = self._binding.send if is_send else self._binding.receive
                operate(self._handle, buffer.data_ptr(), buffer.numel(), self._place[peer], self._stream.pointer)
        except BaseException:
            with suppress(NcclError):
                self._binding.group_end()
            raise
        self._binding.group_end()


def silent_in(batches: Iterable[Batch]) -> list[int]:
    """Return the peers of batches that are not complete; which of them it is, NCCL does not say."""
    return sorted({peer for batch in batches if not batch.done for peer in batch.peers})
