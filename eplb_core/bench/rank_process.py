"""A rank's own side of `launch`: takes its job from stdin, reports through a pipe, and ends when its parent does.

The rank that hosts the store stays until the launcher lets it go: the others may still be reading.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from eplb_core.errors import EplbError

_CONNECT_S = 60.0


def main() -> int:
    """Run one rank; its exit status is 0 when the function returned."""
    job = _read_job()
    may_leave = threading.Event()
    threading.Thread(target=_end_with_parent, args=(may_leave,), name="eplb-lifeline", daemon=True).start()
    os.set_inheritable(job["events_fd"], False)
    connect = functools.cache(lambda: _store(job))  # kept, for what hosts the store would end with its last reference
    status = _run(job, connect)
    if job["listen_fd"] is not None:
        may_leave.wait()  # the launcher ends this process at its limit, and the lifeline when the launcher ends
    return status


def _run(job: Mapping[str, Any], connect: Callable[[], Any]) -> int:
    with os.fdopen(job["events_fd"], "w", encoding="ascii") as events:

        def emit(kind: str, data: Mapping[str, Any]) -> None:
            events.write(json.dumps({"kind": kind, "data": data}) + "\n")
            events.flush()

        try:
            module, _, function = job["target"].partition(":")
            run = getattr(importlib.import_module(module), function)
            run(job["payload"], job["rank"], job["world_size"], connect, emit)
        except BaseException as error:
            code = error.code if isinstance(error, EplbError) else ""
            text = {"error": type(error).__name__, "code": code, "message": str(error), "trace": traceback.format_exc()}
            emit("failed", text)
            return 1
        emit("finished", {})
        return 0


def _read_job() -> dict[str, Any]:
    # Unbuffered, as in _end_with_parent: a thread that holds stdin's buffer lock at exit is fatal to the interpreter.
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            sys.exit("no job: this module is run by eplb_core.bench.launch")
        line += piece
    job: dict[str, Any] = json.loads(line)
    return job


def _end_with_parent(may_leave: threading.Event) -> None:
    while os.read(0, 1 << 10):  # after the job, the parent says one thing only: leave
        may_leave.set()
    os._exit(1)


def _store(job: Mapping[str, Any]) -> Any:
    """Connect to the store of this launch, which rank 0 hosts; imports torch, so only for ranks that ask for it."""
    dist: Any = importlib.import_module("torch.distributed")
    return dist.TCPStore(
        "127.0.0.1",
        job["port"],
        job["world_size"],
        is_master=job["listen_fd"] is not None,
        timeout=timedelta(seconds=_CONNECT_S),
        wait_for_workers=False,
        master_listen_fd=job["listen_fd"],
    )


if __name__ == "__main__":
    sys.exit(main())
