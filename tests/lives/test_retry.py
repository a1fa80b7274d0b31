"""After a rearrangement that failed: what the report says holds does hold, and the next one starts from there."""

from __future__ import annotations

import threading

import pytest

from eplb_core.testing.faults import FaultInjector
from eplb_core.testing.model import shuffles
from eplb_core.testing.ranks import Rank, run_ranks
from tests.support.backends import BackendCase
from tests.support.lives import (
    AT_ONCE_S,
    NUM_ROWS,
    Life,
    all_refused,
    all_went_well,
    at,
    over_every_transport,
    over_gloo_and_nixl,
    same_bytes_as_claimed,
)

pytestmark = pytest.mark.slow

LIMIT_S = 6.0
FOUR_LAYERS = [[512, 16]] * 4


# --- one rank is ahead when it is called off --------------------------------------------------------------------------


def called_off_unequally(rank: Rank, backend: str, layer_ahead: str):
    """Rank 1 refuses layer 1, when rank 0 has committed layer 0 and so started layer 2, and rank 1 has done neither."""
    maps = shuffles(4, len(FOUR_LAYERS), 2, NUM_ROWS)
    if layer_ahead == "within ranks":
        maps[2][2] = maps[1][2].reshape(2, NUM_ROWS)[:, ::-1].reshape(-1)
    if rank.rank == 0:
        faults = FaultInjector("transfer", "delay", generation=3, layer=0, delay_s=0.3)
    else:
        faults = FaultInjector("vote", "raise", generation=2, layer=1)
    life = Life(rank, backend, maps[0], layers=FOUR_LAYERS, observers=[faults])
    life.rearrange("first", maps[1])
    gen = life.comm.begin(maps[1], maps[2])
    life.do("stage 0", gen.stage, 0)
    if rank.rank == 0:
        life.do("commit 0", gen.commit, 0)
    life.do("called off", gen.stage, 1)
    if life.steps[-1].decided:
        life.do("commit 0", gen.commit, 0)
    if life.rearrange("healthy", maps[3]).code == "EPLB-T004":  # what was in flight could not be drained
        life.do("rebuild", life.comm.rebuild, LIMIT_S)
        life.rearrange("healthy after it", maps[3])
    life.rearrange("one more", maps[0])
    return life.end()


@over_every_transport
@pytest.mark.parametrize("layer_ahead", ["between ranks", "within ranks"])
def test_the_next_rearrangement_is_exact_although_one_rank_had_started_more(backend: BackendCase, layer_ahead) -> None:
    """Row 3."""
    stories = run_ranks(2, called_off_unequally, backend.name, layer_ahead, env=backend.env)
    same_bytes_as_claimed(*(story[story.index(at("called off", story)[0]) :] for story in stories))
    called_off = at("called off", *stories)
    all_refused(called_off)
    assert all("injected" in step.text for step in called_off)
    healthy = at("healthy", *stories)
    if layer_ahead == "within ranks" or healthy[0].code != "EPLB-T004":  # nothing was in flight between them
        all_went_well(healthy)
    else:
        all_refused(healthy)
        healthy = at("healthy after it", *stories)
        all_went_well(healthy)
    assert max(step.seconds for step in healthy) < AT_ONCE_S
    all_went_well(at("one more", *stories))


# --- the same call again ----------------------------------------------------------------------------------------------


def repeats_the_call(rank: Rank, backend: str, generation: int):
    """The last of three layers is refused; the host makes the same call again, from what holds, and after a reload."""
    maps = shuffles(3, 3, 2, NUM_ROWS)
    observers = [FaultInjector("vote", "raise", generation, layer=2)] if rank.rank == 1 else []
    life = Life(rank, backend, maps[0], observers=observers)
    if generation == 2:
        life.rearrange("healthy", maps[1])
    old, new = maps[generation - 1], maps[generation]
    life.do("refused", life.comm.rearrange, old, new)
    life.do("the same again", life.comm.rearrange, old, new)
    life.rearrange("from what holds", new)
    life.model.fill(old)  # the host loads its weights anew
    life.reloaded("reloaded", old)
    life.do("after a reload", life.comm.rearrange, old, new)
    return life.end()


