"""Histories from seeds: no row of a live rank ever differs from what that rank's own last report says it holds."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from tests.lives.accidents import Accident
from tests.lives.calls import Fault
from tests.lives.histories import run_histories
from tests.lives.job import Job
from tests.lives.oracle import Kind
from tests.lives.play import HistoryOver, Play
from tests.lives.worlds import TensorSpec, World

_QUICK, _SOAK, _AT_A_TIME = 20, 500, 25


def ranges(first: int, stop: int, size: int) -> list:
    return [
        pytest.param(range(at, min(at + size, stop)), id=f"{at}-{min(at + size, stop) - 1}")
        for at in range(first, stop, size)
    ]


def check(backend: str, seeds: range) -> None:
    failed = [str(history) for history in run_histories(backend, seeds) if history.findings]
    assert not failed, f"{len(failed)} of {len(seeds)} histories failed\n\n" + "\n\n".join(failed)


@pytest.mark.parametrize("backend", ["torch_gloo", "nixl"])
@pytest.mark.slow
def test_whatever_befalls_a_job_its_weights_are_what_its_reports_say(backend: str) -> None:
    check(backend, range(_QUICK))


@pytest.mark.parametrize("seeds", ranges(0, _SOAK, _AT_A_TIME))
@pytest.mark.parametrize("backend", ["torch_gloo", "nixl"])
@pytest.mark.timeout(900)
@pytest.mark.soak
def test_five_hundred_histories(backend: str, seeds: range) -> None:
    check(backend, seeds)


# --- a check of the checker: what it is there to see, it sees ---------------------------------------------------------

LAYER = (TensorSpec(torch.float32, (8,)),)
TWO_RANKS = World("torch_gloo", {}, {}, 2, 2, 4, (LAYER, LAYER), timeout_s=5.0, staging_layers=2)
OLD, NEW = np.array([[0, 1, 2, 3]] * 2), np.array([[2, 1, 0, 3]] * 2)


def test_one_wrong_byte_in_one_row_is_found() -> None:
    """A byte that was inverted after it had landed is committed: without checksums nothing but the bytes shows it."""
    with Play(TWO_RANKS) as play:
        job = Job(play, "one wrong byte")
        job.start_job(OLD)
        with pytest.raises(HistoryOver):
            job.rearrange_with(
                job.actors(),
                maps=(OLD, NEW),
                accident=Accident(faults={play.ranks[1]: Fault("landed", "corrupt", 0)}),
            )
    (finding,) = play.findings
    assert finding.kind is Kind.WRONG_AFTER_SUCCESS
    assert "rank 1" in finding.where
    assert "layer 0, tensor 0, row 0 should be expert 0" in finding.text


def test_a_row_that_changes_between_two_calls_is_found() -> None:
    with Play(TWO_RANKS) as play:
        job = Job(play, "a row that changes")
        job.start_job(OLD)
        assert job.rearrange_with(job.actors(), maps=(OLD, NEW))
        assert not play.findings
        with pytest.raises(HistoryOver):
            play.act({play.ranks[0]: job.command("load", job.weights(OLD))})  # which no communicator is told
    assert play.findings[0].kind is Kind.WRONG_WHILE_IDLE


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_process_that_ends_by_itself_is_found(number: int) -> None:
    with Play(TWO_RANKS) as play:
        job = Job(play, "a crash")
        job.start_job(OLD)
        os.kill(play.ranks[1].pid, number)  # the history knows nothing of it
        with pytest.raises(HistoryOver):
            play.act({})
    assert [finding.kind for finding in play.findings] == [Kind.CRASH]
    assert f"exit code -{number}" in play.findings[0].text


def test_a_call_that_does_not_come_back_is_found_and_says_where_it_is() -> None:
    with Play(TWO_RANKS) as play:
        job = Job(play, "a hang")
        job.start_job(OLD)
        command = job.command("rearrange", {"old": play.ranks[0].held, "new": play.ranks[0].held}, calls=0)
        with pytest.raises(HistoryOver):
            play.act({play.ranks[0]: command})  # rank 1 is not told
    assert [finding.kind for finding in play.findings] == [Kind.LATE]
    assert "rearrange" in play.findings[0].text


def test_equal_seeds_draw_equal_worlds() -> None:
    from tests.lives.worlds import draw_world

    assert draw_world("nixl", "nixl/7") == draw_world("nixl", "nixl/7")
    assert draw_world("nixl", "nixl/7") != draw_world("nixl", "nixl/8")
