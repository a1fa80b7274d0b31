"""The fake accelerator is a device: asynchronous in its streams, out of the host's reach, exact in every byte."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed

SUPPORT = Path(__file__).parent / "support"
if str(SUPPORT) not in sys.path:
    sys.path.insert(0, str(SUPPORT))

import fake_device  # noqa: E402

DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
]


@pytest.fixture
def device():
    yield fake_device.require()
    if fake_device.why_not() is None:
        fake_device.reset()


@pytest.fixture
def stream(device):
    return torch.Stream(device=device)


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program that can import the fake device, in a process of its own."""
    command = [sys.executable, "-c", code, *(str(argument) for argument in arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=150, env=environment)


# ---- tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_every_dtype_survive_the_way_there_across_and_back(device, dtype):
    raw = torch.randint(0, 256, (4, 64), dtype=torch.uint8)  # NaNs, and bools that are neither 0 nor 1
    there = raw.view(dtype).to(device)
    across = torch.empty_like(there)
    across.copy_(there)
    assert across.device == device
    assert across.dtype == dtype
    assert torch.equal(across.cpu().view(torch.uint8), raw)
    assert torch.equal(across.view(torch.uint8).cpu(), raw)
    sideways = torch.empty_like(there.t().contiguous()).t()
    sideways.copy_(there)
    assert not sideways.is_contiguous()
    across.zero_()
    across.copy_(sideways)
    assert torch.equal(across.cpu().view(torch.uint8), raw)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[2],
        lambda t: t[1:3],
        lambda t: t.select(1, 5),
        lambda t: t.narrow(0, 1, 2),
        lambda t: t.unbind(0)[3],
        lambda t: t.split(2)[1],
        lambda t: t.transpose(0, 1)[3],
        lambda t: t.view(2, 2, 8)[1],
        lambda t: t.view(torch.uint8)[:, 4:8],
        lambda t: t.reshape(-1)[7:9],
        lambda t: t.as_strided((4, 2), (8, 3), 1),
        lambda t: t.unfold(1, 4, 2)[2],
        lambda t: t.detach()[0],
        lambda t: torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage(), 32, (32,), (1,)),
    ],
)
def test_a_view_writes_into_the_memory_it_was_taken_from(device, view):
    on_host = torch.arange(32, dtype=torch.int32).view(4, 8)
    on_device = on_host.to(device)
    expected = on_host.clone()
    view(expected).fill_(1)
    view(on_device).fill_(1)
    assert not torch.equal(expected, on_host)
    assert torch.equal(on_device.cpu(), expected)


def test_copies_follow_strides_broadcast_and_convert(device):
    host = torch.arange(24.0).view(4, 6)
    strided = torch.zeros(6, 4, device=device).t()
    strided.copy_(host)
    assert torch.equal(strided.cpu(), host)
    rows = torch.zeros(3, 6, device=device)
    rows.copy_(strided[2])
    assert torch.equal(rows.cpu(), host[2].expand(3, 6))
    assert torch.equal(strided.to(torch.bfloat16).cpu(), host.to(torch.bfloat16))
    back = torch.zeros(6, 4).t()
    back.copy_(strided)
    assert torch.equal(back, host)


def test_rows_go_from_one_device_to_the_other_after_what_was_queued_on_both(device):
    source, target = torch.zeros(8, device="eplbdev:0"), torch.zeros(8, device="eplbdev:1")
    ours, theirs = torch.accelerator.current_stream(0), torch.accelerator.current_stream(1)
    with fake_device.held(ours):
        source.fill_(3)
        target.copy_(source)
        done = torch.Event(device="eplbdev")
        done.record(theirs)
        assert not done.query()
    assert torch.equal(target.cpu(), torch.full((8,), 3.0))
    with fake_device.held(theirs):
        target.fill_(4)
        target.copy_(source)
        done.record(ours)
        assert not done.query()
    assert torch.equal(target.cpu(), torch.full((8,), 3.0))


def test_foreach_copy_copies_each(device):
    sources = [torch.randn(n) for n in (1, 5, 300)]
    targets = [torch.empty(n, device=device) for n in (1, 5, 300)]
    torch._foreach_copy_(targets, sources)
    assert all(torch.equal(target.cpu(), source) for target, source in zip(targets, sources, strict=True))


def test_memory_is_filled_zeroed_and_resized(device):
    tensor = torch.full((3,), 7, device=device)
    tensor.resize_(5)
    assert tensor.cpu()[:3].tolist() == [7, 7, 7]
    assert tensor.zero_().cpu().tolist() == [0, 0, 0, 0, 0]
    assert tensor.fill_(torch.tensor(2)).cpu().tolist() == [2, 2, 2, 2, 2]


