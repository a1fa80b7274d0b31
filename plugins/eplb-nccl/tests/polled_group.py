"""A process group as NCCL's is: work that can be polled, batches that coalesce, an abort; over gloo, on the CPU."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist


class PolledWork:
    """Completes by itself, as work on a device does."""

    def __init__(self, works) -> None:
        self._works = works
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for work in self._works:
                work.wait(timedelta(seconds=20))
        except RuntimeError as error:
            self.error = str(error)
        self._works = []


class PolledGroup(dist.ProcessGroup):
    """Delegates to a gloo group; what a failed work says shows in `get_error`, as with NCCL."""

    def __init__(self, gloo) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self._gloo = gloo
        self._open: list | None = None
        self._all: list[PolledWork] = []
        self.aborted = False
        self.groups: list[int] = []
        self.fail_at: int | None = None
        """Refuse the n-th operation of the next batch."""

    def rank(self) -> int:
        return self._gloo.rank()

    def size(self) -> int:
        return self._gloo.size()

    def _get_backend(self, device):
        return SimpleNamespace(
            supports_coalescing=True, name=lambda: "polled", abort=self._abort, get_error=self._get_error
        )

    def _start_coalescing(self, device) -> None:
        assert self._open is None
        self._open = []

    def _end_coalescing(self, device):
        works, self._open = self._open, None
        self.groups.append(len(works))
        return self._polled(works)

    def send(self, tensors, peer, tag):
        return self._operate(self._gloo.send, tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        return self._operate(self._gloo.recv, tensors, peer, tag)

    def allreduce(self, tensors):
        return self._polled([self._gloo.allreduce(tensors)])

    @property
    def open(self) -> bool:
        """Was a batch begun and not ended?"""
        return self._open is not None

    def _operate(self, call, tensors, peer, tag):
        assert self._open is not None
        if self.fail_at == len(self._open):
            raise RuntimeError("ncclInternalError: the injected one")
        self._open.append(call(tensors, peer, tag))

    def _polled(self, works):
        work = PolledWork(works)
        self._all.append(work)
        return work

    def _abort(self) -> None:
        self.aborted = True
        for peer in range(self.size()):
            if peer != self.rank():
                try:
                    self._gloo.recv([_NOTHING()], peer, 999).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue

    def _get_error(self):
        failed = any(work.is_completed() and work.error for work in self._all)
        return SimpleNamespace(value=3 if failed else 0, name="REMOTE_ERROR" if failed else "SUCCESS")


def _NOTHING():
    import torch

    return torch.empty(1, dtype=torch.uint8)
