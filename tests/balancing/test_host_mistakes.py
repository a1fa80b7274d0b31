"""What a host or a plugin gets wrong is named, on every rank, and changes nothing that others reckon with."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.balancing.counter import TokenCounter
from eplb_core.balancing.load_window import LoadSnapshot
from eplb_core.balancing.policy import Group, Policy, new_placement
from eplb_core.errors import PlanError
from eplb_core.testing.ranks import run_ranks
from tests.balancing.serving import Serving

GROUP = Group(2, (0, 1))
LOAD = np.array([[9.0, 1.0, 1.0, 1.0]])
OLD = np.array([[0, 1, 2, 3, 0, 1]])
WANTED = np.array([[0, 1, 2, 0, 3, 1]])


class Odd:
    def __array__(self, *args, **kwargs):
        raise KeyError("odd")


UNREADABLE = {
    "sparse": lambda: torch.ones(4).to_sparse(),
    "mkldnn": lambda: torch.ones(4).to_mkldnn(),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "odd": Odd,
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_counts_that_cannot_be_read_are_refused_where_they_are_recorded(kind):
    with pytest.raises(PlanError) as caught:
        TokenCounter(1, 4).record(0, UNREADABLE[kind](), 1)
    assert caught.value.code == "EPLB-P010"


def test_a_view_that_is_yet_to_be_negated_is_counted():
    counter = TokenCounter(1, 4)
    counter.record(0, torch.view_as_complex(torch.tensor([[0.0, -3.0]] * 4)).conj().imag, 1)
    assert counter.take().tolist() == [[3.0] * 4]


def test_a_policy_that_writes_into_its_load_changes_no_figure():
    def writes(load, *_, **__):
        load[:] = np.nan
        return WANTED.copy()

    plain = new_placement(Policy("plain", lambda *_, **__: WANTED.copy(), None), LOAD.copy(), OLD, GROUP)
    written = new_placement(Policy("writes", writes, None), LOAD.copy(), OLD, GROUP)
    assert (written.balancedness_before, written.balancedness_after) == (
        plain.balancedness_before,
        plain.balancedness_after,
    )


def test_a_policy_that_exits_is_one_that_failed():
    def leaves(*_, **__):
        raise SystemExit(3)

    with pytest.raises(PlanError, match="SystemExit") as caught:
        new_placement(Policy("leaves", leaves, None), LOAD.copy(), OLD, GROUP)
    assert caught.value.code == "EPLB-P006"


def cannot_read_its_load(rank):
    if rank.rank == 1:

        def broken(*_):
            raise RuntimeError("the device is lost")

        LoadSnapshot.of_logical_experts = broken
    serving = Serving(rank, communicator="torch_gloo", step_interval=10, window_size=5, timeout_s=30)
    began = time.monotonic()
    with pytest.raises(eplb.EplbError) as caught:
        serving.serve(2000)
    took_s = time.monotonic() - began
    serving.lb.close()
    serving.comm.close(force=True)
    return caught.value.code, str(caught.value), took_s, serving.commits


def test_all_ranks_hear_of_a_load_that_one_cannot_read_and_none_waits_for_it():
    for code, text, took_s, commits in run_ranks(2, cannot_read_its_load):
        assert code == "EPLB-T007"
        assert "the device is lost" in text
        assert took_s < 15
        assert not commits