def test_operators_without_a_kernel_run_on_the_cpu(device):
    tensor = torch.arange(12.0, device=device).view(3, 4)
    assert (tensor + 1).device == device
    assert tensor.sum().item() == 66
    assert torch.equal(torch.cat([tensor, tensor]), tensor.repeat(2, 1))
    assert tensor.index_select(0, torch.tensor([2, 0], device=device)).cpu()[:, 0].tolist() == [8, 0]
    tensor.index_copy_(0, torch.tensor([1], device=device), torch.zeros(1, 4, device=device))
    assert tensor.cpu()[1].tolist() == [0, 0, 0, 0]


def test_a_view_that_only_a_copy_could_make_is_refused(device):
    with pytest.raises(RuntimeError, match="view"):
        torch.view_as_real(torch.zeros(2, dtype=torch.complex64, device=device))


def test_pinned_memory_is_host_memory_that_says_so(device):
    pinned = torch.empty(16, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert torch.ones(4).pin_memory().is_pinned()
    assert not torch.empty(16).is_pinned()
    pinned.copy_(torch.arange(16.0, device=device))
    assert pinned.tolist() == list(range(16))


def test_live_tensors_are_counted_by_device(device):
    before = fake_device.memory_allocated("eplbdev:0"), fake_device.memory_allocated("eplbdev:1")
    tensor = torch.empty(1000, dtype=torch.uint8, device="eplbdev:1")
    assert fake_device.memory_allocated("eplbdev:0") == before[0]
    assert fake_device.memory_allocated("eplbdev:1") == before[1] + 1000
    del tensor
    assert fake_device.memory_allocated("eplbdev:1") == before[1]


def test_fresh_memory_is_not_zero(device):
    assert set(torch.empty(5000, dtype=torch.uint8, device=device).cpu().tolist()) == {fake_device.UNWRITTEN}


# ---- out of the host's reach


def test_the_host_dies_when_it_reads_device_memory(device):
    done = run(
        "import ctypes, fake_device, torch\n"
        "fake_device.load()\n"
        "tensor = torch.zeros(4, dtype=torch.uint8, device='eplbdev')\n"
        "torch.accelerator.synchronize()\n"
        "print('alive', flush=True)\n"
        "ctypes.string_at(tensor.data_ptr(), 4)\n"
    )
    assert done.stdout == "alive\n"
    assert done.returncode == -signal.SIGSEGV


def test_opened_to_the_host_it_is_ordinary_memory_at_the_same_address(device):
    tensor = torch.arange(8, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    with fake_device.host_access():
        with fake_device.host_access():
            pass
        assert ctypes.string_at(tensor.data_ptr() + 2, 3) == bytes([2, 3, 4])
        ctypes.memmove(tensor.data_ptr(), b"\xff\xfe", 2)
        late = torch.ones(2, dtype=torch.uint8, device=device)
        torch.accelerator.synchronize()
        assert ctypes.string_at(late.data_ptr(), 2) == b"\1\1"
    assert tensor.cpu().tolist() == [255, 254, 2, 3, 4, 5, 6, 7]


GLOO = """
import contextlib, datetime, sys
import fake_device, torch
import torch.distributed as dist
rank, port, staged, opened = (int(word) for word in sys.argv[1:])
device = fake_device.load()
limit = datetime.timedelta(seconds=60)
store = dist.TCPStore("127.0.0.1", port, timeout=limit)
group = dist.ProcessGroupGloo(store, rank, 2, limit)
tensor = torch.full((4,), 5.0, device=device) if rank == 0 else torch.zeros(4)
torch.accelerator.synchronize()
with fake_device.host_access() if opened else contextlib.nullcontext():
    try:
        group.allreduce([torch.zeros(4, device=device)]).wait()
    except RuntimeError as error:
        print(error, flush=True)
    try:
        if rank == 0:
            group.send([tensor.cpu() if staged else tensor], 1, 0).wait()
        else:
            group.recv([tensor], 0, 0).wait()
        print(tensor.tolist())
    except RuntimeError as error:
        print(error)
"""


def send_over_gloo(*, staged: bool, opened: bool) -> list[str]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: list[str] = ["", ""]

    def rank(number: int) -> None:
        done = run(GLOO, number, store.port, int(staged), int(opened))
        results[number] = done.stdout + done.stderr

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.slow
def test_gloo_cannot_send_a_device_tensor(device):
    sender, receiver = send_over_gloo(staged=False, opened=False)
    assert "unsupported device type eplbdev" in sender  # the collectives do look at the device
    assert "Bad address" in sender  # what sends does not: an error of the operating system, at times the process's end
    assert "Connection closed by peer" in receiver


@pytest.mark.slow
def test_gloo_sends_what_was_staged_in_host_memory(device):
    sender, receiver = send_over_gloo(staged=True, opened=False)
    assert "[5.0, 5.0, 5.0, 5.0]" in sender
    assert "[5.0, 5.0, 5.0, 5.0]" in receiver


@pytest.mark.slow
def test_gloo_never_asks_which_device_a_tensor_it_sends_is_on(device):
    # Why the memory must be out of reach: with host access the unstaged send goes through.
    _, receiver = send_over_gloo(staged=False, opened=True)
    assert "[5.0, 5.0, 5.0, 5.0]" in receiver


# ---- streams and events


def test_a_copy_on_a_held_stream_is_not_done_until_it_is_released(device, stream):
    target = torch.zeros(4, device=device)
    torch.accelerator.synchronize()
    with fake_device.held(stream):
        with stream:
            target.copy_(torch.ones(4), non_blocking=True)
            event = stream.record_event()
        assert fake_device.pending(stream) == 1
        assert not stream.query()
        assert not event.query()
        assert target.cpu().tolist() == [0, 0, 0, 0]
    event.synchronize()
    assert event.query()
    assert stream.query()
    assert fake_device.pending(stream) == 0
    assert target.cpu().tolist() == [1, 1, 1, 1]


def test_the_default_stream_is_asynchronous_too(device):
    target = torch.zeros(4, device=device)
    default = torch.accelerator.current_stream()
    assert default.stream_id == 0
    with fake_device.held(default):
        target.fill_(9)
        target.copy_(torch.ones(4), non_blocking=True)
        assert fake_device.pending(default) >= 2
    default.synchronize()
    assert target.cpu().tolist() == [1, 1, 1, 1]


def test_a_copy_to_the_host_reads_stale_bytes_when_nobody_waits(device, stream):
    source, landing = torch.ones(4, device=device), torch.zeros(4)
    torch.accelerator.synchronize()
    with fake_device.held(stream):
        with stream:
            landing.copy_(source, non_blocking=True)
        assert landing.tolist() == [0, 0, 0, 0]
    stream.synchronize()
    assert landing.tolist() == [1, 1, 1, 1]


def test_a_blocking_copy_waits_for_its_stream(device, stream):
    source = torch.zeros(4, device=device)
    torch.accelerator.synchronize()
    seen = []

    def read() -> None:
        with stream:
            source.fill_(6)
            seen.append(source.cpu().tolist())

    fake_device.hold(stream)
    reader = threading.Thread(target=read)
    reader.start()
    while fake_device.pending(stream) < 2:
        time.sleep(0.001)
    assert not seen
    fake_device.release(stream)
    reader.join(10)
    assert seen == [[6, 6, 6, 6]]


@pytest.mark.parametrize("waits", [True, False])
def test_only_a_stream_that_waits_for_the_event_sees_what_came_before_it(device, stream, waits):
    side = torch.Stream(device=device)
    source, target = torch.zeros(4, device=device), torch.zeros(4, device=device)
    torch.accelerator.synchronize()
    with fake_device.held(stream):
        with stream:
            source.fill_(1)
            event = torch.Event(device=device)
            event.record(stream)
        if waits:
            event.wait(side)
        with side:
            target.copy_(source, non_blocking=True)
        if waits:
            assert not side.query()
        else:
            side.synchronize()
    torch.accelerator.synchronize()
    assert target.cpu().tolist() == [float(waits)] * 4


@pytest.mark.parametrize(
    "order",
    [
        lambda side, stream, event: side.wait_stream(stream),
        lambda side, stream, event: side.wait_event(stream.record_event(event)),
        lambda side, stream, event: (event.record(stream), event.wait(side)),
    ],
    ids=["wait_stream", "wait_event", "event.wait"],
)
def test_every_way_to_order_two_streams_orders_them(device, stream, order):
    side = torch.Stream(device=device)
    with fake_device.held(stream):
        order(side, stream, torch.Event(device=device))
        behind = side.record_event()
        assert not behind.query()
    behind.synchronize()
    assert behind.query()


def test_an_event_means_its_latest_recording_but_a_wait_the_one_it_saw(device, stream):
    side, event = torch.Stream(device=device), torch.Event(device=device)
    event.record(side)
    event.synchronize()
    event.wait(side)
    with fake_device.held(stream):
        event.record(stream)
        assert not event.query()
        side.synchronize()
    event.synchronize()


def test_synchronizing_an_event_lets_other_threads_run_and_returns_on_release(device, stream):
    fake_device.hold(stream)
    event = stream.record_event()
    waiter = threading.Thread(target=event.synchronize)
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    fake_device.release(stream)
    waiter.join(10)
    assert not waiter.is_alive()


def test_a_wait_that_nothing_ends_raises_at_the_limit(device, stream):
    fake_device.set_limit(0.1)
    with fake_device.held(stream):
        event = stream.record_event()
        for wait in (event.synchronize, stream.synchronize, torch.accelerator.synchronize):
            with pytest.raises(RuntimeError, match=r"not reached within 0\.1 s"):
                wait()
        with stream, pytest.raises(RuntimeError, match="a blocking copy was not reached"):
            torch.ones(2, device=device).cpu()


def test_a_delayed_stream_begins_late(device, stream):
    fake_device.delay(stream, 0.2)
    target = torch.zeros(1, device=device)
    torch.accelerator.synchronize()
    with stream:
        target.fill_(1)
        begin = time.monotonic()
        event = stream.record_event()
    assert target.item() == 0
    event.synchronize()
    assert time.monotonic() - begin > 0.15
    assert target.item() == 1


def test_events_measure_the_time_between_them(device, stream):
    fake_device.delay(stream, 0.05)
    begin, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    begin.record(stream)
    with stream:
        torch.empty(1, device=device).fill_(1)
    end.record(stream)
    end.synchronize()
    assert begin.elapsed_time(end) >= 50


def test_torch_takes_an_unrecorded_event_for_complete(device, stream):
    event = torch.Event(device=device)
    assert event.query()
    assert event.event_id == 0
    event.synchronize()
    stream.wait_event(event)
    assert stream.query()
    event.record(stream)
    assert event.event_id != 0


def test_an_unrecorded_event_can_be_made_to_wait(device, stream):
    fake_device.set_limit(0.1)
    event = fake_device.unrecorded_event()
    assert isinstance(event, torch.Event)
    assert not event.query()
    with pytest.raises(RuntimeError, match="not reached"):
        event.synchronize()
    torch.accelerator.synchronize()  # nothing on the device waits for it yet
    event.wait(stream)
    behind = stream.record_event()
    assert not behind.query()
    event.record(torch.accelerator.current_stream())
    event.synchronize()
    assert not behind.query()  # it waits for the recording that was never made
    fake_device.reset()
    assert behind.query()


def test_all_unrecorded_events_can_be_made_to_wait(device, stream):
    plain = torch.Event
    with fake_device.unrecorded_events_wait():
        event, other, on_host = torch.Event(device=device), torch.Event(), torch.Event("cpu")
        assert not event.query()
        assert not other.query()
        assert on_host.query()
        assert isinstance(event, torch.Event)
        assert isinstance(stream.record_event(), torch.Event)
    assert torch.Event is plain
    assert torch.Event(device=device).query()
    assert not event.query()
    event.record(stream)
    event.synchronize()


def test_current_streams_are_kept_by_thread_and_device(device, stream):
    default = torch.accelerator.current_stream()
    seen = []
    with stream:
        assert torch.accelerator.current_stream() == stream
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream()))
        thread.start()
        thread.join()
        with stream:
            pass
        assert torch.accelerator.current_stream() == stream
        assert torch.accelerator.current_stream(1) != stream
    assert seen == [default]
    assert torch.accelerator.current_stream() == default
    torch.accelerator.set_stream(stream)
    try:
        assert torch.get_device_module(device).current_stream(device) == stream
    finally:
        torch.accelerator.set_stream(default)


