"""Groups that grow and shrink: the successor is warm before the old one goes; no expert is ever without a row."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import eplb_core as eplb
from eplb_core.errors import ConfigError, EplbError, PlanError
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, Ranks, run_ranks
from tests.elastic.changing import Engine
from tests.support.backends import BackendCase, case_config, case_options
from tests.support.lives import over_gloo_and_nixl

LAYERS = [[512, 16]] * 3
ROWS = 4


def group(rank: Rank, name: str, number: int, size: int) -> eplb.ControlPlane:
    return eplb.ControlPlane.from_store(rank.store(name), rank=number, world_size=size)


def config(backend: str, **fields) -> eplb.EPLBConfig:
    return case_config(backend, **{"timeout_s": 20, "elastic": True, **fields})


def communicator(rank: Rank, backend: str, model: Model, name: str, number: int, size: int) -> eplb.Communicator:
    return eplb.Communicator(config(backend), model.weights, group(rank, name, number, size), options=case_options())


def grows_and_shrinks(rank: Rank, backend: str):
    """Ranks 0 and 1; 2 and 3 join; then 0 leaves, and the others are renumbered."""
    two, four = shuffles(2, 3, 2, ROWS, redundant=2), shuffles(2, 3, 4, ROWS, redundant=10, seed=1)
    model = Model(rank.rank, ROWS, LAYERS)
    wrong = []

    def look(number: int, comm: eplb.Communicator) -> None:
        model.rank = number
        wrong.extend(model.wrong_rows(comm.report.physical_to_logical_map))

    if rank.rank < 2:
        model.fill(two[0])
        old = communicator(rank, backend, model, "two", rank.rank, 2)
        old.rearrange(two[0], two[1])
        look(rank.rank, old)
        comm = old.successor(group(rank, "four", rank.rank, 4), {0: 0, 1: 1})
        old.rearrange(two[1], two[0])  # it still serves
        look(rank.rank, old)
        with pytest.raises(PlanError) as stale:  # what held when the successor was built holds no more
            comm.rearrange(eplb.translate_map(two[1], [0, 1], ROWS, 4), four[0])
        assert stale.value.code == "EPLB-P008"
        old.close()
    else:
        comm = communicator(rank, backend, model, "four", rank.rank, 4)
        comm.connect()
        with pytest.raises(PlanError):
            comm.rearrange(eplb.translate_map(two[1], [0, 1], ROWS, 4), four[0])
    comm.rearrange(eplb.translate_map(two[0], [0, 1], ROWS, 4), four[0])
    look(rank.rank, comm)
    comm.rearrange(four[0], four[1])
    look(rank.rank, comm)
    drained = eplb_drained(four[1])
    comm.rearrange(four[1], drained)
    look(rank.rank, comm)
    mapping = {0: -1, 1: 2, 2: 0, 3: 1}
    if rank.rank == 0:
        rank.listen(60)
        comm.close()
        return wrong
    new = comm.successor(group(rank, "three", mapping[rank.rank], 3), mapping)
    held = eplb.translate_map(drained, mapping, ROWS)
    new.rearrange(held, held[:, ::-1].copy())
    look(mapping[rank.rank], new)
    rank.tell("moved")
    comm.close()
    new.close()
    return wrong


def eplb_drained(mapping: np.ndarray) -> np.ndarray:
    """Return a map in which rank 0 has nothing and the others every expert."""
    physical = mapping.shape[1]
    drained = np.full_like(mapping, -1)
    experts = np.unique(mapping)
    assert len(experts) <= physical - ROWS
    drained[:, ROWS:] = experts[np.arange(physical - ROWS) % len(experts)]
    return drained


@over_gloo_and_nixl
def test_two_ranks_become_four_and_then_three_and_every_byte_is_right(backend: BackendCase) -> None:
    with Ranks(4, grows_and_shrinks, backend.name, env=backend.env) as ranks:
        for number in (1, 2, 3):
            assert ranks.hear(number, 90) == "moved"
        ranks.tell(0, "close")
        assert ranks.values(60) == [[], [], [], []]


# --- what cannot be ---------------------------------------------------------------------------------------------------


def fails_to_grow(rank: Rank, backend: str):
    maps = shuffles(2, 3, 2, ROWS)
    model = Model(rank.rank, ROWS, LAYERS)
    model.fill(maps[0])
    comm = communicator(rank, backend, model, "two", rank.rank, 2)
    comm.rearrange(maps[0], maps[1])
    told = []
    for control, mapping in (
        (comm._lives.control, {0: 0, 1: 1}),
        (group(rank, "two", rank.rank, 2), {0: 0, 1: 1}),
        (group(rank, "new", rank.rank, 3), {0: 0}),
        (group(rank, "new", rank.rank, 3), {0: 1, 1: 0}),
        (group(rank, "new", rank.rank, 3), {0: 0, 1: 0}),
        (group(rank, "new", rank.rank, 3), "ab"),
    ):
        with pytest.raises(EplbError) as caught:
            comm.successor(control, mapping)
        told.append((caught.value.code, str(caught.value)))
    started = time.monotonic()
    with pytest.raises(EplbError) as alone:
        comm.successor(group(rank, "new", rank.rank, 3), {0: 0, 1: 1}, timeout_s=1.0)
    seconds = time.monotonic() - started
    comm.rearrange(maps[1], maps[0])
    wrong = model.wrong_rows(maps[0])
    threads = threading.active_count()
    comm.close()
    return told, str(alone.value), seconds, wrong, threads


@over_gloo_and_nixl
def test_a_successor_that_fails_leaves_the_old_one_as_it_was(backend: BackendCase) -> None:
    for told, alone, seconds, wrong, _ in run_ranks(2, fails_to_grow, backend.name, env=backend.env):
        codes = ["EPLB-C010"] * 3 + ["EPLB-C010", "EPLB-P001", "EPLB-P001"]
        assert [code for code, _ in told] == codes
        assert all("PrefixStore of its own" in text for _, text in told[:2])
        assert alone.startswith("Endpoint not ready after 1s: rank 2 (not seen at the store ")
        assert seconds < 4
        assert wrong == []


def is_not_elastic(rank: Rank):
    model = Model(rank.rank, ROWS, LAYERS)
    control = rank.control()
    with (
        eplb.Communicator(
            eplb.EPLBConfig(communicator="torch_nccl", use_async=False, timeout_s=10),
            model.weights,
            control,
            rank.device_group(),
        ) as comm,
        pytest.raises(ConfigError) as caught,
    ):
        comm.successor(group(rank, "new", rank.rank, 2), {0: 0, 1: 1})
    return caught.value.code, str(caught.value)


def test_a_backend_that_is_not_elastic_safe_gets_no_successor_and_the_reason_is_told() -> None:
    if "torch_nccl" not in eplb.discover().backends:
        pytest.skip("needs eplb-nccl")
    for code, text in run_ranks(2, is_not_elastic):
        assert code == "EPLB-C005"
        assert "not elastic_safe" in text


def test_the_configuration_asks_for_a_backend_whose_ranks_may_join() -> None:
    chosen = eplb.select(eplb.EPLBConfig(elastic=True, use_async=False), device_type="cpu")
    assert chosen.info.elastic_safe
    with pytest.raises(ConfigError, match="not elastic_safe"):
        eplb.select(eplb.EPLBConfig(elastic=True, communicator="torch_nccl", use_async=False), device_type="cpu")
    reasons = eplb.select(eplb.EPLBConfig(use_async=False), device_type="cpu", elastic=True).reasons
    assert "ranks cannot join after connect" in reasons["pynccl"] or "cuda" in reasons["pynccl"]


# --- under a load -----------------------------------------------------------------------------------------------------

NUM_EXPERTS = 6


def serves_through_changes(rank: Rank, backend: str, rounds: int):
    """Each round: a third rank joins, then the first is drained and leaves; its process comes back in the next."""
    return Engine(rank, config(backend, use_async=True), NUM_EXPERTS, ROWS, LAYERS).live(rounds)


@over_gloo_and_nixl
def test_an_engine_grows_and_shrinks_while_it_serves_and_every_expert_has_a_live_row(backend: BackendCase) -> None:
    for outcome in run_ranks(3, serves_through_changes, backend.name, 2, env=backend.env, timeout_s=240):
        assert outcome["wrong"] == 0
        assert outcome["without a row"] == 0
        assert outcome["commits"] > 0
        assert outcome["steps"] > 40


@over_gloo_and_nixl
@pytest.mark.soak
def test_twenty_rounds_of_growing_and_shrinking_leave_nothing_behind(backend: BackendCase) -> None:
    outcomes = run_ranks(3, serves_through_changes, backend.name, 20, env=backend.env, timeout_s=900)
    for outcome in outcomes:
        assert outcome["wrong"] == outcome["without a row"] == 0
        files, threads, resident = (list(column) for column in zip(*outcome["used"], strict=True))
        assert max(files[-6:]) <= max(files[3:9]) + 2, files  # a process is a rank in two rounds of three
        assert max(threads[-6:]) <= max(threads[3:9]) + 1, threads
        assert max(resident[-6:]) <= max(resident[3:9]) + (16 << 20), resident
