"""Device rows go through host staging: each fetched once, on the backend's stream, and sent when it is there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from eplb_core.backend import MoveColumns
from eplb_core.testing.ranks import Rank, run_ranks
from eplb_gloo.messages import Messages, MisfitError, Registered, cut_messages
from eplb_gloo.sources import DeviceSource

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[2] / "tests" / "support"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import fake_device  # noqa: E402
from members import Case, Member  # noqa: E402

MIXED = (4, 64 << 10, 300 << 10, 1)


@pytest.fixture
def device():
    yield fake_device.require()
    if fake_device.why_not() is None:
        fake_device.reset()


def device_rounds(rank: Rank, case: Case, delay_s: float) -> int:
    fake_device.load()
    member = Member(rank, case)
    member.connect()
    fake_device.delay(member.context.stream, delay_s)
    received = member.rounds(2)
    assert member.backend.close() is True
    return received


@pytest.mark.parametrize("staging_layers", [1, 2])
def test_device_rows_arrive_exactly_although_every_copy_is_late(device, staging_layers):
    case = Case((MIXED, (300 << 10,), MIXED), world_size=3, device="eplbdev", staging_layers=staging_layers)
    assert all(run_ranks(3, device_rounds, case, 0.01))


def test_the_backend_copies_on_its_own_stream_not_on_the_callers(device):
    assert all(run_ranks(2, _with_the_current_stream_held))


def _with_the_current_stream_held(rank: Rank) -> int:
    fake_device.load()
    member = Member(rank, Case((MIXED,), device="eplbdev"))
    member.connect()
    with fake_device.held(torch.accelerator.current_stream()):
        return member.rounds(1)


def messages_to_peers(
    rows: list[list[torch.Tensor]], to: dict[int, list[tuple[int, int]]], packed: set[tuple]
) -> Messages:
    """Cut messages from {peer: [(tensor, row)]}; (peer, tensor, row) in `packed` travel in message 0."""
    columns: list[tuple[int, ...]] = []
    for peer, sent in to.items():
        numbers = iter(range(1, 100))
        small = [key for key in sent if (peer, *key) in packed]
        offset = sum(rows[0][tensor].shape[1] for tensor, _ in small)
        at = 0
        for tensor, row in sent:
            nbytes = rows[0][tensor].shape[1]
            if (tensor, row) in small:
                columns.append((peer, tensor, row, 0, nbytes, at, 0, 0))
                at += nbytes
            else:
                columns.append((peer, tensor, row, 0, nbytes, offset, next(numbers), 0))
                offset += nbytes
    registered = Registered(
        row_nbytes=[np.array([tensor.shape[1] for tensor in layer]) for layer in rows],
        num_rows=4,
        slot_nbytes=1 << 20,
        group_rank=np.arange(4),
        own=1,
    )
    return cut_messages(MoveColumns(*np.array(columns, np.int64).T), 0, 0, registered)


def device_rows(device: torch.device) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    host = [torch.randint(0, 256, (4, nbytes), dtype=torch.uint8) for nbytes in (40, 100)]
    return [[tensor.to(device) for tensor in host]], host


# Peer 3 gets row (0, 1) packed, peers 0 and 2 get it too, packed and alone; in posting order peer 2 comes first.
SENT = {0: [(0, 1), (0, 2), (1, 0)], 2: [(0, 1), (1, 0), (1, 3)], 3: [(0, 0), (0, 1)]}
PACKED = {(0, 0, 1), (0, 0, 2), (3, 0, 0), (3, 0, 1)}
NBYTES_ONCE = 3 * 40 + 2 * 100
NBYTES_PACKED_AGAIN = 40


def test_a_row_for_several_peers_is_fetched_once_and_stays_within_the_slot(device):
    rows, host = device_rows(device)
    messages = messages_to_peers(rows, SENT, PACKED)
    source = DeviceSource(rows, [torch.full((NBYTES_ONCE + NBYTES_PACKED_AGAIN + 64,), 0xEE, dtype=torch.uint8)], None)
    _, fetches, _ = source._arrange(messages, 0, 0)
    fetched = [key[:2] for of_message in fetches for key in of_message]
    assert sorted(fetched) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 3)]
    sent = [buffer.clone() for buffer in source.outgoing(0, 0, messages)]
    assert messages.peers == [2, 2, 2, 3, 0, 0]
    expected = [
        host[0][1],
        host[1][0],
        host[1][3],
        torch.cat([host[0][0], host[0][1]]),
        torch.cat([host[0][1], host[0][2]]),
        host[1][0],
    ]
    assert [buffer.tolist() for buffer in sent] == [row.tolist() for row in expected]


def test_messages_that_need_more_staging_than_there_is_are_refused(device):
    rows, _ = device_rows(device)
    source = DeviceSource(rows, [torch.empty(NBYTES_ONCE, dtype=torch.uint8)], None)
    with pytest.raises(MisfitError, match="in send staging"):
        source.outgoing(0, 0, messages_to_peers(rows, SENT, PACKED))


def test_a_message_is_not_sent_before_its_rows_are_there(device):
    rows, host = device_rows(device)
    stream = torch.Stream(device=device)
    staging = torch.full((1024,), 0xEE, dtype=torch.uint8)
    source = DeviceSource(rows, [staging], stream)
    fake_device.delay(stream, 0.05)
    messages = messages_to_peers(rows, {0: [(0, 1)], 2: [(1, 3)]}, set())
    outgoing = source.outgoing(0, 0, messages)
    first = next(outgoing)
    assert first.tolist() == host[1][3].tolist()
    assert fake_device.pending(stream) == 1  # the first leaves while the second is still being fetched
    assert next(outgoing).tolist() == host[0][1].tolist()


def test_staging_is_not_given_back_while_copies_into_it_are_queued(device):
    before, after = run_ranks(2, _close_with_copies_queued)[0]
    assert before > 0
    assert after == 0


def _close_with_copies_queued(rank: Rank) -> tuple[int, int]:
    fake_device.load()
    # rank 0 only sends: two rows, the second of which is still being fetched when sending the first one fails
    member = Member(rank, Case(((300 << 10,),), num_rows=2, device="eplbdev", new_map=((0, 1, 0, 1),)))
    member.connect()
    if rank.rank == 1:
        member.backend.close()
        member.meet("closed")
        return 0, 0
    member.meet("closed")
    time.sleep(0.3)
    fake_device.delay(member.context.stream, 0.5)
    _, handle = member.start(0)
    member.backend.abort(handle, "the peer is gone")
    assert fake_device.pending(member.context.stream) == 1
    member.backend.close(force=True)
    waiting_for_event = member.allocator.stats().nbytes_pool
    member.context.stream.synchronize()
    return waiting_for_event, member.allocator.stats().nbytes_pool


def test_a_failing_device_makes_the_wait_fail(device):
    error, drained = run_ranks(2, _failing_device)[0]
    assert error.code == "EPLB-T001"
    assert "the memory is bad" in str(error)
    assert drained is False


def _failing_device(rank: Rank) -> object:
    from eplb_core.errors import TransferError

    fake_device.load()
    member = Member(rank, Case((MIXED,), device="eplbdev"))
    member.connect()
    if rank.rank == 1:
        member.meet("done")
        return None
    fake_device.fail(member.context.stream, "the memory is bad")
    _, handle = member.start(0)
    with pytest.raises(TransferError) as caught:
        member.backend.wait(handle, 5.0)
    drained = member.backend.abort(handle, str(caught.value))
    member.meet("done")
    fake_device.reset()
    return caught.value, drained
