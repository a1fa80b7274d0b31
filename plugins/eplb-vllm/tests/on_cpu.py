"""The real vLLM on a machine without an accelerator: what has to stand in for one, and ranks that share its import.

Importing vLLM takes ten seconds, so ranks are forks of the process that runs the tests, made before any thread or
group exists in it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

VLLM = "vllm"
SKIP = "vLLM is not installed here; 'make vllm' makes an environment that has it"


def is_there() -> bool:
    return importlib.util.find_spec(VLLM) is not None


class NoStream:
    """A stream without effect: everything is done when it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    wait_event = wait_stream = record_event = lambda self, *args: None


class NoEvent:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    record = synchronize = wait

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def stand_in_for_an_accelerator(world_size: int = 4) -> None:
    """Let vLLM's EPLB code run unchanged on host memory."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    import torch

    torch.set_num_threads(1)
    accelerator = torch.accelerator
    accelerator.current_accelerator = lambda *a, **k: torch.device("cpu")
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: world_size
    accelerator.set_device_index = lambda *a: None
    accelerator.current_device_index = lambda: 0
    accelerator.current_stream = lambda *a: NoStream()
    accelerator.set_stream = lambda *a: None
    accelerator.synchronize = lambda *a: None
    torch.Stream, torch.Event = NoStream, NoEvent

    from vllm.distributed.eplb import eplb_communicator, eplb_state

    eplb_communicator.PIN_MEMORY = eplb_state.PIN_MEMORY = False


def let_its_nixl_use_host_memory() -> None:
    """Have vLLM's factory build its own NIXL communicator over host memory; call it before the plugin patches."""
    from vllm.distributed.eplb import eplb_communicator, eplb_state

    class Host(eplb_communicator.NixlEplbCommunicator):
        def _init_step(self, *args: Any, **kwargs: Any) -> None:
            self._nixl_memory_type = "DRAM"
            super()._init_step(*args, **kwargs)

    factory = eplb_communicator.create_eplb_communicator

    @functools.wraps(factory)
    def create_eplb_communicator(group_coordinator, backend, expert_weights, expert_buffer):
        if backend == "nixl":
            group = group_coordinator.cpu_group
            return Host(cpu_group=group, all_expert_weights=expert_weights, expert_buffer=expert_buffer)
        return factory(group_coordinator, backend, expert_weights, expert_buffer)

    eplb_communicator.create_eplb_communicator = eplb_state.create_eplb_communicator = create_eplb_communicator


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# --- ranks -----------------------------------------------------------------------------------------------------------


def _rank(function: Callable[..., Any], rank: int, args: tuple[Any, ...], out: Any) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NIXL_LOG_LEVEL="ERROR", RES_OPTIONS="attempts:0")
    try:
        out.put((rank, function(rank, *args), None))
    except BaseException:
        out.put((rank, None, traceback.format_exc()))
    out.close()
    out.join_thread()
    with contextlib.suppress(BaseException):
        import sys

        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # vLLM's worker is a daemon thread that waits for good


def run(world_size: int, function: Callable[..., Any], *args: Any, limit_s: float = 150.0, gone: tuple = ()) -> list:
    """Run a function on forked ranks and return what each returned; those of `gone` may end without a word."""
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    processes = [context.Process(target=_rank, args=(function, rank, args, out)) for rank in range(world_size)]
    for process in processes:
        process.start()
    values: dict[int, Any] = dict.fromkeys(gone)
    deadline = time.monotonic() + limit_s
    try:
        while len(values) < world_size:
            try:
                rank, value, error = out.get(timeout=0.2)
            except queue.Empty:
                silent = [r for r, p in enumerate(processes) if r not in values and not p.is_alive()]
                if time.monotonic() > deadline or (silent and out.empty()):
                    late = [r for r in range(world_size) if r not in values]
                    raise AssertionError(f"no answer from ranks {late} within {limit_s:g} s") from None
                continue
            assert error is None, f"rank {rank}:\n{error}"
            values[rank] = value
        return [values[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join(5.0)
