"""One rank fails in the middle of forty rearrangements: what the others know, what holds, and how they go on."""

from __future__ import annotations

import re
import signal
import time

import numpy as np
import pytest

import eplb_core as eplb
from eplb_core.errors import EplbError, PeerLostError, StalledError
from eplb_core.testing.faults import FaultInjector
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, Ranks
from tests.support.backends import BackendCase, case_config, case_options, device_group, every_backend_under_faults

ROUNDS, FAULTY_ROUND, FAULTY_LAYER, FAULTY = 40, 17, 2, 1
ROW_NBYTES = [[2048, 24], [300_000, 8], [4096, 24], [2048, 24]]
TIMEOUT_S = 3.0
PHASES = ["agree", "transfer", "wait", "landed", "vote", "commit"]


def until_one_fails(rank: Rank, backend: str, phase: str, action: str, timeout_s: float):
    """Rearrange until an error comes; say what it was, whether the report is true, and rebuild without the faulty."""
    maps = shuffles(4, len(ROW_NBYTES), rank.world_size, 4, redundant=2)
    model = Model(rank.rank, 4, ROW_NBYTES)
    model.fill(maps[0])
    layer = None if phase == "agree" else FAULTY_LAYER
    observers = [FaultInjector(phase, action, FAULTY_ROUND, layer)] if rank.rank == FAULTY else []
    config = case_config(backend, timeout_s=timeout_s)
    group = device_group(rank, backend)
    comm = eplb.Communicator(config, model.weights, rank.control(), group, options=case_options(), observers=observers)
    held = maps[0]
    for number in range(ROUNDS):
        wanted = maps[(number + 1) % len(maps)]
        started = time.monotonic()
        try:
            held = comm.rearrange(held, wanted).physical_to_logical_map
        except EplbError as error:
            seconds, caught = time.monotonic() - started, error
            break
    else:
        comm.close()
        return {"completed": model.wrong_rows(held)}
    report = caught.report
    story = {
        "kind": type(caught).__name__,
        "text": str(caught),
        "seconds": seconds,
        "round": number + 1,
        "committed": report.committed_layers,
        "map": report.physical_to_logical_map.tolist(),
        "mixed": model.wrong_rows(report.physical_to_logical_map),
        "old or new": all(
            (
                report.physical_to_logical_map[layer] == (wanted if layer in report.committed_layers else held)[layer]
            ).all()
            for layer in range(len(ROW_NBYTES))
        ),
    }
    started = time.monotonic()
    try:
        comm.rearrange(report.physical_to_logical_map, report.physical_to_logical_map)
    except EplbError as error:
        story["refusal"] = (error.code, time.monotonic() - started)
    rank.tell(story)
    order = rank.listen()
    if order == "rebuild":
        survivors = [other for other in range(rank.world_size) if other != FAULTY]
        group = device_group(rank, backend, survivors, "survivors")
        settled = comm.rebuild(10, ranks=survivors, device_group=group)
        held = settled.physical_to_logical_map.copy()
        held[:, FAULTY * 4 : FAULTY * 4 + 4] = -1
        for _ in range(3):
            wanted = held.copy()
            alive = held[:, [column for column in range(held.shape[1]) if column // 4 != FAULTY]]
            wanted[:, [column for column in range(held.shape[1]) if column // 4 != FAULTY]] = alive[:, ::-1]
            held = comm.rearrange(held, wanted).physical_to_logical_map
        story["after rebuild"] = model.wrong_rows(held)
        comm.close()
    started = time.monotonic()
    comm.close(force=True)
    story["close"] = time.monotonic() - started
    return story


def check_the_story(stories, *, action: str, phase: str) -> None:
    first = stories[0]
    assert all(story["map"] == first["map"] and story["committed"] == first["committed"] for story in stories)
    assert len({story["text"] for story in stories}) == 1
    for story in stories:
        assert story["mixed"] == []
        assert story["old or new"]
        assert re.search(rf"[Rr]anks? (\d, )*{FAULTY}\b", story["text"]), story["text"]
        limit_s = TIMEOUT_S + 2 if action == "stop" else 3.0
        assert story["seconds"] < limit_s
        assert story["round"] in ((FAULTY_ROUND, FAULTY_ROUND + 1) if phase == "commit" else (FAULTY_ROUND,))


SURVIVORS = (0, 2)


def run_the_story(backend: BackendCase, phase: str, action: str):
    timeout_s = TIMEOUT_S if action == "stop" else 30.0
    with Ranks(3, until_one_fails, backend.name, phase, action, timeout_s, env=backend.env) as ranks:
        stories = [ranks.hear(rank, 60) for rank in SURVIVORS]
        check_the_story(stories, action=action, phase=phase)
        if action == "raise":
            faulty = ranks.hear(FAULTY, 20)
            check_the_story([*stories, faulty], action=action, phase=phase)
        usable = "refusal" not in stories[0]
        for rank in SURVIVORS:
            ranks.tell(rank, "close" if usable else "rebuild")
        if action == "raise":
            ranks.tell(FAULTY, "close")
        ended = ranks.join(60, without=() if action == "raise" else (FAULTY,))
        for rank in SURVIVORS:
            assert ended[rank].error is None, ended[rank].error
            story = ended[rank].value
            assert story["close"] < 2.0
            if not usable:
                assert story["refusal"][0] == "EPLB-T004"
                assert story["refusal"][1] < 0.1
                assert story["after rebuild"] == []
        return stories


ONE_PER_PHASE = {
    "agree": "raise",
    "transfer": "kill",
    "wait": "stop",
    "landed": "raise",
    "vote": "kill",
    "commit": "kill",
}
EVERY_FAULT = [
    pytest.param(phase, action, marks=[] if ONE_PER_PHASE[phase] == action else [pytest.mark.soak])
    for phase in PHASES
    for action in ("kill", "stop", "raise")
    if (phase, action) != ("commit", "raise")  # too late to undo: logged, and nothing else happens
]
KINDS = {"kill": PeerLostError.__name__, "stop": StalledError.__name__}


@every_backend_under_faults
@pytest.mark.parametrize(("phase", "action"), EVERY_FAULT)
@pytest.mark.slow
def test_a_failing_rank_is_named_in_time_and_costs_no_weight(backend: BackendCase, phase: str, action: str) -> None:
    """Case 7, I4 and I5: killed or raising within seconds, stopped within the limit."""
    stories = run_the_story(backend, phase, action)
    if action in KINDS:
        assert {story["kind"] for story in stories} == {KINDS[action]}
    else:
        assert all("injected in" in story["text"] for story in stories)


def sleeps_after_its_ballot(rank: Rank, backend: str):
    maps = shuffles(3, 3, 3, 4)
    model = Model(rank.rank, 4, [[512]] * 3)
    model.fill(maps[0])
    observers = [FaultInjector("commit", "stop", 2, 0)] if rank.rank == 1 else []
    config = case_config(backend, timeout_s=1.5)
    group = device_group(rank, backend)
    comm = eplb.Communicator(config, model.weights, rank.control(), group, options=case_options(), observers=observers)
    held = maps[0]
    try:
        for wanted in (maps[1], maps[2], maps[0], maps[1]):
            held = comm.rearrange(held, wanted).physical_to_logical_map
        error = None
    except EplbError as caught:
        held, error = caught.report.physical_to_logical_map, caught
    if rank.rank != 1:
        group = device_group(rank, backend, [0, 2], "survivors")
        held = comm.rebuild(10, ranks=[0, 2], device_group=group).physical_to_logical_map
    story = (str(error), held.tolist(), model.wrong_rows(held))
    rank.tell(story)
    rank.listen()
    comm.close(force=True)
    return story


@every_backend_under_faults
@pytest.mark.slow
def test_a_rank_that_sleeps_through_the_others_commit_never_ends_with_mixed_layers(backend: BackendCase) -> None:
    with Ranks(3, sleeps_after_its_ballot, backend.name, env=backend.env) as ranks:
        stories = [ranks.hear(rank, 60) for rank in SURVIVORS]
        ranks.signal(1, signal.SIGCONT)
        stories.append(ranks.hear(1, 30))
        for rank in range(3):
            ranks.tell(rank, "end")
        ranks.join(20)
    assert all(mixed == [] for _, _, mixed in stories)
    survivors, slept = np.array(stories[0][1]), np.array(stories[2][1])
    assert stories[0][1] == stories[1][1]
    assert (survivors[:, 4:8] == -1).all()  # a rank that takes no part holds nothing that can be routed to
    slept[:, 4:8] = -1
    assert (survivors == slept).all()


def whose_copy_fails(rank: Rank, backend: str):
    from eplb_core.errors import CommitError
    from eplb_core.memory.commit import CommitCopies

    maps = shuffles(3, 6, 3, 4)
    model = Model(rank.rank, 4, [[512]] * 6)
    model.fill(maps[0])
    config = case_config(backend, timeout_s=20)
    comm = eplb.Communicator(config, model.weights, rank.control(), device_group(rank, backend), options=case_options())
    comm.rearrange(maps[0], maps[1])
    if rank.rank == 1:
        run, copies = CommitCopies.run, []

        def fail_once(self) -> None:
            copies.append(self)
            if len(copies) == 2:
                raise RuntimeError("device-side error")
            run(self)

        CommitCopies.run = fail_once
    started = time.monotonic()
    with pytest.raises(EplbError) as caught:
        comm.rearrange(maps[1], maps[2])
    error = caught.value
    story = (type(error).__name__, error.code, str(error), time.monotonic() - started)
    if rank.rank == 1:
        assert isinstance(error, CommitError)
        assert error.fields["layer"] == 1
    else:
        assert model.wrong_rows(error.report.physical_to_logical_map) == []
        story = (*story, error.report.committed_layers)
    rank.tell(story)
    rank.listen()  # nobody leaves, so the others can only have learnt it from the failed commit itself
    comm.close(force=True)
    return story


@every_backend_under_faults
def test_a_failed_commit_makes_that_rank_dead_and_no_ballot(backend: BackendCase) -> None:
    """I2: its weights are invalid; the others see it as gone and keep whole layers."""
    with Ranks(3, whose_copy_fails, backend.name, env=backend.env) as ranks:
        first, dead, last = (ranks.hear(rank, 60) for rank in range(3))
        for rank in range(3):
            ranks.tell(rank, "end")
        ranks.values(20)
    assert dead[:2] == ("CommitError", "EPLB-T006")
    assert first[:3] == last[:3]
    assert first[0] == "PeerLostError"
    assert "ank 1" in first[2]
    assert first[4] == last[4]
    assert first[3] < 3
    assert last[3] < 3


def reads_no_decision(rank: Rank, last: bool):
    """Rank 1 fails between its ballot and the decision, which stands by then: it must obey it all the same."""
    from eplb_core.errors import MetadataError

    maps = shuffles(3, 4, 2, 4)
    model = Model(rank.rank, 4, [[512]] * 4)
    model.fill(maps[0])
    config = case_config("vmread", timeout_s=20)
    comm = eplb.Communicator(config, model.weights, rank.control())
    comm.rearrange(maps[0], maps[1])
    (_, watch), layer = comm._lives.epoch.entered, 3 if last else 1
    decide = watch.decide

    def fails_once(vote, **keywords):
        decision = decide(vote, **keywords)
        if rank.rank == 1 and vote.where.startswith(f"layer {layer}, phase vote") and decision.commit:
            watch.decide = decide
            raise MetadataError("EPLB-M005", peer=0, problem="a bit was flipped")
        return decision

    watch.decide = fails_once
    try:
        held = comm.rearrange(maps[1], maps[2]).physical_to_logical_map
    except EplbError as error:
        held = error.report.physical_to_logical_map
    rank.tell((held.tolist(), model.wrong_rows(held)))
    rank.listen()
    comm.close(force=True)


@pytest.mark.parametrize("last", [False, True], ids=["a layer in between", "the last layer"])
def test_a_rank_that_fails_after_the_decision_obeys_it(last: bool) -> None:
    """I2."""
    with Ranks(2, reads_no_decision, last) as ranks:
        stories = [ranks.hear(rank, 40) for rank in range(2)]
        for rank in range(2):
            ranks.tell(rank, "end")
        ranks.values(20)
    assert stories[0] == stories[1]
    assert stories[0][1] == []


@every_backend_under_faults
def test_ctrl_c_on_one_rank_frees_the_others(backend: BackendCase) -> None:
    with Ranks(3, until_one_fails, backend.name, "vote", "interrupt", 30.0, env=backend.env) as ranks:
        stories = [ranks.hear(rank, 60) for rank in SURVIVORS]
        check_the_story(stories, action="interrupt", phase="vote")
        assert "KeyboardInterrupt" in stories[0]["text"]
        for rank in SURVIVORS:
            ranks.tell(rank, "close")
        ranks.join(30)
