"""Reading another process: every byte, in few calls, also past a short read, and never from a stranger."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from eplb_vmread import memory
from eplb_vmread.memory import ProcessMemory, StrangerError, Token

# Holds a token and 4 pages, the third of which cannot be read; says where and waits.
HOLDER = """
import ctypes, mmap, os, sys
page = mmap.PAGESIZE
block = mmap.mmap(-1, 4 * page)
block[:] = bytes(i * 31 % 251 for i in range(4 * page))
at = ctypes.addressof(ctypes.c_char.from_buffer(block))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(at + 2 * page), ctypes.c_size_t(page), 0) == 0
token = ctypes.create_string_buffer(bytes(range(16)), 16)
print(at, ctypes.addressof(token), flush=True)
sys.stdin.read()
"""
TOKEN, PAGE = bytes(range(16)), mmap.PAGESIZE


@pytest.fixture
def holder():
    """A process that holds memory; (its Popen, address of the pages, address of the token)."""
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        pages, token = map(int, process.stdout.readline().split())
        yield process, pages, token
        process.kill()


def held(start, nbytes):
    return (np.arange(start, start + nbytes) * 31 % 251).astype(np.uint8)


def read(there, pairs, target, between=lambda: None):
    """Read (address, bytes) parts one after another into an array."""
    sizes = np.array([nbytes for _, nbytes in pairs])
    starts = target.ctypes.data + np.cumsum(sizes) - sizes
    there.read(np.array(pairs, np.int64), np.stack([starts, sizes], axis=1).astype(np.int64), between)


def test_parts_in_any_order_arrive_whole(holder):
    process, pages, token = holder
    target = np.zeros(PAGE + 100, np.uint8)
    read(ProcessMemory(process.pid, token, TOKEN), [(pages + 7, 60), (pages + PAGE, PAGE), (pages, 40)], target)
    np.testing.assert_array_equal(target, np.concatenate([held(7, 60), held(PAGE, PAGE), held(0, 40)]))


def test_more_parts_than_one_call_takes_arrive_whole(holder):
    process, pages, token = holder
    target, calls = np.zeros(2 * 1500, np.uint8), []
    read(
        ProcessMemory(process.pid, token, TOKEN), [(pages + i, 2) for i in range(1500)], target, lambda: calls.append(1)
    )
    np.testing.assert_array_equal(target, np.stack([held(0, 1500), held(1, 1500)], axis=1).reshape(-1))
    assert len(calls) == 2


@pytest.mark.parametrize("limit", [1, 5, PAGE - 1, PAGE, PAGE + 1])
def test_large_parts_are_cut_so_that_the_caller_looks_around(holder, monkeypatch, limit):
    process, pages, token = holder
    monkeypatch.setattr(memory, "_MAX_NBYTES", limit)
    target, calls = np.zeros(10 if limit < 10 else 2 * PAGE, np.uint8), []
    cut = len(target) // 3
    pairs = [(pages, cut), (pages + cut, len(target) - cut)]
    read(ProcessMemory(process.pid, token, TOKEN), pairs, target, lambda: calls.append(1))
    np.testing.assert_array_equal(target, held(0, len(target)))
    assert len(calls) == -(-len(target) // limit)


def test_what_the_caller_raises_between_calls_ends_the_read(holder, monkeypatch):
    process, pages, token = holder
    monkeypatch.setattr(memory, "_MAX_NBYTES", 8)
    target, calls = np.zeros(32, np.uint8), []

    def at_the_third():
        calls.append(1)
        if len(calls) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        read(ProcessMemory(process.pid, token, TOKEN), [(pages, 32)], target, at_the_third)
    np.testing.assert_array_equal(target, np.concatenate([held(0, 16), np.zeros(16)]))


@pytest.mark.parametrize("start", [0, PAGE, 2 * PAGE - 8, 2 * PAGE])
def test_a_read_that_stops_short_at_an_unreadable_page_is_an_error(holder, start):
    process, pages, token = holder
    with pytest.raises(OSError, match="Bad address") as caught:
        read(ProcessMemory(process.pid, token, TOKEN), [(pages + start, 3 * PAGE)], np.zeros(3 * PAGE, np.uint8))
    assert caught.value.errno == errno.EFAULT


def test_a_read_that_stops_short_goes_on_behind_what_it_has(monkeypatch):
    """One call moves at most 2 GiB less a page (MAX_RW_COUNT), whatever it is asked for."""
    monkeypatch.setattr(memory, "_MAX_NBYTES", 1 << 40)
    source, target = np.arange(4 << 20, dtype=np.uint8), np.zeros(4 << 20, np.uint8)
    last, landed, calls = np.full(64, 7, np.uint8), np.zeros(64, np.uint8), []
    remote = np.array([[source.ctypes.data, source.nbytes]] * 520 + [[last.ctypes.data, 64]], np.int64)
    local = np.array([[target.ctypes.data, target.nbytes]] * 520 + [[landed.ctypes.data, 64]], np.int64)
    mine = Token()
    there = ProcessMemory(os.getpid(), mine.address, mine.value)
    call = there._call
    monkeypatch.setattr(there, "_call", lambda *parts: calls.append(call(*parts)) or calls[-1])
    there.read(remote, local, lambda: None)
    np.testing.assert_array_equal(landed, last)
    np.testing.assert_array_equal(target, source)
    assert len(calls) == 2
    assert sum(calls) == 520 * (4 << 20) + 64


def test_a_process_that_ended_is_no_more(holder):
    process, pages, token = holder
    there = ProcessMemory(process.pid, token, TOKEN)
    there.check()
    process.kill()
    process.wait()
    for use in (there.check, lambda: read(there, [(pages, 8)], np.zeros(8, np.uint8))):
        with pytest.raises(OSError, match="No such process") as caught:
            use()
        assert caught.value.errno == errno.ESRCH


def test_a_process_that_ended_and_is_not_waited_for_is_no_more(holder):
    process, _, token = holder
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, whose memory is gone
    with pytest.raises(OSError, match="No such process"):
        ProcessMemory(process.pid, token, TOKEN).check()


def test_another_process_of_that_number_is_recognised_at_any_read(holder):
    process, pages, token = holder
    target = np.zeros(8, np.uint8)
    for stranger in (
        ProcessMemory(process.pid, token, bytes(16)),  # something else stands there
        ProcessMemory(process.pid, pages + 2 * PAGE, TOKEN),  # nothing can be read there
        ProcessMemory(process.pid, 4096, TOKEN),
    ):
        with pytest.raises(StrangerError, match=str(process.pid)):
            stranger.check()
        with pytest.raises(StrangerError, match=str(process.pid)):
            read(stranger, [(pages, 8)], target)


def test_a_token_is_read_whole_or_not_at_all(holder):
    process, pages, _ = holder
    with pytest.raises(StrangerError):
        ProcessMemory(process.pid, pages + 2 * PAGE - 8, held(2 * PAGE - 8, 16).tobytes()).check()


def test_tokens_differ():
    tokens = [Token() for _ in range(3)]
    assert len({token.value for token in tokens}) == 3
    for token in tokens:
        assert ctypes.string_at(token.address, 16) == token.value
