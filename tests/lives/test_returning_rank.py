"""A rank that was left out, came late, or was told other members: all meet again, or all are told why not."""

from __future__ import annotations

import signal

import numpy as np
import pytest

import eplb_core as eplb
from eplb_core.hookspecs import hookimpl
from eplb_core.testing.faults import FaultInjector
from eplb_core.testing.model import Map, shuffles
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from tests.support.backends import BackendCase
from tests.support.lives import (
    AT_ONCE_S,
    NUM_ROWS,
    Life,
    StoreProxy,
    all_refused,
    all_went_well,
    at,
    control_plane,
    over_every_transport,
    over_gloo_and_nixl,
    same_bytes_as_claimed,
    store_at,
)

pytestmark = pytest.mark.slow

LIMIT_S = 6.0


def reversed_within(mapping: Map, members: list[int]) -> Map:
    """Reverse the columns of these ranks among themselves; the others' stay."""
    columns = [rank * NUM_ROWS + row for rank in members for row in range(NUM_ROWS)]
    wanted = mapping.copy()
    wanted[:, columns] = mapping[:, columns[::-1]]
    return wanted


# --- left out while it was stopped ------------------------------------------------------------------------------------


def one_is_left_out(rank: Rank, backend: str):
    """Rank 2 is stopped in the wait of layer 1; the others rebuild without it and rearrange; then it wakes."""
    maps = shuffles(3, 3, 3, NUM_ROWS)
    observers = [FaultInjector("wait", "stop", generation=2, layer=1)] if rank.rank == 2 else []
    life = Life(rank, backend, maps[0], timeout_s=1.5, observers=observers)
    life.connect()
    life.rearrange("first", maps[1])
    life.rearrange("one stops", maps[2])
    if rank.rank != 2:
        life.do("without it", life.comm.rebuild, LIMIT_S, ranks=[0, 1])
        alone = life.held.copy()
        alone[:, 2 * NUM_ROWS :] = -1  # nobody holds anything there
        life.do("go on without it", life.comm.rearrange, alone, reversed_within(alone, [0, 1]))
    rank.tell(life.held)
    rank.listen()
    met = life.do("all rebuild", life.comm.rebuild, LIMIT_S, ranks=[0, 1, 2]).went_well
    rank.tell(met)
    truth = rank.listen()  # each rank's columns as that rank claims them
    life.reloaded("hosts compare", truth)
    if not met:
        life.do("all rebuild again", life.comm.rebuild, LIMIT_S, ranks=[0, 1, 2])
    life.do("go on together", life.comm.rearrange, truth, reversed_within(truth, [0, 1, 2]))
    return life.end()


@pytest.mark.slow
@over_every_transport
def test_a_rank_that_slept_through_a_rebuild_meets_the_others_or_is_told(backend: BackendCase) -> None:
    """Row 1."""
    with Ranks(3, one_is_left_out, backend.name, env=backend.env) as ranks:
        claims = [ranks.hear(0, 30), ranks.hear(1, 30)]
        ranks.signal(2, signal.SIGCONT)
        claims.append(ranks.hear(2, 30))
        for number in range(3):
            ranks.tell(number, "rebuild")
        met = [ranks.hear(number, 30) for number in range(3)]
        truth = claims[0].copy()
        for number, claim in enumerate(claims):
            columns = slice(number * NUM_ROWS, (number + 1) * NUM_ROWS)
            truth[:, columns] = claim[:, columns]
        for number in range(3):
            ranks.tell(number, truth)
        stories = ranks.values(40)
    same_bytes_as_claimed(*stories)
    all_refused(at("one stops", *stories))
    all_went_well(at("go on without it", *stories[:2]))
    assert met in ([True] * 3, [False] * 3), at("all rebuild", *stories)  # never one of them alone
    if not any(met):
        all_refused(at("all rebuild", *stories))
        all_went_well(at("all rebuild again", *stories))
    all_went_well(at("hosts compare", *stories))
    all_went_well(at("go on together", *stories))


# --- rebuilds tried unequally often -----------------------------------------------------------------------------------


def comes_late(rank: Rank, backend: str):
    maps = shuffles(3, 3, 2, NUM_ROWS)
    life = Life(rank, backend, maps[0])
    life.rearrange("first", maps[1])
    if rank.rank == 0:
        life.do("alone", life.comm.rebuild, 0.5)
        rank.tell("failed")
    rank.listen()
    life.do("together", life.comm.rebuild, LIMIT_S)
    life.rearrange("go on", maps[2])
    return life.end()


