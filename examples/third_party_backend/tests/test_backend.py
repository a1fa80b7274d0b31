"""The backend between ranks: what cannot be reached is refused at connect, on every rank, and dead peers are named."""

from __future__ import annotations

import ctypes
import json
import os
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eplb_core as eplb
import eplb_vmread.backend
from eplb_core.backend import Buffers, Cancelled, MoveColumns, PeerMetadata, TransferPlan
from eplb_core.errors import EplbError, MetadataError, StalledError, TransferError
from eplb_core.testing.faults import FaultInjector
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from eplb_vmread.backend import VmReadBackend

CLONE_NEWPID = 0x20000000


def communicator(rank: Rank, model: Model, **given) -> eplb.Communicator:
    config = eplb.EPLBConfig(communicator="vmread", use_async=False, timeout_s=given.pop("timeout_s", 20))
    return eplb.Communicator(config, model.weights, rank.control(), **given)


def rearranged(rank: Rank, options=None, observers=()) -> tuple[str, str, list]:
    """Rearrange three times; return the error's code and text, if any, and the rows that are wrong."""
    maps = shuffles(4, 3, rank.world_size, 5, redundant=2)
    model = Model(rank.rank, 5, [[4096, 1, 40]] * 3)
    model.fill(maps[0])
    with communicator(rank, model, options=options, observers=observers) as comm:
        try:
            for old, new in pairwise(maps):
                comm.rearrange(old, new)
        except EplbError as error:
            return error.code, str(error), model.wrong_rows(error.report.physical_to_logical_map)
    return "", "", model.wrong_rows(maps[-1])


@pytest.mark.parametrize("readers", ["auto", "siblings", "any", "unchanged"])
def test_rows_arrive_whoever_else_may_read(readers):
    if readers == "unchanged" and eplb_vmread.backend.yama_scope() == 1 and os.getuid():
        pytest.skip("Yama lets siblings read only where they are allowed to")
    assert run_ranks(3, rearranged, {"readers": readers}) == [("", "", [])] * 3


def in_a_pid_namespace_of_its_own(rank: Rank):
    """Rank 1 runs in a child that is process 1 of a new namespace."""
    if rank.rank == 0:
        return rearranged(rank)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "unshare")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps([os.getpid(), *rearranged(rank)]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return json.loads(told)


def may_make_namespaces() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(ctypes.CDLL(None).unshare(CLONE_NEWPID) != 0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif("not may_make_namespaces()", reason="needs the right to make a PID namespace")
def test_a_rank_in_another_pid_namespace_is_refused_by_both():
    first, (pid, *second) = run_ranks(2, in_a_pid_namespace_of_its_own)
    assert pid == 1
    assert first[0] == second[0] == "EPLB-M004"
    assert first[1] == second[1]
    assert "vmread EPLB PID namespace mismatch with rank " in first[1]
    assert "local=pid:[" in first[1]
    assert first[2] == second[2] == []


class BecomesNobody:
    """Gives up root just before the peers are read (earlier, and Python could not import what it still needs)."""

    @eplb.hookimpl(wrapper=True)
    def exchange_metadata(self):
        os.setgid(65534)
        os.setuid(65534)
        return (yield)


def as_another_user(rank: Rank):
    return rearranged(rank, observers=[BecomesNobody()] if rank.rank == 1 else [])


@pytest.mark.skipif("os.getuid() != 0", reason="needs root, to become someone else")
def test_a_rank_of_another_user_is_refused_by_both_with_the_remedy():
    first, second = run_ranks(2, as_another_user)
    assert first == second
    assert first[0] == "EPLB-T001"
    assert "vmread transfer failed with state=Operation not permitted Reading rank 0" in first[1]
    assert "runs as user 0, this one as 65534: run all ranks as one user." in first[1]
    assert first[2] == []


def told_otherwise(rank: Rank, change: str):
    """Rank 1 tells its peers something else of itself."""
    register = VmReadBackend.register_buffers

    def lie(self, buffers):
        local = register(self, buffers)
        facts = json.loads(local.payload)
        other = {
            "another host": {"boot": "0" * 36},
            "a recycled number": {"pid": os.getppid()},
            "another token": {"token": "00" * 16},
            "no process": {"pid": 2**22 + 1},
            "no token": {"token": ""},
            "fewer rows": {"rows": facts["rows"][:-1]},
            "no number": {"pid": "many"},
            "no list": {"rows": 7},
        }[change]
        return type(local)(json.dumps({**facts, **other}).encode())

    if rank.rank == 1:
        lie.eplb_impl = register.eplb_impl
        VmReadBackend.register_buffers = lie
    return rearranged(rank)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ("another host", "EPLB-M004", "host (boot id) mismatch with rank "),
        ("a recycled number", "EPLB-M005", "Refused a message from rank 1: process "),
        ("another token", "EPLB-M005", "is another one by now"),
        ("no process", "EPLB-T001", "state=No such process Reading rank 1"),
        ("no token", "EPLB-M005", "its metadata is not vmread's"),
        ("fewer rows", "EPLB-M005", "lists other rows than are registered"),
        ("no number", "EPLB-M005", "its metadata is not vmread's"),
        ("no list", "EPLB-M005", "its metadata is not vmread's"),
    ],
)
def test_a_peer_that_is_not_who_it_says_is_refused_before_a_row_is_read(change, code, said):
    first, second = run_ranks(2, told_otherwise, change)
    assert first == second
    assert first[0] == code
    assert said in first[1]
    assert first[2] == []


