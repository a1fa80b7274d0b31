"""Nobody waits past a limit, nothing is left half open, and what happened is told in an error of ours."""

from __future__ import annotations

import gc
import signal
import time

import pytest
import torch

import eplb_core as eplb
from eplb_core.hookspecs import hookimpl
from eplb_core.testing.faults import FaultInjector
from eplb_core.testing.model import shuffles
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from tests.support.backends import BackendCase, case_config
from tests.support.lives import (
    AT_ONCE_S,
    NUM_ROWS,
    Life,
    all_refused,
    all_went_well,
    at,
    hosts_a_store,
    over_gloo_and_nixl,
    same_bytes_as_claimed,
    store_at,
    use_lingering_backend,
    within,
)

pytestmark = pytest.mark.slow

LIMIT_S = 6.0
STORE_LIMIT_S = 2.0


# --- the store's host does not answer ---------------------------------------------------------------------------------


def whose_store_stops(rank: Rank, port: int, call: str):
    """Make one call while the store's host is stopped."""
    maps = shuffles(3, 3, 2, NUM_ROWS)
    control = eplb.ControlPlane.from_store(store_at(port), rank=rank.rank, world_size=rank.world_size)
    life = Life(rank, "torch_gloo", maps[0], control=control, timeout_s=STORE_LIMIT_S)
    if call != "connect":
        life.connect()
        assert life.rearrange("first", maps[1]).went_well, life.steps
    other = torch.zeros(2, 8)
    config = case_config("torch_gloo", timeout_s=STORE_LIMIT_S)
    again = eplb.ControlPlane.from_store(store_at(port), rank=rank.rank, world_size=rank.world_size)

    def build(plane: eplb.ControlPlane) -> eplb.Communicator:
        return eplb.Communicator(config, [[other]], plane, name="other")

    calls = {
        "rebuild": lambda: life.comm.rebuild(STORE_LIMIT_S),
        "rebuild with a control plane": lambda: life.comm.rebuild(STORE_LIMIT_S, control=again),
        "Communicator": lambda: build(control).connect(),
        "Communicator with a control plane": lambda: build(again).connect(),
        "connect": lambda: life.comm.connect(STORE_LIMIT_S),
        "rearrange": lambda: life.comm.rearrange(maps[1], maps[2]),
        "close": life.comm.close,
        "close by force": lambda: life.comm.close(force=True),
    }
    rank.tell("ready")
    rank.listen()
    told = within(STORE_LIMIT_S + 4, calls[call])
    rank.tell(told)
    rank.listen()
    return life.model.wrong_rows(life.held)


@pytest.mark.parametrize(
    "call",
    [
        "rebuild",
        "rebuild with a control plane",
        "Communicator",
        "Communicator with a control plane",
        "connect",
        "rearrange",
        "close",
        "close by force",
    ],
)
def test_a_stopped_store_host_costs_a_call_its_limit_and_no_more(call: str) -> None:
    """Row 6."""
    with Ranks(1, hosts_a_store) as host, Ranks(2, whose_store_stops, host.hear(0, 30), call) as ranks:
        assert [ranks.hear(number, 30) for number in range(2)] == ["ready"] * 2
        host.signal(0, signal.SIGSTOP)
        for number in range(2):
            ranks.tell(number, "call")
        told = [ranks.hear(number, 30) for number in range(2)]
        for number in range(2):
            ranks.tell(number, "end")
        wrong = ranks.values(30)
    for code, seconds in told:
        assert code.startswith("EPLB-") or (not code and call.startswith("close")), told
        assert seconds < (2.0 if call == "close by force" else STORE_LIMIT_S + 2), told
    assert wrong == [[], []]


def whose_store_is_gone(rank: Rank, port: int, kind: str):
    """Build one once the store's host is dead."""
    control = eplb.ControlPlane.from_store(store_at(port), rank=rank.rank, world_size=rank.world_size)
    rank.tell("ready")
    rank.listen()
    config = case_config("torch_gloo", timeout_s=STORE_LIMIT_S)
    weights = [[torch.zeros(4, 8)]] if kind == "good" else [[torch.zeros(4, 16)[:, ::2]]]

    def build() -> None:
        eplb.Communicator(config, weights, control).connect()

    return within(STORE_LIMIT_S + 4, build)


@pytest.mark.parametrize("weights", ["good", "strided"])
def test_a_communicator_over_a_dead_store_is_an_error_of_ours(weights: str) -> None:
    """Row 14; what is wrong with the arguments is told before what is wrong with the store."""
    with Ranks(1, hosts_a_store) as host, Ranks(2, whose_store_is_gone, host.hear(0, 30), weights) as ranks:
        assert [ranks.hear(number, 30) for number in range(2)] == ["ready"] * 2
        host.signal(0, signal.SIGKILL)
        host.join(10)
        for number in range(2):
            ranks.tell(number, "build")
        told = ranks.values(30)
    assert all(code.startswith("EPLB-") if weights == "good" else code == "EPLB-M001" for code, _ in told), told
    assert max(seconds for _, seconds in told) < AT_ONCE_S


# --- an exception while aborting --------------------------------------------------------------------------------------