@over_every_transport
def test_ranks_meet_at_the_first_rebuild_they_share_although_one_had_tried_before(backend: BackendCase) -> None:
    """Row 5."""
    with Ranks(2, comes_late, backend.name, env=backend.env) as ranks:
        assert ranks.hear(0, 30) == "failed"
        for number in range(2):
            ranks.tell(number, "rebuild")
        stories = ranks.values(40)
    same_bytes_as_claimed(*stories)
    all_refused(at("alone", stories[0]))
    all_went_well(at("together", *stories))
    all_went_well(at("go on", *stories))


def names_others_first(rank: Rank, backend: str):
    maps = shuffles(3, 3, 3, NUM_ROWS)
    life = Life(rank, backend, maps[0])
    life.rearrange("first", maps[1])
    if rank.rank == 1:
        life.do("mistaken", life.comm.rebuild, 0.5, ranks=[1, 2])
        rank.tell("failed")
    rank.listen()
    life.do("together", life.comm.rebuild, LIMIT_S, ranks=[0, 1, 2])
    life.rearrange("go on", maps[2])
    return life.end()


@over_every_transport
def test_a_rank_that_named_other_members_first_meets_the_others_all_the_same(backend: BackendCase) -> None:
    """Row 5."""
    with Ranks(3, names_others_first, backend.name, env=backend.env) as ranks:
        assert ranks.hear(1, 30) == "failed"
        for number in range(3):
            ranks.tell(number, "rebuild")
        stories = ranks.values(40)
    same_bytes_as_claimed(*stories)
    all_refused(at("mistaken", stories[1]))
    all_went_well(at("together", *stories))
    all_went_well(at("go on", *stories))


# --- members that differ ----------------------------------------------------------------------------------------------


class LosesTheStore:
    """At the vote of layer 1, generation 2: ranks 1 and 2 lose the store once they voted, rank 0 votes when told."""

    name = "loses the store"

    def __init__(self, rank: Rank, proxy: StoreProxy | None) -> None:
        self.rank, self.proxy = rank, proxy

    @hookimpl
    def observe(self, event):
        if (event.kind, event.layer, event.generation) != ("vote", 1, 2):
            return
        if self.proxy is None:
            self.rank.listen()
        else:  # a ballot takes a few requests; a wait for the decision asks until there is one
            self.proxy.cut_after(100, then=lambda: self.rank.tell("lost"))


def in_doubt_and_told_other_members(rank: Rank):
    """Rank 0 sees layer 1 committed, ranks 1 and 2 do not know; then rank 1 is told other members than the rest."""
    maps = shuffles(4, 3, 3, NUM_ROWS)
    proxy = StoreProxy(rank.port) if rank.rank else None
    control = None
    if proxy is not None:
        control = eplb.ControlPlane.from_store(store_at(proxy.port), rank=rank.rank, world_size=rank.world_size)
    observers = [LosesTheStore(rank, proxy)]
    life = Life(rank, "torch_gloo", maps[0], control=control, timeout_s=1.5, observers=observers)
    life.connect()
    life.rearrange("first", maps[1])
    life.rearrange("store lost", maps[2])
    rank.tell("failed")
    rank.listen()
    direct = control_plane(rank)
    told = [1, 2] if rank.rank == 1 else [0, 1, 2]
    life.do("members differ", life.comm.rebuild, 1.5, control=direct, ranks=told)
    rank.tell("tried")
    rank.listen()
    life.do("all rebuild", life.comm.rebuild, LIMIT_S, control=direct, ranks=[0, 1, 2])
    life.rearrange("go on", maps[3])
    return life.end()


@pytest.mark.slow
def test_nothing_is_settled_among_ranks_that_were_told_different_members() -> None:
    """Row 10."""
    with Ranks(3, in_doubt_and_told_other_members) as ranks:
        assert [ranks.hear(number, 30) for number in (1, 2)] == ["lost", "lost"]
        ranks.tell(0, "vote")
        for note in ("failed", "tried"):
            assert [ranks.hear(number, 30) for number in range(3)] == [note] * 3
            for number in range(3):
                ranks.tell(number, "rebuild")
        stories = ranks.values(40)
    same_bytes_as_claimed(*stories)
    lost = at("store lost", *stories)
    all_refused(lost)
    assert [1 in step.committed for step in lost] == [True, False, False]
    differ = at("members differ", *stories)
    all_refused(differ)
    assert [step.placement for step in differ] == [step.placement for step in lost]
    all_went_well(at("all rebuild", *stories))
    new_layer = shuffles(4, 3, 3, NUM_ROWS)[2][1].tolist()
    assert all(step.placement[1] == new_layer for step in at("all rebuild", *stories))
    all_went_well(at("go on", *stories))