@over_every_transport
@pytest.mark.parametrize("generation", [1, 2])
def test_the_same_call_after_a_partial_commit_is_an_error_that_names_the_layer(
    backend: BackendCase, generation
) -> None:
    """Row 4."""
    stories = run_ranks(2, repeats_the_call, backend.name, generation, env=backend.env)
    assert all(step.committed == (0, 1) for step in at("refused", *stories))
    same_bytes_as_claimed(*(story[: story.index(at("from what holds", story)[0])] for story in stories))
    again = at("the same again", *stories)
    assert {step.code for step in again} == {"EPLB-P008"}, again
    assert {step.kind for step in again} == {"PlanError"}
    assert all("layer 0" in step.text.lower() for step in again), again
    all_went_well(at("from what holds", *stories))
    all_went_well(at("reloaded", *stories))
    all_went_well(at("after a reload", *stories))
    same_bytes_as_claimed(*stories)


def one_says_it_was_reloaded(rank: Rank):
    maps = shuffles(3, 3, 2, NUM_ROWS)
    life = Life(rank, "torch_gloo", maps[0])
    life.rearrange("first", maps[1])
    other = maps[1].copy()
    other[1] = maps[0][1]
    if rank.rank == 1:
        life.model.fill(other)
        life.reloaded("reloaded", other)
    life.do("one differs", life.comm.rearrange, maps[1], maps[2])
    if rank.rank == 0:
        life.model.fill(other)
        life.reloaded("reloaded", other)
    life.do("all the same", life.comm.rearrange, other, maps[2])
    return life.end()


def test_a_rank_that_alone_was_reloaded_is_found_before_a_byte_moves() -> None:
    """Row 4: what a host says with `reloaded` is compared at the next agreement."""
    stories = run_ranks(2, one_says_it_was_reloaded)
    same_bytes_as_claimed(*stories)
    all_went_well(at("reloaded", *stories))
    differs = at("one differs", *stories)
    assert {step.code for step in differs} == {"EPLB-P008"}, differs
    assert all("layer 1" in step.text.lower() for step in differs), differs
    all_went_well(at("all the same", *stories))


def a_map_that_cannot_be(rank: Rank):
    maps = shuffles(2, 3, 2, NUM_ROWS)
    life = Life(rank, "torch_gloo", maps[0])
    life.rearrange("first", maps[1])
    life.reloaded("too few layers", maps[0][:2])
    life.reloaded("too few columns", maps[0][:, :-1])
    gen = life.comm.begin(maps[1], maps[0])
    life.reloaded("inside a generation", maps[0])
    for layer in gen.layers:
        gen.stage(layer)
        gen.commit(layer)
    gen.end()
    life.rearrange("go on", maps[1])
    return life.end()


def test_reloaded_takes_a_whole_map_and_only_between_generations() -> None:
    """Row 4."""
    stories = run_ranks(2, a_map_that_cannot_be)
    same_bytes_as_claimed(*stories)
    for name in ("too few layers", "too few columns", "inside a generation"):
        steps = at(name, *stories)
        assert {step.kind for step in steps} == {"PlanError"}, steps
    all_went_well(at("go on", *stories))


# --- decided is not yet committed -------------------------------------------------------------------------------------


def looks_between_stage_and_commit(rank: Rank, backend: str):
    maps = shuffles(3, 3, 2, NUM_ROWS)
    life = Life(rank, backend, maps[0])
    life.rearrange("first", maps[1])
    gen = life.comm.begin(maps[1], maps[2])
    for layer in gen.layers:
        life.do(f"stage {layer}", gen.stage, layer)
        life.do(f"commit {layer}", gen.commit, layer)
    life.do("end", gen.end)
    return life.end()


@over_gloo_and_nixl
def test_a_report_between_stage_and_commit_describes_the_bytes_that_hold(backend: BackendCase) -> None:
    """Row 16."""
    maps = shuffles(3, 3, 2, NUM_ROWS)
    stories = run_ranks(2, looks_between_stage_and_commit, backend.name, env=backend.env)
    same_bytes_as_claimed(*stories)
    for layer in range(3):
        for step in at(f"stage {layer}", *stories):
            assert step.committed == tuple(range(layer))
            assert step.decided == (layer,)
            assert step.placement == [maps[2 if number < layer else 1][number].tolist() for number in range(3)]
        for step in at(f"commit {layer}", *stories):
            assert step.committed == tuple(range(layer + 1))
            assert step.decided == ()
            assert step.placement == [maps[2 if number <= layer else 1][number].tolist() for number in range(3)]
    all_went_well(at("end", *stories))


