"""What checksums find, tried on every row: ranks of one process, real plans, and a backend that copies by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eplb_core.backend import Buffers, ConnectReceipt, Event, LocalMetadata, TransferReceipt
from eplb_core.errors import MetadataError, TransferError
from eplb_core.hookspecs import hookimpl
from eplb_core.observers import Checksums, Observer, checksums
from eplb_core.plan import TransferRules, plan_moves
from eplb_core.rearrange.hooks import BackendHooks
from eplb_core.testing.model import Model, shuffles
from eplb_core.weights.layout import build_layout

RANKS, ROWS, ROW_NBYTES = 3, 8, [64, 1, 24]


class ByHand:
    """Copies from the other ranks' live rows; all its handles are one object."""

    def __init__(self, live) -> None:
        self.live, self.plans = live, []

    @hookimpl
    def register_buffers(self, buffers):
        self.buffers = buffers
        return LocalMetadata(b"")

    @hookimpl
    def exchange_metadata(self, local, peers):
        return ConnectReceipt(())

    @hookimpl
    def transfer(self, plan):
        self.plans.append(plan)
        return "moving"

    @hookimpl
    def wait(self, handle, timeout_s):
        plan = self.plans.pop(0)
        moves = plan.receives
        for i in range(len(moves)):
            source = self.live[moves.peer[i]][plan.layer][moves.tensor[i]][moves.peer_row[i]]
            self.buffers.landing[plan.slot][moves.landing_offset[i] :][: len(source)] = source
        return TransferReceipt(int(moves.nbytes.sum()), 0)


def ranks_at_the_vote(row_nbytes=ROW_NBYTES, observer=Checksums):
    """Bring two layers to the vote on every rank; return the ranks' hooks, landing memory and plans."""
    maps = shuffles(2, 2, RANKS, ROWS)
    plan = plan_moves(*maps, world_size=RANKS)
    models = [Model(rank, ROWS, [row_nbytes] * 2) for rank in range(RANKS)]
    for model in models:
        model.fill(maps[0])
    live, ranks = [model.weights for model in models], []
    for rank, model in enumerate(models):
        layout = build_layout(model.weights)
        geometry = layout.geometries[0]
        landing = [torch.zeros(geometry.nbytes_grid, dtype=torch.uint8) for _ in range(2)]
        watching = observer()
        hooks = BackendHooks("by hand", ByHand(live), [watching])
        hooks.register_buffers(Buffers(layout.rows, landing, None, 0))
        rules = TransferRules("rows")
        plans = [plan.transfer_plan(k, rank, geometry, rules, generation=1, sequence=k + 1, slot=k) for k in range(2)]
        handles = [hooks.transfer(each) for each in plans]  # both layers are under way
        for handle in handles:
            hooks.wait(handle, 1.0)
        ranks.append(SimpleNamespace(hooks=hooks, landing=landing, plans=plans, observer=watching, live=live[rank]))
    return ranks


def vote(ranks, layer=1):
    def event(kind, **given):
        return Event(kind, "main", 1, 1, layer, True, **given)

    evidence = {rank: one.hooks.observe(event("vote")).get("checksums") for rank, one in enumerate(ranks)}
    ranks[0].hooks.observe(event("tally", evidence={"checksums": evidence}))
    return evidence


def test_rows_that_landed_as_they_were_sent_pass():
    ranks = ranks_at_the_vote()
    assert all(vote(ranks, layer) for layer in (0, 1))


class Waits(Observer):
    """The layers whose waits ended, in order."""

    name = "waits"

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[int] = []

    def ends(self, step) -> None:
        if step.name == "wait":
            self.layers.append(step.plan.layer)


def test_two_transfers_under_way_are_told_apart_though_their_handles_are_one_object():
    assert [one.observer.layers for one in ranks_at_the_vote(observer=Waits)] == [[0, 1]] * RANKS


def received():
    return [
        (rank, number)
        for rank, one in enumerate(ranks_at_the_vote(observer=Observer))
        for number in range(len(one.plans[1].receives))
    ]


@pytest.mark.parametrize(("rank", "number"), received())
def test_a_flipped_bit_in_any_row_is_found_and_named(rank, number):
    ranks = ranks_at_the_vote()
    moves = ranks[rank].plans[1].receives
    last = int(moves.landing_offset[number] + moves.nbytes[number]) - 1
    ranks[rank].landing[1][last] ^= 1
    with pytest.raises(TransferError) as caught:
        vote(ranks)
    src, tensor, row = int(moves.peer[number]), int(moves.tensor[number]), int(moves.row[number])
    assert caught.value.fields == {"layer": 1, "what": f"tensor {tensor}, row {row}", "src": src, "dst": rank}


