"""Bytes arrive exactly, whatever the mix of rows, slots, members and options."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from eplb_core.testing.ranks import Rank, run_ranks
from eplb_gloo.options import GlooOptions

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from members import Case, Member  # noqa: E402

MIXED = (4, 64 << 10, 300 << 10, 1, 0, 4096)
"""Packed rows and rows that travel alone, per-expert scalars, a tensor without bytes."""


def transfer_rounds(rank: Rank, case: Case, rounds: int) -> int:
    if rank.rank not in case.present:
        return 0
    member = Member(rank, case)
    member.connect()
    received = member.rounds(rounds)
    assert member.backend.close() is True
    return received


@pytest.mark.parametrize("staging_layers", [1, 2])
def test_rows_of_every_size_arrive_with_several_layers_in_flight(staging_layers):
    case = Case((MIXED, (300 << 10,), (4,), MIXED), world_size=3, staging_layers=staging_layers)
    assert all(run_ranks(3, transfer_rounds, case, 3))


def test_members_may_be_some_of_the_ranks():
    case = Case((MIXED, MIXED), world_size=4, members=(0, 2, 3))
    received = run_ranks(4, transfer_rounds, case, 2)
    assert [count > 0 for count in received] == [True, False, True, True]


@pytest.mark.parametrize("options", [{"coalesce_nbytes": 0}, {"coalesce_nbytes": 1 << 20}, {"threads": 3}], ids=str)
def test_rows_arrive_whatever_is_packed_and_however_many_threads_move_them(options):
    case = Case((MIXED, MIXED), world_size=3, options=GlooOptions(**options))
    assert all(run_ranks(3, transfer_rounds, case, 3))


def test_a_rank_that_only_sends_and_a_rank_that_has_nothing_to_do_make_the_same_calls():
    # rank 1 takes expert 0, which rank 0 keeps; nobody needs anything of rank 1, and rank 2 takes no part at all
    case = Case((MIXED,), world_size=3, num_rows=2, new_map=((0, 1, 0, 3, 4, 5),))
    expected = sum(MIXED)
    assert run_ranks(3, transfer_rounds, case, 2) == [0, 2 * expected, 0]


def test_a_layer_without_any_bytes_for_this_rank_is_complete_at_once():
    assert run_ranks(1, _alone) == [(0, 0, True)]


def _alone(rank: Rank) -> tuple[int, int, bool]:
    member = Member(rank, Case((MIXED,), world_size=1, new_map=((3, 2, 1, 0),)))
    member.connect()
    handle = member.backend.transfer(member.plan(0))
    receipt = member.backend.wait(handle, 1.0)
    return receipt.nbytes_received, receipt.nbytes_sent, member.backend.abort(handle, "for no reason")


def test_every_row_is_packed_or_sent_from_where_it_lies():
    packed, alone = run_ranks(2, _how_rows_leave)[0]
    assert packed == [2 * 4 + 2 * 8]  # the small rows before and behind the large ones, in one message
    assert alone == [300 << 10] * 2


def _how_rows_leave(rank: Rank) -> tuple[list[int], list[int]]:
    member = Member(rank, Case(((4, 300 << 10, 8),), num_rows=2, new_map=((2, 3, 0, 1),)))
    member.connect()
    sent = []
    group = member.backend._group
    send = group.send

    def recording(buffer, destination, tag):
        sent.append(buffer)
        return send(buffer, destination, tag)

    group.send = recording
    member.rounds(1)
    live = [tensor.data_ptr() for tensor in member.weights[0]]
    ends = [tensor.data_ptr() + tensor.numel() for tensor in member.weights[0]]
    straight = [any(a <= b.data_ptr() < e for a, e in zip(live, ends, strict=True)) for b in sent]
    packed = [buffer.numel() for buffer, is_live in zip(sent, straight, strict=True) if not is_live]
    return packed, [buffer.numel() for buffer, is_live in zip(sent, straight, strict=True) if is_live]


def test_live_rows_are_only_read():
    assert run_ranks(2, _live_rows_after_transfer) == [True, True]


def _live_rows_after_transfer(rank: Rank) -> bool:
    member = Member(rank, Case((MIXED,)))
    before = [tensor.clone() for tensor in member.weights[0]]
    member.connect()
    member.rounds(2)
    return all(tensor.equal(copy) for tensor, copy in zip(member.weights[0], before, strict=True))


def test_connecting_sets_no_environment_variable_and_makes_no_default_group():
    assert run_ranks(2, _what_connecting_leaves) == [([], False)] * 2


def _what_connecting_leaves(rank: Rank) -> tuple[list[str], bool]:
    before = dict(os.environ)
    member = Member(rank, Case(((4096,),)))
    member.connect()
    member.rounds(1)
    return sorted(dict(os.environ).items() ^ before.items()), dist.is_initialized()


def test_a_store_keeps_no_keys_of_connecting():
    assert run_ranks(3, _keys_after_connecting)[0] == []


def _keys_after_connecting(rank: Rank) -> list[str]:
    member = Member(rank, Case(((4096,),), world_size=3, options=GlooOptions(threads=2)))
    member.connect()
    member.meet("connected")
    keys = [key for key in member.store.list_keys() if not key.startswith("talk/")]
    member.meet("read")
    return keys


def test_more_peers_are_named_once_connected():
    assert run_ranks(2, _connect_in_two_calls) == [(), ()]


def _connect_in_two_calls(rank: Rank) -> tuple[int, ...]:
    member = Member(rank, Case(((4096,),)))
    member.connect()
    group = member.backend._group
    receipt = member.backend.exchange_metadata(None, [])
    assert member.backend._group is group
    member.rounds(1)
    return receipt.peers


@pytest.mark.slow
def test_it_works_in_a_daemonic_process_where_no_helper_process_can_be_started():
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_daemonic, args=(rank, store.port, results), daemon=True, name=f"daemonic rank {rank}")
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert results.get() > 0
    assert results.get() > 0


def _daemonic(rank: int, port: int, results: multiprocessing.SimpleQueue) -> None:
    assert multiprocessing.current_process().daemon
    results.put(transfer_rounds(Rank(rank, 2, port, None), Case((MIXED,)), 1))
