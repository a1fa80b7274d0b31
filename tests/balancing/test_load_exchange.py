"""The load of all ranks: added up over a real store by one rank, placed once, the same for all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch.distributed as dist

from eplb_core.balancing.load_exchange import LoadExchange, groups_of
from eplb_core.balancing.policy import NewPlacement
from eplb_core.control.store import StoreClient
from eplb_core.errors import PlanError, StalledError, error_for
from eplb_core.voting.members import Members
from eplb_core.wire.envelope import MessageScope

SHAPE = {"num_layers": 2, "num_logical_experts": 3, "num_physical_experts": 4}


class Group:
    """Ranks as threads, each with a connection of its own to one store."""

    def __init__(self, members, **shape):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = tuple(members)
        self.shape = SHAPE | shape
        self.exchanges = {rank: self.exchange(rank) for rank in self.ranks}

    def exchange(self, rank):
        client = StoreClient(self.store.clone(), "eplb/test", 10.0)
        scope = MessageScope("test", rank, 1, 0)
        members = Members(client, scope, members=self.ranks, namespace="epoch", timeout_s=10.0)
        return LoadExchange(client, members, members.key, **self.shape)

    def run(self, of_rank, place, pause=lambda what, missing: None, ranks=None, versions=()):
        """Run a round on all ranks; return each one's outcome, errors included."""

        def outcome(rank):
            try:
                return self.exchanges[rank].run(
                    100 + rank,
                    versions[rank] if versions else 0,
                    of_rank(rank),
                    lambda load: place(rank, load),
                    pause,
                )
            except Exception as error:
                return error

        chosen = self.ranks if ranks is None else ranks
        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(outcome, chosen))

    def keys(self):
        return self.store.num_keys()


def placing(calls):
    def place(rank, load):
        calls.append((rank, load))
        return NewPlacement(np.array([[0, 1, 2, 0], [2, 1, 0, 2]]), 0.5, 0.9, 2, 7, 9)

    return place


@pytest.mark.parametrize("members", [(0,), (0, 1), (1, 3, 4), tuple(range(70))], ids=len)
def test_one_rank_places_by_the_sum_of_all_and_all_have_what_it_placed(members):
    group, calls = Group(members), []
    rounds = group.run(lambda rank: np.full((2, 3), rank + 1.0), placing(calls))
    assert [rank for rank, _ in calls] == [members[0]]
    assert (calls[0][1] == sum(rank + 1 for rank in members)).all()
    for found in rounds:
        assert found.step == 100 + members[0]
        placement = found.placement
        assert placement.physical_to_logical_map.tolist() == [[0, 1, 2, 0], [2, 1, 0, 2]]
        assert (placement.balancedness_before, placement.balancedness_after) == (0.5, 0.9)
        assert (placement.num_moved_layers, placement.num_rows, placement.num_rows_unaligned) == (2, 7, 9)


def test_members_are_cut_into_groups_of_about_the_square_root_when_they_are_many():
    assert [len(group) for group in groups_of(range(64))] == [64]
    assert [len(group) for group in groups_of(range(65))] == [9] * 7 + [2]
    assert max(len(group) for group in groups_of(range(1024))) == 32


@pytest.mark.parametrize("tokens", [0.0, 1.0, 2.0**32 - 1, 2.0**32, 2.0**52, 0.25])
def test_tokens_arrive_as_they_were_counted(tokens):
    group, calls = Group((0, 1)), []
    load = np.array([[tokens, 0, 1], [2, 3, 4]])
    group.run(lambda rank: load if rank else np.zeros((2, 3)), placing(calls))
    assert (calls[0][1] == load).all()


def test_rounds_leave_one_placement_in_the_store_however_many_there_were():
    group, calls, counts = Group((0, 1, 2)), [], []
    for _ in range(5):
        group.run(lambda rank: np.ones((2, 3)), placing(calls))
        counts.append(group.keys())
    assert counts == counts[:1] * 5


@pytest.mark.parametrize("members", [(0, 1, 2), tuple(range(70))], ids=len)
def test_a_load_that_one_rank_refuses_is_refused_by_all_with_its_reason(members):
    group = Group(members)
    bad = PlanError("EPLB-P010", problem="the counts recorded for expert 1 of layer 0 add up to nan")
    rounds = group.run(lambda rank: bad if rank == members[-1] else np.ones((2, 3)), placing([]))
    assert {type(found.refusal) for found in rounds} == {PlanError}
    assert {(str(found.refusal), found.placement) for found in rounds} == {(str(bad), None)}
    again = group.run(lambda rank: np.ones((2, 3)), placing([]))
    assert {found.step for found in again} == {100}


@pytest.mark.parametrize("size", [3, 70])
def test_ranks_whose_maps_are_not_all_replaced_yet_call_it_off_and_meet_again(size):
    group = Group(range(size))
    versions = [1] * size
    versions[size - 2] = 0
    rounds = group.run(lambda rank: np.ones((2, 3)), placing([]), versions=versions)
    assert {found.refusal.code for found in rounds} == {"EPLB-T021"}
    rounds = group.run(lambda rank: np.ones((2, 3)), placing([]), versions=[1] * size)
    assert {found.step for found in rounds} == {100}
    assert {found.refusal for found in rounds} == {None}


def test_what_the_policy_refuses_is_refused_by_all():
    def place(rank, load):
        raise PlanError("EPLB-P006", problem="no room")

    rounds = Group((0, 1, 2)).run(lambda rank: np.ones((2, 3)), place)
    assert [str(found.refusal) for found in rounds] == ["No placement can be made: no room. [EPLB-P006]"] * 3


def test_ranks_of_another_shape_are_refused_by_all():
    group = Group((0, 1))
    group.exchanges[1] = Group.exchange(group, 1)
    group.exchanges[1]._load_shape = (2, 5)
    rounds = group.run(lambda rank: np.ones((2, 3 if rank == 0 else 5)), placing([]))
    assert {found.refusal.code for found in rounds} == {"EPLB-M005"}
    assert all("its load has 40 bytes" in str(found.refusal) for found in rounds)


def test_a_rank_that_waits_knows_for_whom_and_may_give_up():
    group, told = Group((0, 1, 2)), []

    def pause(what, missing):
        told.append((what, missing()))
        raise error_for("EPLB-T002", seconds=1.0, where=what, waiting_for=str(missing()))

    (error,) = group.run(lambda rank: np.ones((2, 3)), placing([]), pause, ranks=[0])
    assert isinstance(error, StalledError)
    assert told == [("the load of", [1, 2])]


def test_a_rank_waits_for_the_placement_as_long_as_nobody_ends_it():
    group, waiting = Group((0, 1)), threading.Event()
    results = {}

    def pause(what, missing):
        if what == "the placement":
            waiting.set()

    def late_rank():
        results["late"] = group.run(lambda rank: np.ones((2, 3)), placing([]), pause, [1])

    late = threading.Thread(target=late_rank)
    late.start()
    assert waiting.wait(20)
    results["root"] = group.run(lambda rank: np.ones((2, 3)), placing([]), ranks=[0])
    late.join(20)
    assert results["late"][0].step == results["root"][0].step == 100


def test_a_message_of_another_round_is_not_taken_for_this_ones():
    group = Group((0, 1))
    group.exchanges[1]._number = 5
    group.exchanges[1]._key = lambda kind, rank, number=None: group.exchanges[0]._key(kind, rank, number)
    rounds = group.run(lambda rank: np.ones((2, 3)), placing([]))
    assert rounds[0].refusal.code == "EPLB-M005"
    assert rounds[1].code == "EPLB-M005"