def test_a_source_row_that_the_host_writes_while_it_travels_is_found():
    ranks = ranks_at_the_vote()
    moves = ranks[0].plans[1].receives  # rank 0 has read; its source takes digests, as if it waited, only now
    source = int(moves.peer[0])
    ranks[source].live[1][moves.tensor[0]][moves.peer_row[0]] += 1
    ranks[source].observer.starts("wait", ranks[source].plans[1])
    with pytest.raises(TransferError) as caught:
        vote(ranks)
    assert (caught.value.code, caught.value.fields["src"]) == ("EPLB-T011", source)


@pytest.mark.parametrize("coarse", [(0,), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("flipped", [False, True])
def test_ranks_without_room_for_every_row_are_compared_by_tensor_or_pair(monkeypatch, coarse, level, flipped):
    encode = checksums._encode
    full = []
    turn = iter(range(RANKS))

    def cut(entries):
        rank = next(turn)
        exact = checksums._MAGIC + checksums._coarse(entries, level).tobytes()
        full.append(len(encode(entries)) > len(exact))
        room = len(exact) if rank in coarse else checksums.MAX_EVIDENCE_NBYTES
        with monkeypatch.context() as patch:
            patch.setattr(checksums, "MAX_EVIDENCE_NBYTES", room)
            return encode(entries)

    monkeypatch.setattr(checksums, "_encode", cut)
    ranks = ranks_at_the_vote()
    moves = ranks[1].plans[1].receives
    if flipped:
        ranks[1].landing[1][int(moves.landing_offset[0])] ^= 0x80
        with pytest.raises(TransferError) as caught:
            vote(ranks)
        src = int(moves.peer[0])
        known = src in coarse or 1 in coarse
        what = {1: f"tensor {int(moves.tensor[0])}, some row", 2: "some tensor"}[level]
        exact = f"tensor {int(moves.tensor[0])}, row {int(moves.row[0])}"
        assert caught.value.fields == {"layer": 1, "what": what if known else exact, "src": src, "dst": 1}
    else:
        vote(ranks)
    assert all(full), "the rows did fit: nothing was tried"


def test_evidence_stays_within_its_share_of_a_ballot_however_many_rows_there_are(monkeypatch):
    ranks = ranks_at_the_vote([4] * 400)
    assert sum(len(one.plans[1].receives) for one in ranks) > RANKS * 400
    evidence = vote(ranks)
    assert all(0 < len(value) <= checksums.MAX_EVIDENCE_NBYTES for value in evidence.values())
    monkeypatch.setattr(checksums, "MAX_EVIDENCE_NBYTES", 20)
    with pytest.raises(MetadataError, match="even as one for each pair of ranks"):
        vote(ranks_at_the_vote())


def test_a_rank_that_gave_no_digests_or_fewer_than_its_peer_is_named():
    evidence = vote(ranks_at_the_vote())
    with pytest.raises(TransferError, match="rank 2 gave none") as caught:
        checksums.compare(1, {rank: evidence[rank] for rank in (0, 1)})
    assert caught.value.code == "EPLB-T012"
    shorter = evidence[1][: -checksums._ENTRY.itemsize]
    with pytest.raises(TransferError, match=r"sent \d+ of them to rank 1, which says \d+ landed"):
        checksums.compare(1, {**evidence, 1: shorter})


@pytest.mark.parametrize("damage", [lambda value: value[:-1], lambda value: b"x" + value[1:], lambda value: b""])
def test_evidence_that_cannot_be_read_is_refused(damage):
    evidence = vote(ranks_at_the_vote())
    with pytest.raises(MetadataError, match="Refused a message from rank 1") as caught:
        checksums.compare(1, {**evidence, 1: damage(evidence[1])})
    assert caught.value.code == "EPLB-M005"


def test_a_row_for_several_ranks_is_read_once(monkeypatch):
    seen = []
    monkeypatch.setattr(checksums, "digest", lambda row: seen.append(row.data_ptr()) or 0)
    old = np.arange(RANKS * ROWS)[None]
    new = old.copy()
    new[0, [ROWS, 2 * ROWS]] = 0  # ranks 1 and 2 need expert 0
    geometry = build_layout([[torch.zeros(ROWS, 8)]]).geometries[0]
    moves = plan_moves(old, new, world_size=RANKS)
    plan = moves.transfer_plan(0, 0, geometry, TransferRules("rows"), generation=1, sequence=1, slot=0)
    assert plan.sends.peer.tolist() == [1, 2]
    observer = Checksums()
    observer.buffers = Buffers([[torch.zeros(ROWS, 32, dtype=torch.uint8)]], [], None, 0)
    observer.starts("wait", plan)
    assert len(seen) == 1
