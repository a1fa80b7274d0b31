"""A fake accelerator for tests: the torch device ``eplbdev``, whose streams and events a test holds in its hand.

`load` (or `require`, which skips the test where no C++ compiler is found) compiles ``fake_device.cpp`` once per source,
torch and compiler, and registers it as torch's PrivateUse1 device, for the rest of the process: from then on
``torch.accelerator`` means this device. Importing the module does nothing.

What is real: tensors of every dtype, views, copies, ``torch.Stream``, ``torch.Event``, ``torch.accelerator`` and
pinned host memory, on two devices (``eplbdev:0`` and ``eplbdev:1``). Copies and fills are queued on the current stream
and done by one thread, the device, also on the default stream. Only copies between host and device without
``non_blocking`` wait for their stream. Other operators run on the CPU over blocking copies; a view that would need that
is refused.

What it is stricter about than most devices, so that faults show every time:

- The host cannot touch device memory: reading it is SIGSEGV, a system call on it fails with EFAULT. torch's gloo does
  not look at the device of a tensor it sends, so this is what makes staging necessary: a small unstaged send raises
  "Bad address", a large one ends the process from gloo's own thread. Inside `host_access` the same address can be read
  and written by anything (memcpy, gloo, NIXL as DRAM).
- No copy with ``non_blocking=True`` is done early because its host memory is not pinned.
- Fresh and freed memory holds 0xDD. Memory is freed in the order of the stream it was allocated on; a copy still queued
  on another stream then reads 0xDD, unless ``Tensor.record_stream`` named that stream.

A wait for something that a test holds back for more than 60 s (`set_limit`) raises instead of hanging.
Call `reset` after each test.

Code that does not wait for an event reads stale bytes::

    stream = torch.Stream(device="eplbdev")
    with fake_device.held(stream), stream:
        landing.copy_(arrived, non_blocking=True)
        event = stream.record_event()
        assert not event.query()
        assert not torch.equal(landing.cpu(), arrived)  # .cpu() waits for its own stream, not for this one
    event.synchronize()
    assert torch.equal(landing.cpu(), arrived)

An event that nobody recorded counts as complete in torch; here it can be made to wait, singly or all of them::

    allocator.release(block, event=fake_device.unrecorded_event())  # query() is False until it is recorded, or `reset`
    with fake_device.unrecorded_events_wait():
        gen.stage(layer)  # here a torch.Event that is waited for but was never recorded does not complete

Rank processes started with the spawn method inherit ``sys.path``, so a child imports the module as its parent did and
loads it for itself; the tests put this folder's parent on the path::

    sys.path.insert(0, str(Path(__file__).parent / "support"))
    import fake_device

    def rank_main(rank):
        fake_device.load()
        weights = torch.empty(8, 64, device="eplbdev")
        fake_device.delay(torch.accelerator.current_stream(), 0.2)   # every copy there begins 0.2 s late
        ...
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "eplbdev"
NUM_DEVICES = 2
UNWRITTEN = 0xDD

SOURCE = Path(__file__).with_name("fake_device.cpp")
BUILD_DIR = SOURCE.parents[3] / "build" / "fake_device"
BUILD_LIMIT_S = 300.0

_library: ctypes.CDLL | None = None
_open = 0


def why_not() -> str | None:
    """Say why the device cannot be built here; None when it can."""
    if platform.system() != "Linux":
        return "the fake accelerator needs Linux (memfd_create)"
    if _compiler() is None:
        return "the fake accelerator needs a C++ compiler: install g++ or set CXX"
    return None


def require() -> torch.device:
    """Load the device, or skip the test with the reason."""
    import pytest

    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return load()


def load() -> torch.device:
    """Build the device where that was not done yet, register it with torch, and return ``eplbdev:0``.

    Raises
    ------
    RuntimeError
        It cannot be built, with the compiler's words, or another PrivateUse1 device is registered.
    """
    global _library
    if _library is None:
        library = ctypes.CDLL(str(_built()))
        library.eplbdev_pending.restype = library.eplbdev_memory_allocated.restype = ctypes.c_int64
        torch.utils.rename_privateuse1_backend(NAME)  # type: ignore[attr-defined]
        torch._register_device_module(NAME, _device_module())  # type: ignore[no-untyped-call]
        # The device thread must not touch torch while the process takes it down.
        atexit.register(library.eplbdev_stop)
        _library = library
    return torch.device(NAME, 0)


def hold(stream: torch.Stream) -> None:
    """Let nothing begin on a stream until `release`; its events stay unfinished."""
    _lib().eplbdev_hold(*_key(stream), 1)


def release(stream: torch.Stream) -> None:
    """Let a held stream go on."""
    _lib().eplbdev_hold(*_key(stream), 0)


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Hold a stream for the length of a block."""
    hold(stream)
    try:
        yield
    finally:
        release(stream)


def delay(stream: torch.Stream, seconds: float) -> None:
    """Let every copy and fill of a stream begin `seconds` after its turn has come; 0 ends that."""
    _lib().eplbdev_delay(*_key(stream), ctypes.c_double(seconds))


def fail(stream: torch.Stream, message: str) -> None:
    """Queue an operation that fails; as on CUDA every later call on the device raises it, until `reset`."""
    _lib().eplbdev_fail(*_key(stream), message.encode())


