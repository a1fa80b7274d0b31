"""What another life left in the store is never obeyed: restarts, second communicators, two groups over one store."""

from __future__ import annotations

import signal

import pytest

from eplb_core.errors import ConfigError
from eplb_core.testing.model import shuffles
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from tests.support.backends import BackendCase
from tests.support.lives import (
    NUM_ROWS,
    Life,
    all_refused,
    all_went_well,
    at,
    control_plane,
    heard_within,
    over_every_transport,
    over_gloo_and_nixl,
    same_bytes_as_claimed,
)

pytestmark = pytest.mark.slow

LIMIT_S = 6.0
ALONE_S = 1.0
"""How long one rank is watched before the other comes: it cannot have finished by then, or it obeyed a stale key."""


# --- the same job again -----------------------------------------------------------------------------------------------


def started_again(rank: Rank, backend: str):
    maps = shuffles(3, 3, 2, NUM_ROWS)
    number, again = rank.rank % 2, rank.rank >= 2
    if again:
        rank.listen()
    life = Life(rank, backend, maps[0], number=number, world_size=2)
    life.rearrange("first", maps[2 if again else 1])
    rank.tell("rearranged")
    if not again:
        rank.listen()  # until it is killed
    life.rearrange("second", maps[0])
    return life.end()


@over_every_transport
def test_a_job_started_again_on_the_same_store_moves_its_own_rows(backend: BackendCase) -> None:
    """Row 2."""
    with Ranks(4, started_again, backend.name, env=backend.env) as ranks:
        assert [ranks.hear(number, 30) for number in (0, 1)] == ["rearranged"] * 2
        for number in (0, 1):
            ranks.signal(number, signal.SIGKILL)
        ranks.tell(2, "start")
        alone = heard_within(ranks, 2, ALONE_S)
        ranks.tell(3, "start")
        stories = [outcome.value for outcome in ranks.join(40)[2:]]
    same_bytes_as_claimed(*stories)
    assert alone is None
    all_went_well(at("first", *stories))
    all_went_well(at("second", *stories))


# --- the same processes again -----------------------------------------------------------------------------------------


def builds_another(rank: Rank, backend: str):
    maps = shuffles(4, 3, 2, NUM_ROWS)
    before = Life(rank, backend, maps[0])
    before.rearrange("first life", maps[1])
    steps = before.end()
    life = Life(rank, backend, maps[1], model=before.model)
    rank.tell("built")
    rank.listen()
    life.rearrange("second life", maps[2])
    rank.tell("back")
    life.rearrange("go on", maps[3])
    return [*steps, *life.end()]


@over_every_transport
def test_a_second_communicator_after_a_forced_close_moves_its_own_rows(backend: BackendCase) -> None:
    """Row 2: another control plane over the same store."""
    with Ranks(2, builds_another, backend.name, env=backend.env) as ranks:
        assert [ranks.hear(number, 30) for number in (0, 1)] == ["built"] * 2
        ranks.tell(1, "begin")
        alone = heard_within(ranks, 1, ALONE_S)
        ranks.tell(0, "begin")
        stories = ranks.values(40)
    same_bytes_as_claimed(*stories)
    assert alone is None
    all_went_well(at("second life", *stories))
    all_went_well(at("go on", *stories))


# --- one rank again ---------------------------------------------------------------------------------------------------


def one_starts_again(rank: Rank, backend: str):
    """Process 1 is rank 1 until it is killed; process 2 is rank 1 again, with the weights loaded as they were."""
    maps = shuffles(4, 3, 2, NUM_ROWS)
    again = rank.rank == 2
    if again:
        rank.listen()
    life = Life(
        rank,
        backend,
        maps[1 if again else 0],
        number=min(rank.rank, 1),
        world_size=2,
        timeout_s=1.5 if again else 10.0,
    )
    if not again:
        life.rearrange("first", maps[1])
        rank.tell("rearranged")
        rank.listen()
    life.rearrange("unprepared", maps[2])
    rank.tell("tried")
    rank.listen()
    life.do("rebuild", life.comm.rebuild, LIMIT_S)
    life.do("go on", life.comm.rearrange, maps[1], maps[3])
    return life.end()


