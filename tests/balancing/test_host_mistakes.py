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


def calls_inside_step(rank):
    """A callback, which runs inside ``step()``, calls what only the engine may call between two steps."""
    said = []
    calls = [lambda: lb.step(), lambda: lb.invalidate(), lambda: lb.adopt(comm, placement), lambda: lb.close()]

    def on_commit(*_):
        for call in calls:
            with pytest.raises(PlanError, match="inside step") as caught:
                call()
            said.append(caught.value.code)

    config = eplb.EPLBConfig(
        communicator="torch_gloo", num_redundant_experts=4, use_async=False, step_interval=2, window_size=1
    )
    comm = eplb.Communicator(config, [[torch.zeros(4, 8)]], rank.control())
    placement = np.array([[0, 0, 1, 2, 3, 0, 0, 0]])
    lb = eplb.LoadBalancer(config, comm, placement, 4, on_commit=on_commit)
    for _ in range(2):
        lb.record(0, np.array([1, 1, 100, 100, 1, 1, 1, 1]))
        lb.step()
    lb.close()
    comm.close()
    return said


def test_a_callback_cannot_step_or_close_what_is_inside_a_step():
    for said in run_ranks(2, calls_inside_step):
        assert said == ["EPLB-P004"] * 4


# --- what the ranks were given ----------------------------------------------------------------------------------------


def given(rank, kind):
    """Rank 1's host gives something else; then all give the same, on the same communicator."""
    odd = rank.rank == 1
    config = eplb.EPLBConfig(communicator="torch_gloo", num_redundant_experts=4, timeout_s=20)
    comm = eplb.Communicator(config, [[torch.zeros(4, 8)] for _ in range(2)], rank.control())
    placement = np.tile(np.arange(8) % 4, (2, 1))
    other, theirs = placement.copy(), config
    if kind == "held":  # by all ranks, after this; one says that it is not
        comm.rearrange(placement, np.roll(placement, 1, axis=1))
        placement = np.roll(placement, 1, axis=1)
        other = placement.copy()
    if odd and kind in ("map", "held"):
        other[1, 6] = 3 - other[1, 6]
    elif odd:
        theirs = config.model_copy(update={"step_interval": 7})
    with pytest.raises(eplb.EplbError) as caught:
        eplb.LoadBalancer(theirs, comm, other, 4)
    with eplb.LoadBalancer(config, comm, placement, 4):
        pass
    comm.close()
    return caught.value.code, str(caught.value)


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        ("map", "EPLB-P003", "Rank 1 and rank 0 differ"),
        ("held", "EPLB-P008", "not what rank 1 holds: it differs first in layer 1, at slot 6"),
        ("interval", "EPLB-C015", "step_interval is 3000 on rank 0, and 7 on rank 1"),
    ],
)
def test_what_one_rank_alone_was_given_is_refused_on_all_and_the_communicator_stays_usable(kind, code, text):
    for found, said in run_ranks(2, given, kind):
        assert found == code
        assert text in said


class Unsayable(Exception):
    def __str__(self):
        raise ValueError("no text")


def test_a_policy_whose_error_has_no_text_is_one_that_failed():
    def fails(*_, **__):
        raise Unsayable

    with pytest.raises(PlanError, match="Unsayable") as caught:
        new_placement(Policy("fails", fails, None), LOAD.copy(), OLD, GROUP)
    assert caught.value.code == "EPLB-P006"