def stages_on_a_worker(rank: Rank, backend: str):
    """A worker stages layer 0 and fails to stage layer 1; the engine's thread commits what was decided."""
    maps = shuffles(3, 4, 2, NUM_ROWS)
    observers = [FaultInjector("vote", "raise", generation=2, layer=1)] if rank.rank == 1 else []
    life = Life(rank, backend, maps[0], layers=FOUR_LAYERS, observers=observers)
    life.rearrange("first", maps[1])
    gen = life.comm.begin(maps[1], maps[2])

    def work() -> None:
        life.do("stage 0", gen.stage, 0)
        life.do("stage 1", gen.stage, 1)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(30)
    life.do("begin", life.comm.begin, life.held, maps[0])
    life.do("stage 2", gen.stage, 2)
    life.do("commit 1", gen.commit, 1)
    life.do("commit 0", gen.commit, 0)
    life.do("commit 0 twice", gen.commit, 0)
    if life.rearrange("go on", maps[0]).code == "EPLB-T004":  # what was in flight could not be drained
        life.do("rebuild", life.comm.rebuild, LIMIT_S)
        life.rearrange("go on after it", maps[0])
    return life.end()


@over_gloo_and_nixl
def test_a_decided_layer_stays_with_the_host_when_the_next_one_fails(backend: BackendCase) -> None:
    """Row 17."""
    maps = shuffles(3, 4, 2, NUM_ROWS)
    stories = run_ranks(2, stages_on_a_worker, backend.name, env=backend.env)
    same_bytes_as_claimed(*stories)
    all_went_well(at("stage 0", *stories))
    for name in ("stage 1", "begin", "stage 2", "commit 1"):
        steps = at(name, *stories)
        all_refused(steps)
        for step in steps:
            assert (step.committed, step.decided) == ((), (0,)), step
            assert step.placement == maps[1].tolist()
    for step in at("commit 0", *stories):
        assert step.went_well, step
        assert (step.committed, step.decided) == ((0,), ())
        assert step.placement == [maps[2][0].tolist(), *maps[1][1:].tolist()]
    all_refused(at("commit 0 twice", *stories))
    rebuilt = any(step.name == "rebuild" for story in stories for step in story)
    all_went_well(at("go on after it" if rebuilt else "go on", *stories))


def rebuilds_with_a_decided_layer(rank: Rank):
    """The host never commits what was decided: the rebuild does, before the connections are new."""
    maps = shuffles(3, 4, 2, NUM_ROWS)
    observers = [FaultInjector("vote", "raise", generation=2, layer=1)] if rank.rank == 1 else []
    life = Life(rank, "torch_gloo", maps[0], layers=FOUR_LAYERS, observers=observers)
    life.rearrange("first", maps[1])
    gen = life.comm.begin(maps[1], maps[2])
    life.do("stage 0", gen.stage, 0)
    life.do("stage 1", gen.stage, 1)
    life.do("rebuild", life.comm.rebuild, LIMIT_S)
    life.do("commit 0", gen.commit, 0)
    life.rearrange("go on", maps[0])
    return life.end()


def test_a_rebuild_commits_what_was_decided_and_the_old_generation_is_over() -> None:
    """Row 17."""
    maps = shuffles(3, 4, 2, NUM_ROWS)
    stories = run_ranks(2, rebuilds_with_a_decided_layer)
    same_bytes_as_claimed(*stories)
    for step in at("stage 1", *stories):
        assert (step.committed, step.decided) == ((), (0,)), step
    for step in at("rebuild", *stories):
        assert step.went_well
        assert step.decided == ()
        assert step.placement == [maps[2][0].tolist(), *maps[1][1:].tolist()]
    all_refused(at("commit 0", *stories))
    all_went_well(at("go on", *stories))