@over_every_transport
def test_a_rank_started_again_while_the_other_idles_takes_nothing_that_was_not_sent(backend: BackendCase) -> None:
    """Row 2."""
    with Ranks(3, one_starts_again, backend.name, env=backend.env) as ranks:
        assert [ranks.hear(number, 30) for number in (0, 1)] == ["rearranged"] * 2
        ranks.signal(1, signal.SIGKILL)
        for number in (2, 0):  # the one that idled moves only when the other has been told
            ranks.tell(number, "go on")
            assert ranks.hear(number, 30) == "tried"
        for number in (0, 2):
            ranks.tell(number, "rebuild")
        outcomes = ranks.join(40)
    assert [outcomes[number].error for number in (0, 2)] == [None, None]
    stories = [outcomes[number].value for number in (0, 2)]
    same_bytes_as_claimed(*stories)
    all_refused(at("unprepared", *stories))
    all_went_well(at("rebuild", *stories))
    all_went_well(at("go on", *stories))


# --- two groups, one store --------------------------------------------------------------------------------------------


def in_one_of_two_groups(rank: Rank, backend: str):
    """Processes 0 and 1 are a group, 2 and 3 another, whose experts have other bytes; neither knows of the other."""
    maps = shuffles(4, 3, 2, NUM_ROWS)
    group = rank.rank // 2
    if group == 1:
        rank.listen()
    life = Life(rank, backend, maps[0], number=rank.rank % 2, world_size=2, version=group)
    life.rearrange("first", maps[1])
    rank.tell("first")
    rank.listen()
    life.rearrange("second", maps[2])
    rank.tell("second")
    rank.listen()
    life.do("rebuild", life.comm.rebuild, LIMIT_S)
    life.rearrange("third", maps[3])
    rank.tell("third")
    return life.end()


def run_two_groups(backend: BackendCase, at_once: bool):
    """The second group starts when the first is connected, one rank after the other; both go on, and rebuild."""
    groups = ((0, 1), (2, 3))
    with Ranks(4, in_one_of_two_groups, backend.name, env=backend.env) as ranks:
        assert [ranks.hear(number, 30) for number in groups[0]] == ["first"] * 2
        ranks.tell(2, "start")
        alone = heard_within(ranks, 2, ALONE_S)
        ranks.tell(3, "start")
        assert [ranks.hear(number, 30) for number in ((3,) if alone else (2, 3))] == ["first"] * (1 if alone else 2)
        for number in range(4):
            ranks.tell(number, "go on")
        assert [ranks.hear(number, 30) for number in range(4)] == ["second"] * 4
        for group in (range(4),) if at_once else groups:
            for number in group:
                ranks.tell(number, "rebuild")
            assert [ranks.hear(number, 30) for number in group] == ["third"] * len(group)
        stories = ranks.values(40)
    same_bytes_as_claimed(*stories)
    assert all(step.went_well or step.refused for story in stories for step in story)
    for group in groups:  # whole or not at all
        for steps in zip(*(stories[number] for number in group), strict=True):
            assert len({step.went_well for step in steps}) == 1, steps
    if alone is not None:  # its place was taken, and it was told so at once
        all_refused(at("first", stories[2]))
    return stories


@over_gloo_and_nixl
def test_two_groups_over_one_store_never_get_each_others_weights(backend: BackendCase) -> None:
    """Row 18."""
    stories = run_two_groups(backend, at_once=False)
    all_went_well(at("first", *stories[:2]))


@over_gloo_and_nixl
def test_two_groups_that_rebuild_at_once_never_get_each_others_weights(backend: BackendCase) -> None:
    """Row 18: each of the four knows from its connections with whom it was."""
    run_two_groups(backend, at_once=True)


def twice_the_same_rank(rank: Rank, backend: str):
    """Process 2 takes itself for rank 1 as well, with weights of its own."""
    maps = shuffles(4, 3, 2, NUM_ROWS)
    twin = rank.rank == 2
    if twin:
        rank.listen()
    life = Life(
        rank,
        backend,
        maps[0],
        number=min(rank.rank, 1),
        world_size=2,
        version=int(twin),
        timeout_s=1.5 if twin else 10.0,
    )
    life.rearrange("first", maps[1])
    rank.tell("first")
    if not twin:
        for step, wanted in (("second", maps[2]), ("third", maps[3])):
            rank.listen()
            life.rearrange(step, wanted)
            rank.tell(step)
    return life.end()


