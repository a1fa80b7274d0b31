"""Observers over real ranks: what they record is what happened, what they find aborts everywhere, and none mix."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import eplb_core as eplb
from eplb_core.backend import Event
from eplb_core.errors import BenchError, ConfigError, EplbError, StalledError, TransferError
from eplb_core.observers import Checksums, ChromeTrace, Observer, Stats, merge_traces
from eplb_core.testing.faults import FaultInjector, InjectedFault
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks
from tests.support.backends import BackendCase, case_config, case_options, device_group, every_backend

ROW_NBYTES = [[96, 1, 40], [300_000, 24, 8], [96, 1, 40]]
NAMES = ["w13", "scale", "w2"]


def communicator(rank: Rank, model: Model, observers, *, backend="torch_gloo", **given) -> eplb.Communicator:
    fields = {"timeout_s": given.pop("timeout_s", 30), "staging_layers": given.pop("staging_layers", 2)}
    config, group = case_config(backend, **fields), device_group(rank, backend)
    given = {"options": case_options(), "observers": observers, **given}
    return eplb.Communicator(config, model.weights, rank.control(), group, **given)


def filled(rank: Rank, mapping, row_nbytes=ROW_NBYTES) -> Model:
    model = Model(rank.rank, mapping.shape[1] // rank.world_size, row_nbytes)
    model.fill(mapping)
    return model


# --- checksums --------------------------------------------------------------------------------------------------------


def verified(rank: Rank, backend: str, own_landing: bool):
    maps = shuffles(4, len(ROW_NBYTES), rank.world_size, 6, redundant=3)
    row_nbytes = [[96, 1, 40]] * 3 if own_landing else ROW_NBYTES
    model = filled(rank, maps[0], row_nbytes)
    landing = [[torch.empty_like(t) for t in model.weights[0]] for _ in range(2)] if own_landing else None
    try:
        comm = communicator(rank, model, [Checksums(), Stats()], backend=backend, landing=landing)
    except ConfigError as error:
        return error.code
    with comm:
        for old, new in pairwise(maps):
            comm.rearrange(old, new)
    return model.wrong_rows(maps[-1])


@every_backend
def test_checksums_let_every_sound_row_pass(backend: BackendCase) -> None:
    assert run_ranks(3, verified, backend.name, False, env=backend.env) == [[], [], []]


@every_backend
def test_checksums_read_rows_in_a_hosts_own_landing(backend: BackendCase) -> None:
    packs = backend.name == "torch_gloo"
    assert run_ranks(2, verified, backend.name, True, env=backend.env) == ["EPLB-C010" if packs else []] * 2


def with_one_byte_flipped(rank: Rank, backend: str, row_nbytes, landed_row: int):
    maps = shuffles(2, len(row_nbytes), rank.world_size, 64 if len(row_nbytes) == 1 else 4, seed=2)
    model = filled(rank, maps[0], row_nbytes)
    last = len(row_nbytes) - 1
    injector = FaultInjector("landed", "corrupt", layer=last, landed_row=landed_row)
    observers = [Checksums(NAMES), *([injector] if rank.rank == 1 else [])]
    if rank.rank == 2:
        observers.reverse()
    with communicator(rank, model, observers, backend=backend) as comm:
        with pytest.raises(TransferError) as caught:
            comm.rearrange(*maps)
        report = caught.value.report
        story = (caught.value.code, str(caught.value).split(" Seen by")[0], report.committed_layers)
        mixed = model.wrong_rows(report.physical_to_logical_map)
        try:
            comm.rearrange(report.physical_to_logical_map, maps[1])
        except EplbError:  # a backend whose transfers cannot be drained
            held = comm.rebuild(20, device_group=device_group(rank, backend, topic="again")).physical_to_logical_map
            comm.rearrange(held, maps[1])
        return story, injector.acted, mixed, model.wrong_rows(maps[1])


@every_backend
def test_one_flipped_byte_is_an_error_of_every_rank_and_of_no_weight(backend: BackendCase) -> None:
    rows = [[96, 1, 40], [300_000, 24, 8]]
    results = run_ranks(3, with_one_byte_flipped, backend.name, rows, 4, env=backend.env)
    assert [result[1] for result in results] == [False, True, False]
    assert all(result[2:] == ([], []) for result in results)
    ((code, text, committed),) = {result[0] for result in results}
    assert (code, committed) == ("EPLB-T011", (0,))
    assert text.startswith("Checksum mismatch in layer 1: tensor '")
    assert ", row " in text
    assert ", landed on rank 1 otherwise than rank " in text


def test_more_rows_than_a_ballot_holds_are_verified_tensor_by_tensor() -> None:
    """About 32 experts of 60 tensors go each way: 3,840 digests where 2,890 have room."""
    results = run_ranks(2, with_one_byte_flipped, "torch_gloo", [[8] * 60], 700)
    ((code, text, committed),) = {result[0] for result in results}
    assert (code, committed) == ("EPLB-T011", ())
    assert text.startswith("Checksum mismatch in layer 0: tensor ")
    assert ", some row, landed on rank 1 otherwise than rank 0 sent it." in text


class LastToVote:
    """Holds this rank's ballot on a layer until the other's is counted: who casts the last one compares."""

    def __init__(self, rank: Rank) -> None:
        self.store = rank.store()
        self.namespace = ""

    @eplb.hookimpl
    def observe(self, event):
        if event.kind == "vote":
            self.store.wait([f"eplb/{event.name}/{self.namespace}/{event.generation}/{event.layer}/count"])


def where_only_rank_0_verifies(rank: Rank):
    maps = shuffles(2, 1, 2, 4)
    model = filled(rank, maps[0], [[64]])
    last = LastToVote(rank)
    observers = [Checksums(), last] if rank.rank == 0 else []
    with communicator(rank, model, observers) as comm:
        comm.connect()
        last.namespace = comm._lives.epoch.entered[0].namespace
        with pytest.raises(TransferError) as caught:
            comm.rearrange(*maps)
    return caught.value.code, str(caught.value), model.wrong_rows(maps[0])


def test_a_rank_that_gives_no_checksums_is_named() -> None:
    results = run_ranks(2, where_only_rank_0_verifies)
    assert all(result[0] == "EPLB-T012" and result[2] == [] for result in results)
    assert "rank 1 gave none" in results[0][1]
    assert results[0][1] == results[1][1]


# --- traces -----------------------------------------------------------------------------------------------------------


def traced(rank: Rank, folder: str, staging_layers: int, max_records: int):
    maps = shuffles(3, 4, rank.world_size, 4)
    model = filled(rank, maps[0], [[2048, 24]] * 4)
    trace, moved = ChromeTrace(rank.rank, max_records), []
    with communicator(rank, model, [trace], staging_layers=staging_layers, name="main model") as comm:
        for old, new in pairwise(maps):
            report = comm.rearrange(old, new)
            moved.append((report.nbytes_sent, report.nbytes_received))
    return str(trace.write(folder)), moved


def spans(trace, name: str | None = None):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and name in (None, e["name"])]


def tracks(trace):
    return {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}


@pytest.mark.parametrize("staging_layers", [1, 2])
def test_a_trace_has_a_span_for_each_layer_step_and_peer(tmp_path, staging_layers: int) -> None:
    results = run_ranks(3, traced, str(tmp_path), staging_layers, 1000)
    for rank, (path, moved) in enumerate(results):
        assert path.endswith(f"eplb-main_model-rank{rank}.trace.json")
        trace = json.loads(Path(path).read_text())
        named = tracks(trace)
        on_slots = {tid for tid, name in named.items() if "with" not in name and "slot" in name}
        assert {named[tid] for tid in on_slots} == {f"slot {slot}" for slot in range(staging_layers)}
        counted = Counter(e["name"] for e in spans(trace) if e["tid"] in on_slots)
        assert counted == {**dict.fromkeys(["transfer", "wait", "vote"], 8), **{f"layer {k}": 2 for k in range(4)}}
        assert {e["args"]["outcome"] for e in spans(trace, "vote")} == {"commit"}
        with_peers = [e for e in spans(trace) if "with rank" in named[e["tid"]]]
        peers = {int(named[e["tid"]].rsplit(" ", 1)[1]) for e in with_peers}
        assert peers == {0, 1, 2} - {rank}
        for generation, (sent, received) in enumerate(moved, 1):
            of_this = [e["args"] for e in with_peers if e["args"]["generation"] == generation]
            assert sum(facts["nbytes_sent"] for facts in of_this) == sent
            assert sum(facts["nbytes_received"] for facts in of_this) == received
        for track in named:  # viewers draw spans of one track nested, or not at all
            of_track, open_until = [e for e in spans(trace) if e["tid"] == track], []
            assert [e["ts"] for e in of_track] == sorted(e["ts"] for e in of_track)
            for event in of_track:
                while open_until and open_until[-1] <= event["ts"]:
                    open_until.pop()
                end = event["ts"] + event["dur"]
                assert not open_until or end <= open_until[-1] + 1e-3
                open_until.append(end)


def test_merged_ranks_stand_on_one_clock(tmp_path) -> None:
    paths = [path for path, _ in run_ranks(2, traced, str(tmp_path), 2, 1000)]
    merged = json.loads(merge_traces(paths[::-1], tmp_path / "all.json").read_text())
    titles = {e["pid"]: e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "process_name"}
    assert titles == {0: "rank 0 (main model)", 1: "rank 1 (main model)"}
    starts = [e["ts"] for e in merged["traceEvents"] if "ts" in e]
    assert min(starts) >= 0
    ballots = {}
    for process in (0, 1):
        votes = [e for e in spans(merged, "vote") if e["pid"] == process]
        ballots[process] = sorted((e["ts"], e["ts"] + e["dur"]) for e in votes)
    for (began, ended), (began_there, ended_there) in zip(ballots[0], ballots[1], strict=True):
        assert began < ended_there  # nobody commits before everyone has voted
        assert began_there < ended


def test_a_trace_keeps_the_latest_and_says_how_many_it_dropped(tmp_path) -> None:
    (path, _), _ = run_ranks(2, traced, str(tmp_path), 2, 7)
    trace = json.loads(Path(path).read_text())
    kept = [e for e in trace["traceEvents"] if e["ph"] != "M"]
    assert len(kept) == 7
    assert trace["otherData"]["dropped_records"] == 2 + 8 * 5 - 7  # 2 agreements; 3 steps, a layer, a peer for each
    assert max(e["args"]["generation"] for e in kept) == 2


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, "EPLB-B004"), (b"{", "EPLB-B005"), (b"\xff", "EPLB-B005"), (b"[]", "EPLB-B005"), (b"{}", "EPLB-B005")],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path, content, code: str) -> None:
    source = tmp_path / "some.json"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(BenchError, match=r"some\.json") as caught:
        merge_traces([source], tmp_path / "all.json")
    assert caught.value.code == code
    assert not (tmp_path / "all.json").exists()


def test_a_trace_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path) -> None:
    with pytest.raises(BenchError, match="nowhere") as caught:
        ChromeTrace(0).write(tmp_path / "nowhere" / "trace.json")
    assert caught.value.code == "EPLB-B004"
    assert list(tmp_path.iterdir()) == []


# --- stats ------------------------------------------------------------------------------------------------------------


def counted(rank: Rank):
    maps = shuffles(3, 3, rank.world_size, 4)
    model = filled(rank, maps[0], [[64, 24]] * 3)
    stats, trace = Stats(), ChromeTrace(rank.rank)
    observers = [*([FaultInjector("wait", "raise", 2, 1)] if rank.rank == 1 else []), stats, trace]
    comm = communicator(rank, model, observers, name="main")
    report = comm.rearrange(maps[0], maps[1])
    first = stats.snapshot()
    with pytest.raises(EplbError) as caught:
        comm.rearrange(maps[1], maps[2])
    comm.close(force=True)
    instants = [e for e in (trace._event(r) for r in trace._records) if e["ph"] == "i"]
    return first, report, stats.as_dict(), caught.value.report.committed_layers, instants


def test_stats_count_what_the_report_says_and_what_was_aborted() -> None:
    for rank, (first, report, flat, committed, instants) in enumerate(run_ranks(2, counted)):
        assert (first.communicator, first.rearrangements, first.layers_committed) == ("main", 1, 3)
        assert (first.nbytes_received, first.nbytes_sent) == (report.nbytes_received, report.nbytes_sent)
        assert first.rows_received * 88 == first.nbytes_received * 2  # of 64 and 24 bytes, as many of each
        assert first.steps == {"transfer": 3, "wait": 3, "vote": 3}
        assert set(first.failures.values()) == {0}
        assert (first.aborts, first.layers_in_flight) == ({}, 0)
        assert all(0 < first.slowest_s[step] <= first.seconds[step] for step in first.steps)
        assert json.loads(json.dumps(flat)) == flat
        assert (flat["rearrangements"], flat["layers_committed"]) == (2, 3 + len(committed))
        assert flat["aborts.EPLB-T007"] == 1
        assert flat["failures.wait"] + flat["failures.vote"] == 1
        assert flat["failures.wait"] >= rank
        assert flat["layers_in_flight"] == 0
        assert [e["name"] for e in instants] == ["agree", "agree", "abort"]
        assert "injected in wait of layer 1" in instants[-1]["args"]["reason"]


def with_prometheus(rank: Rank, num_layers: int):
    from prometheus_client import CollectorRegistry

    from eplb_core.observers.prometheus import StatsCollector

    maps = shuffles(2, num_layers, rank.world_size, 4)
    model = filled(rank, maps[0], [[64]] * num_layers)
    stats, registry = Stats(), CollectorRegistry()
    registry.register(StatsCollector({"main": stats, "draft": Stats()}))
    with communicator(rank, model, [stats], name="main") as comm:
        report = comm.rearrange(*maps)
    samples = [sample for family in registry.collect() for sample in family.samples]
    main = {"communicator": "main"}
    assert registry.get_sample_value("eplb_received_bytes_total", main) == report.nbytes_received
    assert registry.get_sample_value("eplb_layers_committed_total", main) == num_layers
    assert registry.get_sample_value("eplb_steps_total", {**main, "step": "wait"}) == num_layers
    assert registry.get_sample_value("eplb_step_seconds_total", {**main, "step": "wait"}) > 0
    assert registry.get_sample_value("eplb_layers_in_flight", main) == 0
    assert registry.get_sample_value("eplb_sent_bytes_total", {"communicator": "draft"}) == 0
    return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples}


def test_prometheus_gets_as_few_series_for_many_ranks_and_layers_as_for_few() -> None:
    pytest.importorskip("prometheus_client")
    few, many = run_ranks(2, with_prometheus, 1), run_ranks(3, with_prometheus, 6)
    assert few[0] == few[1] == many[0]
    assert {label for _, labels in few[0] for label, _ in labels} == {"communicator", "step"}


# --- one communicator each --------------------------------------------------------------------------------------------


class Diary(Observer):
    """Writes down whatever it is told."""

    name = "diary"

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, object]] = []

    def registered(self, buffers) -> None:
        self.entries.append(("rows", buffers.rows[0][0].shape[1]))

    def ends(self, step) -> None:
        self.entries.append((step.name, int(step.plan.receives.nbytes.max(initial=0))))

    def told(self, event) -> None:
        self.entries.append(("name", event.name))


def two_models(rank: Rank):
    maps = shuffles(3, 2, 2, 4)
    control = rank.control()
    config = eplb.EPLBConfig(communicator="torch_gloo", use_async=False, timeout_s=30)
    models = [filled(rank, maps[0], [[nbytes]] * 2) for nbytes in (48, 80)]
    diaries, stats = [Diary(), Diary()], Stats()
    with (
        eplb.Communicator(config, models[0].weights, control, observers=[diaries[0], stats], name="main") as first,
        eplb.Communicator(config, models[1].weights, control, observers=[diaries[1]], name="draft") as second,
    ):
        generation = first.begin(maps[0], maps[1])
        generation.stage(0)
        second.rearrange(maps[0], maps[2])  # in the middle of the other's
        generation.commit(0)
        generation.stage(1)
        generation.commit(1)
        generation.end()
    shared = None
    try:
        eplb.Communicator(config, models[1].weights, control, observers=[stats], name="third")
    except ConfigError as error:
        shared = str(error)
    return [set(diary.entries) for diary in diaries], stats.snapshot().steps["wait"], shared


def test_observers_of_two_communicators_do_not_mix() -> None:
    for (main, draft), waits, shared in run_ranks(2, two_models):
        assert main == {("rows", 48), ("transfer", 48), ("wait", 48), ("vote", 48), ("name", "main")}
        assert draft == {("rows", 80), ("transfer", 80), ("wait", 80), ("vote", 80), ("name", "draft")}
        assert waits == 2
        assert "observer 'stats' follows another communicator already" in shared


# --- faults -----------------------------------------------------------------------------------------------------------


def beside_a_hung_rank(rank: Rank, backend: str, phase: str):
    maps = shuffles(3, 2, rank.world_size, 4)
    model = filled(rank, maps[0], [[64]] * 2)
    injector = FaultInjector(phase, "hang", 1, None if phase == "agree" else 1)
    stats = Stats()
    observers = [stats, Checksums(), *([injector] if rank.rank == 1 else [])]
    comm = communicator(rank, model, observers, backend=backend, timeout_s=1.5)
    if rank.rank == 1:
        gate = rank.store("gate")
        threading.Thread(target=lambda: (gate.wait(["stalled"]), injector.release())).start()
    started = time.monotonic()
    with pytest.raises(EplbError) as caught:
        comm.rearrange(maps[0], maps[1])
    seconds, error = time.monotonic() - started, caught.value
    if rank.rank == 0:
        rank.store("gate").set("stalled", "1")
    held = error.report.physical_to_logical_map
    story = (type(error).__name__, str(error), held.tolist(), model.wrong_rows(held), seconds, injector.acted)
    held = comm.rebuild(20, device_group=device_group(rank, backend, topic="again")).physical_to_logical_map
    comm.rearrange(held, maps[2])  # the observers go on in the new epoch
    wrong = model.wrong_rows(maps[2])
    comm.close(force=True)
    return (*story, wrong, stats.snapshot().rearrangements)


@pytest.mark.parametrize("phase", ["wait", "vote"])
def test_a_hung_rank_is_named_within_the_limit_and_goes_on_when_it_wakes(phase: str) -> None:
    awake, hung = run_ranks(2, beside_a_hung_rank, "torch_gloo", phase)
    assert awake[0] == hung[0] == StalledError.__name__
    assert awake[1] == hung[1]
    assert "rank 1" in awake[1]
    assert awake[2] == hung[2]
    assert awake[3] == hung[3] == []
    assert 1.0 < awake[4] < 6
    assert (awake[5], hung[5]) == (False, True)
    assert awake[6] == hung[6] == []
    assert awake[7] == hung[7] == 2


def test_a_hang_that_nobody_ends_ends_by_itself() -> None:
    injector = FaultInjector("agree", "hang", hang_limit_s=0.05)
    with pytest.raises(InjectedFault, match=r"hung in agree .* for 0.05 s, unreleased"):
        injector.observe(Event("agree", "main", 1, 1, None, True))


@pytest.mark.parametrize(("phase", "action"), [("transfer", "corrupt"), ("landing", "raise"), ("wait", "explode")])
def test_faults_that_do_not_exist_are_refused(phase: str, action: str) -> None:
    with pytest.raises(ValueError, match=repr(phase)):
        FaultInjector(phase, action)


def where_nothing_lands(rank: Rank):
    maps = shuffles(2, 2, 2, 4)
    maps[1][0] = maps[0][0]
    maps[1][0, :4] = maps[0][0, :4][::-1]  # in layer 0 rows move within rank 0 alone
    model = filled(rank, maps[0], [[64]] * 2)
    first = FaultInjector("landed", "corrupt", name="wherever something lands")
    second = FaultInjector("landed", "corrupt", 1, 0)
    observers = [first] if rank.rank == 0 else [first, second]
    with communicator(rank, model, observers) as comm, pytest.raises(EplbError) as caught:
        comm.rearrange(*maps)
    return str(caught.value), first.acted, second.acted


def test_corrupting_a_layer_in_which_nothing_lands_is_said_and_not_skipped() -> None:
    for text, *acted in run_ranks(2, where_nothing_lands):
        assert "nothing lands here in layer 0" in text
        assert acted == [False, False]