def told_other_members(rank: Rank, backend: str):
    maps = shuffles(3, 3, 3, NUM_ROWS)
    life = Life(rank, backend, maps[0])
    life.rearrange("first", maps[1])
    told = [0, 1] if rank.rank == 0 else [0, 1, 2]
    life.do("members differ", life.comm.rebuild, 1.0, ranks=told)
    rank.tell("tried")
    rank.listen()
    life.do("all rebuild", life.comm.rebuild, LIMIT_S, ranks=[0, 1, 2])
    life.rearrange("go on", maps[2])
    return life.end()


@over_gloo_and_nixl
def test_ranks_that_were_told_different_members_say_so_and_meet_once_they_agree(backend: BackendCase) -> None:
    """Row 10."""
    with Ranks(3, told_other_members, backend.name, env=backend.env) as ranks:
        assert [ranks.hear(number, 30) for number in range(3)] == ["tried"] * 3
        for number in range(3):
            ranks.tell(number, "rebuild")
        stories = ranks.values(40)
    same_bytes_as_claimed(*stories)
    differ = at("members differ", *stories)
    all_refused(differ)
    assert all(step.code.startswith("EPLB-T") for step in differ), differ
    all_went_well(at("all rebuild", *stories))
    all_went_well(at("go on", *stories))


# --- no byte has moved ------------------------------------------------------------------------------------------------


def whose_first_maps_differ(rank: Rank):
    maps = shuffles(3, 3, 2, NUM_ROWS)
    life = Life(rank, "torch_gloo", maps[0])
    wrong = maps[2] if rank.rank == 1 else maps[0]
    life.do("maps differ", life.comm.rearrange, wrong, maps[1])
    life.do("rebuild", life.comm.rebuild, LIMIT_S)
    life.do("go on", life.comm.rearrange, maps[0], maps[1])
    return life.model.wrong_rows(maps[1]), life.end()


def test_ranks_rebuild_after_an_error_of_plan_on_the_very_first_call() -> None:
    """Row 10."""
    results = run_ranks(2, whose_first_maps_differ)
    stories = [story for _, story in results]
    all_refused(at("maps differ", *stories))
    assert [step.code for step in at("rebuild", *stories)] == ["", ""]
    all_went_well(at("go on", *stories))
    assert [wrong for wrong, _ in results] == [[], []]


def interrupted_while_agreeing(rank: Rank, generation: int):
    maps = shuffles(4, 3, 2, NUM_ROWS)
    observers = [FaultInjector("agree", "interrupt", generation)] if rank.rank == 1 else []
    life = Life(rank, "torch_gloo", maps[0], observers=observers)
    for number in range(1, generation):
        life.rearrange(f"healthy {number}", maps[number])
    life.rearrange("interrupted", maps[generation])
    life.do("rebuild", life.comm.rebuild, LIMIT_S)
    life.rearrange("go on", maps[3])
    return life.end()


@pytest.mark.parametrize("generation", [1, 2])
def test_ranks_rebuild_after_ctrl_c_while_agreeing(generation: int) -> None:
    """Row 10."""
    stories = run_ranks(2, interrupted_while_agreeing, generation)
    same_bytes_as_claimed(*stories)
    told, interrupted = at("interrupted", *stories)
    assert interrupted.code == "KeyboardInterrupt"
    assert told.refused
    assert told.seconds < AT_ONCE_S
    all_went_well(at("rebuild", *stories))
    all_went_well(at("go on", *stories))


# --- connecting again -------------------------------------------------------------------------------------------------


class ConnectsOnce:
    """This rank's backend connects to the peers of the first plan, and to none that come later."""

    name = "connects once"

    def __init__(self) -> None:
        self.calls = 0

    @hookimpl(wrapper=True)
    def exchange_metadata(self, local, peers):
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("no route to host")
        return (yield)


def connects_after_a_rearrangement(rank: Rank, backend: str):
    """The plan needs ranks 0 and 1 alone, so only they are linked before connect() asks for every pair."""
    held = np.arange(3 * NUM_ROWS)[None].repeat(3, axis=0)
    observers = [ConnectsOnce()] if rank.rank == 2 else []
    life = Life(rank, backend, held, observers=observers)
    life.rearrange("first", reversed_within(held, [0, 1]))
    life.do("connect", life.comm.connect, LIMIT_S)
    return life.end()


@over_gloo_and_nixl
def test_a_peer_that_cannot_connect_after_a_rearrangement_is_named_on_every_rank(backend: BackendCase) -> None:
    """Row 13."""
    stories = run_ranks(3, connects_after_a_rearrangement, backend.name, env=backend.env)
    same_bytes_as_claimed(*stories)
    all_went_well(at("first", *stories))
    connect = at("connect", *stories)
    all_refused(connect)
    assert len({step.text for step in connect}) == 1, connect
    assert "ank 2" in connect[0].text
    assert "no route to host" in connect[0].text
    assert max(step.seconds for step in connect) < AT_ONCE_S
