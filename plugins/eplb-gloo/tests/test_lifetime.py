"""Nothing grows: descriptors, threads and memory are flat over rounds, and back at base after close."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from eplb_core.errors import TransferError
from eplb_core.testing.ranks import Rank, run_ranks
from eplb_gloo.options import GlooOptions

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from members import Case, Member, descriptors, threads  # noqa: E402

pytestmark = pytest.mark.slow


def resident_nbytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmRSS:"))


def test_two_hundred_rounds_leave_descriptors_threads_and_memory_where_they_were():
    for before, after, grown_nbytes in run_ranks(2, _many_rounds, timeout_s=120):
        assert after[0] <= before[0]
        assert after[1] <= before[1]
        assert grown_nbytes < 4 << 20


def _many_rounds(rank: Rank) -> tuple[tuple[int, int], tuple[int, int], int]:
    member = Member(rank, Case(((4, 4096, 20000), (4, 4096, 20000)), options=GlooOptions(coalesce_nbytes=8192)))
    member.connect()
    member.rounds(20)
    gc.collect()
    before, resident = (descriptors(), threads()), resident_nbytes()
    member.rounds(200)
    gc.collect()
    assert not member.backend._life.in_flight
    return before, (descriptors(), threads()), resident_nbytes() - resident


def test_twenty_backends_made_used_and_closed_leave_nothing():
    for before, after, staging_nbytes in run_ranks(2, _many_backends, timeout_s=120):
        assert after[0] <= before[0]
        assert after[1] <= before[1]
        assert staging_nbytes == 0


def _many_backends(rank: Rank) -> tuple[tuple[int, int], tuple[int, int], int]:
    before = staging_nbytes = 0
    for cycle in range(21):
        member = Member(rank, Case(((4, 4096, 300 << 10),)))
        landing_nbytes = member.allocator.stats().nbytes_in_use
        member.connect(attempt=cycle)
        member.rounds(2)
        member.meet(f"used {cycle}")
        assert member.backend.close(force=bool(cycle % 2)) is True
        assert member.backend.close() is True
        staging_nbytes += member.allocator.stats().nbytes_in_use - landing_nbytes
        with pytest.raises(TransferError, match="EPLB-T008"):
            member.backend.transfer(member.plan(0))
        del member
        gc.collect()
        before = before or (descriptors(), threads())
    return before, (descriptors(), threads()), staging_nbytes


def test_backends_closed_after_an_abort_leave_nothing():
    for before, after in run_ranks(2, _many_aborted, timeout_s=120):
        assert after[0] <= before[0]
        assert after[1] <= before[1]


def _many_aborted(rank: Rank) -> tuple[tuple[int, int], tuple[int, int]]:
    before = (0, 0)
    for cycle in range(6):
        member = Member(rank, Case(((4096,), (64,))))
        member.connect(attempt=cycle)
        _, handle = member.start(rank.rank)  # each waits for a layer that the other does not send
        if rank.rank == 0:
            member.backend.abort(handle, "called off")
        else:
            with pytest.raises(TransferError) as caught:
                member.backend.wait(handle, 10.0)
            member.backend.abort(handle, str(caught.value))
        member.meet(f"aborted {cycle}")
        assert member.backend.close(force=True) is True
        # the handle, and the error kept by whoever caught it, must not keep the connection
        kept = (handle, caught if rank.rank else None)
        del member, handle
        gc.collect()
        before = before if cycle else (descriptors(), threads())
        after = (descriptors(), threads())
        del kept
    return before, after