def whose_progress_raises(rank: Rank):
    """Rank 1 refuses layer 0 while layer 1 is on its way; the backend of whoever waits for the other then fails."""
    lingering = use_lingering_backend()
    lingering.fails_while_draining = True
    maps = shuffles(3, 3, 2, NUM_ROWS)
    observers = [FaultInjector("vote", "raise", generation=1, layer=0)] if rank.rank == 1 else []
    life = Life(rank, "lingering", maps[0], observers=observers)
    life.rearrange("refused", maps[1])
    life.do("begin", life.comm.begin, life.held, maps[1])
    lingering.fails_while_draining = False
    life.do("rebuild", life.comm.rebuild, LIMIT_S)
    life.rearrange("go on", maps[2])
    return life.end()


def test_a_backend_that_fails_while_draining_poisons_and_leaves_nothing_half_open() -> None:
    """Row 14."""
    stories = run_ranks(2, whose_progress_raises)
    same_bytes_as_claimed(*stories)
    refused = at("refused", *stories)
    all_refused(refused)
    assert max(step.seconds for step in refused) < AT_ONCE_S
    assert all("injected" in step.text for step in refused), refused
    begin = at("begin", *stories)
    assert max(step.seconds for step in begin) < AT_ONCE_S  # who failed while draining told the other
    all_went_well(at("rebuild", *stories))
    all_went_well(at("go on", *stories))
    if not any(step.usable for step in refused):  # where nobody had to wait, nobody failed
        all_refused(begin)
        assert "EPLB-T004" in {step.code for step in begin}, begin
        assert [step.usable for step in begin] == [False, False]
    assert len({step.refused for step in begin}) == 1, begin
    assert [step.usable for step in at("go on", *stories)] == [True, True]


def whose_progress_raises_while_agreeing(rank: Rank):
    """Rank 0 waits for rank 1 in agree, and its backend fails meanwhile."""
    lingering = use_lingering_backend()
    maps = shuffles(3, 3, 2, NUM_ROWS)
    life = Life(rank, "lingering", maps[0])
    life.rearrange("first", maps[1])
    lingering.breaks_down = rank.rank == 0
    if rank.rank == 1:
        time.sleep(0.5)
    life.do("begin", life.comm.begin, life.held, maps[2])
    lingering.breaks_down = False
    life.rearrange("go on", maps[2])
    return life.end()


def test_a_backend_that_fails_while_a_rank_waits_in_agree_refuses_for_all_and_moves_nothing() -> None:
    stories = run_ranks(2, whose_progress_raises_while_agreeing)
    same_bytes_as_claimed(*stories)
    begin = at("begin", *stories)
    assert {step.code for step in begin} == {"EPLB-T007"}, begin
    assert all("the driver is gone" in step.text for step in begin), begin
    all_went_well(at("go on", *stories))


class SaysALot:
    """Refuses layer 1 of generation 2 in a million words."""

    name = "says a lot"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @hookimpl
    def observe(self, event):
        if (event.kind, event.generation, event.layer) == (self.kind, 2, 1 if self.kind == "vote" else None):
            raise RuntimeError("the first words" + " and so on" * 100_000)


def says_a_lot(rank: Rank, kind: str):
    maps = shuffles(4, 3, 2, NUM_ROWS)
    life = Life(rank, "torch_gloo", maps[0], observers=[SaysALot(kind)] if rank.rank == 1 else [])
    life.rearrange("first", maps[1])
    life.rearrange("refused", maps[2])
    if life.rearrange("go on", maps[3]).code == "EPLB-T004":  # what was in flight could not be drained
        life.do("rebuild", life.comm.rebuild, LIMIT_S)
        life.rearrange("go on after it", maps[3])
    return life.end()


@pytest.mark.parametrize("kind", ["agree", "vote"])
def test_an_error_text_of_a_megabyte_is_told_in_its_first_words(kind: str) -> None:
    """Row 14."""
    stories = run_ranks(2, says_a_lot, kind)
    same_bytes_as_claimed(*stories)
    refused = at("refused", *stories)
    assert {step.code for step in refused} == {"EPLB-T007"}, refused
    for step in refused:
        assert "the first words" in step.text
        assert len(step.text) < 16 << 10
        assert step.seconds < AT_ONCE_S
    rebuilt = any(step.name == "rebuild" for story in stories for step in story)
    all_went_well(at("go on after it" if rebuilt else "go on", *stories))


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def interrupted(rank: Rank, backend: str, phase: str):
    maps = shuffles(4, 3, 2, NUM_ROWS)
    layer = None if phase == "agree" else 1
    observers = [FaultInjector(phase, "interrupt", generation=2, layer=layer)] if rank.rank == 1 else []
    life = Life(rank, backend, maps[0], observers=observers)
    life.rearrange("first", maps[1])
    life.rearrange("interrupted", maps[2])
    life.do("begin", life.comm.begin, life.held, maps[3])
    life.do("rebuild", life.comm.rebuild, LIMIT_S)
    life.rearrange("go on", maps[3])
    return life.end()