@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b"null", b"\xff\x00", b'{"boot": 1}'])
def test_metadata_that_is_not_ours_is_refused(payload):
    with pytest.raises(MetadataError, match="Refused a message from rank 3") as caught:
        backend_of(None)[0].exchange_metadata(backend_of(None)[1], [PeerMetadata(3, payload)])
    assert caught.value.code == "EPLB-M005"


def backend_of(cancelled_because, timeout_s=5.0):
    """Return a backend of this process, what it says of itself, and its buffers: two experts of 2 MiB."""
    context = SimpleNamespace(rank=0, cancelled=lambda: cancelled_because, timeout_s=timeout_s)
    backend = VmReadBackend(eplb_vmread.backend.VmReadOptions(), context)
    weights = torch.arange(2, dtype=torch.uint8)[:, None].repeat(1, 2 << 20) + 1
    buffers = Buffers([[weights]], [torch.zeros(4 << 20, dtype=torch.uint8)], None, 0)
    return backend, backend.register_buffers(buffers), buffers


def plan_from(peer: int):
    def moves(count):
        each = np.arange(count)
        nbytes = np.full(count, 2 << 20)
        return MoveColumns(each * 0 + peer, each * 0, each, each[::-1].copy(), nbytes, each * (2 << 20), each, each * 0)

    return TransferPlan(1, 1, 0, 0, moves(0), moves(2))


def test_a_wait_reads_each_row_into_its_place_and_counts_the_bytes():
    backend, local, buffers = backend_of(None)
    assert backend.exchange_metadata(local, [PeerMetadata(1, local.payload)]).peers == (1,)
    receipt = backend.wait(backend.transfer(plan_from(1)), 5.0)
    assert (receipt.nbytes_received, receipt.nbytes_sent) == (4 << 20, 0)
    assert torch.equal(buffers.landing[0].view(2, -1), buffers.rows[0][0].flip(0))


def test_a_wait_that_was_called_off_or_is_over_time_reads_nothing_more():
    for reason, limit_s, kind, said in (
        (Cancelled("rank 2 is gone", peer_lost=True), 5.0, TransferError, "rank 2 is gone"),
        (None, -1.0, StalledError, "waiting for the rows of rank 1"),
    ):
        backend, local, buffers = backend_of(reason)
        backend.exchange_metadata(local, [PeerMetadata(1, local.payload)])
        with pytest.raises(kind, match=said):
            backend.wait(backend.transfer(plan_from(1)), limit_s)
        assert not buffers.landing[0].any()


def test_a_process_that_took_over_a_peers_number_is_not_read_as_if_it_were_the_peer():
    backend, local, _ = backend_of(None)
    other, told, _ = backend_of(None)
    backend.exchange_metadata(local, [PeerMetadata(1, told.payload)])
    ctypes.memset(other._token.address, 0, 16)  # what another process would have there
    with pytest.raises(TransferError, match="is another one by now") as caught:
        backend.wait(backend.transfer(plan_from(1)), 5.0)
    assert caught.value.code == "EPLB-T001"


def whose_peer_dies(rank: Rank):
    maps = shuffles(2, 3, rank.world_size, 4)
    model = Model(rank.rank, 4, [[4096]] * 3)
    model.fill(maps[0])
    observers = [FaultInjector("transfer", "kill", layer=1)] if rank.rank == 1 else []
    comm = communicator(rank, model, observers=observers)
    try:
        comm.rearrange(*maps)
    except EplbError as error:
        comm.close(force=True)
        return type(error).__name__, str(error), model.wrong_rows(error.report.physical_to_logical_map)
    return None


def test_a_peer_that_dies_is_named_and_costs_no_weight():
    with Ranks(3, whose_peer_dies) as ranks:
        outcomes = ranks.join(60, without=(1,))
        first, _, last = (outcome.value for outcome in outcomes)
    assert first[0] == "PeerLostError"
    assert first == last
    assert first[1].startswith("Rank 1 is gone")
    assert first[2] == []