@over_gloo_and_nixl
@pytest.mark.parametrize("others", ["idle", "busy"])
def test_a_second_process_of_one_rank_is_refused_and_the_first_goes_on(backend: BackendCase, others: str) -> None:
    """Row 18."""
    with Ranks(3, twice_the_same_rank, backend.name, env=backend.env) as ranks:
        assert [ranks.hear(number, 30) for number in (0, 1)] == ["first"] * 2
        ranks.tell(2, "start")
        if others == "idle":
            assert ranks.hear(2, 30) == "first"
        for step in ("second", "third"):
            for number in (0, 1):
                ranks.tell(number, "go on")
            assert [ranks.hear(number, 30) for number in (0, 1)] == [step] * 2
        stories = ranks.values(40)
    same_bytes_as_claimed(*stories)
    all_refused(at("first", stories[2]))
    for name in ("second", "third"):
        steps = at(name, *stories[:2])
        assert all(step.went_well for step in steps) or all(step.refused for step in steps), steps


def two_of_one_rank_rebuild(rank: Rank):
    """Both hold the same bytes, so only rows that never came could be wrong."""
    maps = shuffles(4, 3, 2, NUM_ROWS)
    twin = rank.rank == 2
    life = Life(
        rank,
        "torch_gloo",
        maps[1 if twin else 0],
        number=min(rank.rank, 1),
        world_size=2,
        timeout_s=1.5 if twin else 10.0,
    )
    if not twin:
        life.rearrange("first", maps[1])
    rank.tell("ready")
    rank.listen()
    life.do("rebuild", life.comm.rebuild, 2.0)
    rank.tell("tried")
    rank.listen()
    life.do("go on", life.comm.rearrange, maps[1], maps[2])
    return life.end()


@pytest.mark.parametrize("order", [((0, 1), (2,)), ((0, 1, 2),)], ids=["after the others", "at once"])
def test_of_two_processes_that_are_one_rank_at_most_one_takes_part_in_a_rebuild(order) -> None:
    """Row 18."""
    with Ranks(3, two_of_one_rank_rebuild) as ranks:
        assert [ranks.hear(number, 30) for number in range(3)] == ["ready"] * 3
        for together in order:
            for number in together:
                ranks.tell(number, "rebuild")
            assert [ranks.hear(number, 30) for number in together] == ["tried"] * len(together)
        for number in (2, 0, 1):
            ranks.tell(number, "go on")
        stories = ranks.values(40)
    same_bytes_as_claimed(*stories)
    for name in ("rebuild", "go on"):
        first, *twins = at(name, *stories)
        assert all(step.went_well or step.refused for step in (first, *twins)), (first, *twins)
        assert sum(step.went_well for step in twins) == int(first.went_well), (first, *twins)


# --- two of one name in one process -----------------------------------------------------------------------------------


def opens_two_of_one_name(rank: Rank):
    maps = shuffles(3, 3, 2, NUM_ROWS)
    control = control_plane(rank)
    life = Life(rank, "torch_gloo", maps[0], control=control)
    told = []
    for name in ("default", "other"):
        try:
            Life(rank, "torch_gloo", maps[0], control=control, name=name).comm.close(force=True)
            told.append("")
        except ConfigError as error:
            told.append(error.code)
    life.rearrange("first", maps[1])
    life.comm.close()
    again = Life(rank, "torch_gloo", maps[1], control=control, model=life.model)
    again.rearrange("again", maps[2])
    again.comm.close()
    return told, [*life.steps, *again.steps]


def test_a_second_open_communicator_of_one_name_on_one_control_plane_is_refused() -> None:
    """Rows 14 and 18."""
    results = run_ranks(2, opens_two_of_one_name)
    stories = [story for _, story in results]
    assert [told for told, _ in results] == [["EPLB-C010", ""]] * 2
    same_bytes_as_claimed(*stories)
    all_went_well(at("first", *stories))
    all_went_well(at("again", *stories))