@over_gloo_and_nixl
@pytest.mark.parametrize("phase", ["agree", "transfer", "wait", "landed", "vote", "commit"])
def test_ctrl_c_anywhere_is_told_at_once_and_leaves_nothing_half_open(backend: BackendCase, phase: str) -> None:
    """Row 14."""
    stories = run_ranks(2, interrupted, backend.name, phase, env=backend.env)
    same_bytes_as_claimed(*stories)
    told, interrupted_one = at("interrupted", *stories)
    assert interrupted_one.code == "KeyboardInterrupt"
    assert told.refused or (phase == "commit" and told.went_well), told  # by then every layer may be decided
    assert told.seconds < AT_ONCE_S
    begin = at("begin", *stories)
    assert "EPLB-P004" not in {step.code for step in begin}, begin  # it is not open any more
    assert max(step.seconds for step in begin) < AT_ONCE_S, begin
    if phase == "agree" and all(step.went_well for step in begin):  # nothing had begun that could be broken
        assert [step.usable for step in begin] == [True, True]
    else:
        all_refused(begin)
        assert [step.usable for step in begin] == [False, False]
    all_went_well(at("rebuild", *stories))
    all_went_well(at("go on", *stories))


# --- a generation that is over ----------------------------------------------------------------------------------------


def uses_one_that_is_over(rank: Rank, how: str):
    """Abandoned, ended, or left behind by a rebuild; then used beside its successor."""
    maps = shuffles(4, 3, 2, NUM_ROWS)
    faults = [FaultInjector("vote", "raise", generation=2, layer=1)] if rank.rank == 1 and how == "abandoned" else []
    life = Life(rank, "torch_gloo", maps[0], observers=faults)
    life.rearrange("first", maps[1])
    gen = life.comm.begin(maps[1], maps[2])
    for layer in gen.layers if how == "ended" else gen.layers[:1]:
        life.do(f"stage {layer}", gen.stage, layer)
        life.do(f"commit {layer}", gen.commit, layer)
    if how == "ended":
        life.do("end", gen.end)
    elif how == "abandoned":
        life.do("refused", gen.stage, 1)
    else:
        life.do("rebuild", life.comm.rebuild, LIMIT_S)
    if getattr(life.comm, "poisoned", None) is not None:  # what was in flight could not be drained
        life.do("rebuild", life.comm.rebuild, LIMIT_S)
    held = life.held
    successor = life.comm.begin(held, maps[3])
    for moment in ("before", "between"):
        for layer in (0, 1, 2):
            life.do(f"old stage {layer} {moment}", gen.stage, layer)
            life.do(f"old commit {layer} {moment}", gen.commit, layer)
        life.do(f"old end {moment}", gen.end)
        if moment == "before":
            life.do("stage", successor.stage, successor.layers[0])
    life.do("commit", successor.commit, successor.layers[0])
    for layer in successor.layers[1:]:
        life.do(f"new stage {layer}", successor.stage, layer)
        life.do(f"new commit {layer}", successor.commit, layer)
    life.do("new end", successor.end)
    return life.end()


@pytest.mark.parametrize("how", ["ended", "abandoned", "left behind by a rebuild"])
def test_a_generation_that_is_over_refuses_and_does_its_successor_no_harm(how: str) -> None:
    """Row 14."""
    stories = run_ranks(2, uses_one_that_is_over, how)
    placements = {}
    for number, story in enumerate(stories):
        for step in story:
            if step.name.startswith("old "):
                assert step.refused or (step.went_well and how == "ended" and "end" in step.name), step
                assert placements.get(number) in (None, step.placement), step
            placements[number] = step.placement
    for name in ("stage", "commit", "new end"):
        all_went_well(at(name, *stories))
    same_bytes_as_claimed(*([step for step in story if not step.name.startswith("stage")] for story in stories))
    assert stories[0][-1].placement == shuffles(4, 3, 2, NUM_ROWS)[3].tolist()


# --- dropped ----------------------------------------------------------------------------------------------------------


def drops_it(rank: Rank, backend: str):
    """Rank 1 forgets its communicator without a word, and lives on."""
    maps = shuffles(3, 3, 2, NUM_ROWS)
    life = Life(rank, backend, maps[0], timeout_s=6.0)
    life.connect()
    life.rearrange("first", maps[1])
    if rank.rank == 1:
        steps = life.steps
        del life
        gc.collect()
        rank.tell("dropped")
        rank.listen()
        return steps
    rank.listen()
    life.rearrange("alone", maps[2])
    rank.tell("told")
    return life.end()


@over_gloo_and_nixl
def test_a_communicator_dropped_without_close_is_missed_at_once(backend: BackendCase) -> None:
    """Row 14."""
    with Ranks(2, drops_it, backend.name, env=backend.env) as ranks:
        assert ranks.hear(1, 30) == "dropped"
        ranks.tell(0, "go on")
        assert ranks.hear(0, 30) == "told"
        ranks.tell(1, "end")
        stories = ranks.values(30)
    same_bytes_as_claimed(*stories)
    (alone,) = at("alone", stories[0])
    assert alone.refused
    assert "ank 1" in alone.text
    assert alone.seconds < AT_ONCE_S