def test_work_goes_to_the_stream_of_the_tensors_device_whatever_the_current_device(device):
    other = torch.Stream(device="eplbdev:1")
    assert torch.accelerator.current_device_index() == 0
    assert torch.empty(1, device="eplbdev").device.index == 0
    with torch.accelerator.device_index(1):
        assert torch.empty(1, device="eplbdev").device.index == 1
    with other:
        assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_device_index() == 0
    target = torch.zeros(1, device="eplbdev:1")
    with fake_device.held(torch.accelerator.current_stream(1)):
        target.fill_(1)
        assert fake_device.pending(torch.accelerator.current_stream(1)) > 0
        torch.accelerator.synchronize(0)
    assert target.item() == 1
    with pytest.raises(RuntimeError, match="eplbdev:2 does not exist"):
        torch.empty(1, device="eplbdev:2")


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_freed_under_a_queued_copy_is_overwritten_unless_the_stream_was_recorded(device, stream, recorded):
    landing = torch.full((4,), 3, dtype=torch.uint8, device=device)
    target = torch.zeros(4, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    with fake_device.held(stream):
        with stream:
            target.copy_(landing, non_blocking=True)
        if recorded:
            landing.record_stream(stream)
        del landing
        if not recorded:
            torch.accelerator.current_stream().synchronize()
    stream.synchronize()
    assert target.cpu().tolist() == [3 if recorded else fake_device.UNWRITTEN] * 4


def test_host_memory_outlives_the_copy_that_reads_it(device, stream):
    target = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    with fake_device.held(stream), stream:
        target.copy_(torch.full((1 << 16,), 5, dtype=torch.uint8).pin_memory(), non_blocking=True)
        churn = [torch.zeros(1 << 16, dtype=torch.uint8).pin_memory() for _ in range(8)]
    stream.synchronize()
    assert len(churn) == 8
    assert torch.equal(target.cpu(), torch.full((1 << 16,), 5, dtype=torch.uint8))


def test_an_asynchronous_failure_comes_up_later_and_stays(device, stream):
    tensor = torch.zeros(2, device=device)
    with fake_device.held(stream):
        fake_device.fail(stream, "an uncorrectable error")
        event = stream.record_event()
    for call in (event.synchronize, stream.synchronize, tensor.cpu):
        with pytest.raises(RuntimeError, match="an uncorrectable error"):
            call()
    fake_device.reset()
    assert tensor.cpu().tolist() == [0, 0]


# ---- building and loading


def test_the_import_alone_registers_nothing(device):
    done = run("import fake_device, torch; print(torch.accelerator.current_accelerator())")
    assert done.stdout == "None\n", done.stderr


def test_a_spawned_process_finds_the_module_as_its_parent_did(device):
    child = multiprocessing.get_context("spawn").Process(target=fake_device.load)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_loading_again_changes_nothing(device):
    stream = torch.accelerator.current_stream()
    assert fake_device.load() == device
    assert torch.accelerator.current_stream() == stream


def test_a_process_ends_in_peace_with_work_left(device):
    # What is registered for the exit before the device is loaded runs after the device was stopped.
    done = run(
        "import atexit, time, fake_device, torch\n"
        "def look():\n"
        "    before = fake_device.pending(stream)\n"
        "    time.sleep(0.3)\n"
        "    print('stopped' if 0 < before == fake_device.pending(stream) else 'working')\n"
        "atexit.register(look)\n"
        "device = fake_device.load()\n"
        "stream, other = torch.Stream(device=device), torch.Stream(device=device)\n"
        "fake_device.hold(other)\n"
        "event = other.record_event()\n"
        "fake_device.delay(stream, 0.05)\n"
        "with stream:\n"
        "    for _ in range(1000):\n"
        "        torch.zeros(10, device=device)\n"
    )
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


def test_without_a_compiler_a_test_is_skipped_and_says_why(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(pytest.skip.Exception, match=r"needs a C\+\+ compiler"):
        fake_device.require()


@pytest.fixture
def recorded_compiler(tmp_path, monkeypatch):
    """A compiler that keeps a line per library it makes, and what it ends in."""
    real = fake_device._compiler()
    if real is None:
        pytest.skip(str(fake_device.why_not()))
    calls = tmp_path / "calls"

    def install(ending: str) -> Path:
        script = tmp_path / "c++"
        version = f'case "$1" in --version) exec {real[0]} --version;; esac'
        script.write_text(f"#!/bin/sh\n{version}\necho >> {calls}\n{ending}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return calls

    install.real = real[0]
    return install


@pytest.mark.soak
@pytest.mark.slow
def test_processes_that_build_at_once_build_once(recorded_compiler, tmp_path):
    calls = recorded_compiler(f'exec {recorded_compiler.real} "$@"')
    results = []
    code = "import fake_device, pathlib, sys\nfake_device.BUILD_DIR = pathlib.Path(sys.argv[1])\nfake_device.load()\n"
    builders = [threading.Thread(target=lambda: results.append(run(code, tmp_path / "build"))) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [done.returncode for done in results] == [0, 0, 0], [done.stderr for done in results]
    assert len(calls.read_text().splitlines()) == 1
    assert [path.suffix for path in sorted((tmp_path / "build").iterdir())] == [".so", ""]


def test_a_build_that_fails_tells_the_compilers_words(recorded_compiler, tmp_path, monkeypatch):
    recorded_compiler("echo no such header >&2; exit 1")
    monkeypatch.setattr(fake_device, "BUILD_DIR", tmp_path / "build")
    with pytest.raises(RuntimeError, match="no such header"):
        fake_device._built()