def pending(stream: torch.Stream) -> int:
    """Count the copies and fills of a stream that are not done."""
    return int(_lib().eplbdev_pending(*_key(stream)))


def memory_allocated(device: torch.device | str = NAME) -> int:
    """Return the bytes that live tensors hold on a device."""
    return int(_lib().eplbdev_memory_allocated(torch.device(device).index or 0))


def unrecorded_event(device: torch.device | str = NAME) -> torch.Event:
    """Return an event that is not complete, and never will be unless it is recorded (or `reset` ends the test)."""
    event = torch.Event(device=NAME)
    event.record(_nowhere(torch.device(device).index or 0))
    return event


@contextmanager
def unrecorded_events_wait() -> Iterator[None]:
    """Give every ``torch.Event`` made in the block the state of an `unrecorded_event`.

    torch itself answers for events that were never recorded, before the device is asked; hence ``torch.Event`` is
    replaced for a while. Code that keeps a reference of its own to the class does not see that.
    """
    original = torch.Event

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class Event(original, metaclass=Kind):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            event = super().__new__(cls, *args, **kwargs)
            if event.device.type == NAME:
                event.record(_nowhere(0))
            return event

    torch.Event = Event  # type: ignore[misc]
    try:
        yield
    finally:
        torch.Event = original  # type: ignore[misc]


@contextmanager
def host_access() -> Iterator[None]:
    """Let the host read and write device memory in the block; blocks nest."""
    global _open
    _open += 1
    _lib().eplbdev_open(1)
    try:
        yield
    finally:
        _open -= 1
        _lib().eplbdev_open(int(_open > 0))


@contextmanager
def host_memory_not_kept() -> Iterator[None]:
    """Let copies queued in the block hold their host memory by address alone, as CUDA does with memory not torch's.

    Whoever frees it before they are done has them read and write what is there by then: keep it mapped.
    """
    _lib().eplbdev_keep_host_memory(0)
    try:
        yield
    finally:
        _lib().eplbdev_keep_host_memory(1)


def set_limit(timeout_s: float) -> None:
    """Set how long a wait on the device may take before it raises."""
    _lib().eplbdev_set_limit(ctypes.c_double(timeout_s))


def reset() -> None:
    """Release every stream, end delays, let all queues run empty, forget a failure; limit 60 s again.

    Raises
    ------
    RuntimeError
        The queues did not run empty within the limit.
    """
    library = _lib()
    drained = library.eplbdev_reset()
    set_limit(60.0)
    if not drained:
        raise RuntimeError(f"{NAME}: the queues did not run empty")


def _lib() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError("call fake_device.load() first")
    return _library


def _key(stream: torch.Stream) -> tuple[int, ctypes.c_int64]:
    if stream.device.type != NAME:
        raise ValueError(f"{stream} is no stream of {NAME}")
    return stream.device_index, ctypes.c_int64(stream.stream_id)


def _nowhere(device_index: int) -> torch.Stream:
    """Return a stream, held, that no program works on: what is recorded there does not complete."""
    kind = torch.accelerator.current_stream(device_index).device_type
    stream = torch.Stream(stream_id=-1, device_index=device_index, device_type=kind)
    hold(stream)
    return stream


def _device_module() -> ModuleType:
    # What torch looks up in torch.<device>; the rest is torch.accelerator's.
    module = ModuleType(f"torch.{NAME}", "The fake accelerator of the tests.")
    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "current_stream": torch.accelerator.current_stream,
        "synchronize": torch.accelerator.synchronize,
        "manual_seed_all": lambda seed: None,  # random numbers are drawn on the CPU
        "_is_in_bad_fork": lambda: False,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


def _compiler() -> list[str] | None:
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
        return command if shutil.which(command[0]) else None
    return next(([name] for name in ("g++", "c++", "clang++") if shutil.which(name)), None)


def _built() -> Path:
    """Return the compiled library, made by the first of the processes that need it."""
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError(why_not())
    home = Path(torch.__file__).parent
    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    inputs = [SOURCE.read_bytes(), torch.__version__.encode(), str(home).encode(), version, " ".join(flags).encode()]
    digest = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]
    library = BUILD_DIR / f"{NAME}-{digest}.so"
    if library.exists():
        return library

    BUILD_DIR.mkdir(parents=True, exist_ok=True)
    with (BUILD_DIR / "lock").open("w") as lock:
        _acquire(lock.fileno())
        if not library.exists():
            unfinished = library.with_suffix(f".{os.getpid()}")
            search = [f"-I{home / 'include'}", f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}"]
            command = [*compiler, *flags, *search, str(SOURCE), "-o", str(unfinished), "-ltorch_cpu", "-lc10"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_LIMIT_S)
            if done.returncode != 0:
                raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
            unfinished.replace(library)
    return library


def _acquire(lock: int) -> None:
    deadline = time.monotonic() + BUILD_LIMIT_S
    while not _locked(lock):
        if time.monotonic() > deadline:
            raise RuntimeError(f"another process has built {SOURCE.name} for {BUILD_LIMIT_S:.0f} s")
        time.sleep(0.05)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
