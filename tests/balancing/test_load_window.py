"""The load window: exactly the last steps before a rearrangement, whatever kind of numbers the host counts in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.balancing.load_window import LoadWindow
from eplb_core.errors import PlanError


def a_window(placement, window_size=10, step_interval=10, experts=None):
    placement = np.array(placement)
    experts = int(placement.max()) + 1 if experts is None else experts
    return LoadWindow(placement, experts, window_size=window_size, step_interval=step_interval)


@st.composite
def histories(draw):
    """Steps of a host: what it recorded in each, whether it was a dummy, and which layer moved after it."""
    layers, slots, experts = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    row = st.lists(st.integers(-1, experts - 1), min_size=slots, max_size=slots)
    counts = st.lists(st.integers(0, 50), min_size=slots, max_size=slots)
    step = st.tuples(
        st.lists(st.tuples(st.integers(0, layers - 1), counts), max_size=4),
        st.sampled_from([False, False, False, True]),
        st.one_of(st.none(), st.none(), st.tuples(st.integers(0, layers - 1), row)),
    )
    return (
        np.array(draw(st.lists(row, min_size=layers, max_size=layers))),
        experts,
        draw(st.integers(1, 9)),
        draw(st.integers(1, 6)),
        draw(st.lists(step, min_size=1, max_size=25)),
    )


@given(histories(), st.booleans())
@settings(max_examples=300)
def test_a_snapshot_is_the_sum_of_the_windows_steps_by_the_placement_that_held_in_each(history, skips):
    placement, experts, window_size, interval, steps = history
    window = LoadWindow(placement, experts, window_size=window_size, step_interval=interval)
    rows, of_steps = placement.copy(), []
    for number, (recorded, is_dummy, moved) in enumerate(steps, start=1):
        logical = np.zeros((len(placement), experts))
        for layer, counts in recorded:
            if window.counts_next_step or not skips:
                window.record(layer, np.array(counts), number)
            for slot, tokens in enumerate(counts):
                if rows[layer, slot] >= 0 and not is_dummy:
                    logical[layer, rows[layer, slot]] += tokens
        of_steps.append(logical)
        snapshot = window.end_step(number, is_dummy=is_dummy)
        if number % interval == 0:
            assert snapshot.step == number
            assert (snapshot.of_logical_experts() == sum(of_steps[-window_size:])).all()
        else:
            assert snapshot is None
        if moved is not None:
            layer, row = moved
            rows[layer] = row
            window.placed(layer, np.array(row))


@pytest.mark.parametrize(
    "counts",
    [
        np.array([1, 2, 3, 4], dtype=kind)
        for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "f2", "f4", "f8", ">i4")
    ]
    + [torch.tensor([1, 2, 3, 4], dtype=kind) for kind in (torch.uint8, torch.int32, torch.int64)]
    + [torch.tensor([1, 2, 3, 4], dtype=kind) for kind in (torch.bfloat16, torch.float16, torch.float32, torch.float64)]
    + [np.array([4, 3, 2, 1])[::-1], torch.tensor([1, 9, 2, 9, 3, 9, 4, 9])[::2], [1, 2, 3, 4]],
    ids=lambda counts: f"{type(counts).__name__}-{getattr(counts, 'dtype', '')}",
)
def test_counts_of_every_kind_add_up(counts):
    window = a_window([[0, 1, 2, 0]], step_interval=2)
    window.record(0, counts, 1)
    window.record(0, counts, 1)
    window.end_step(1)
    window.record(0, counts, 2)
    assert window.end_step(2).of_logical_experts().tolist() == [[15, 6, 9]]


def test_what_is_recorded_is_taken_at_once():
    window = a_window([[0, 1]], step_interval=1)
    counts = torch.tensor([5, 7])
    window.record(0, counts, 1)
    counts.zero_()
    assert window.end_step(1).of_logical_experts().tolist() == [[5, 7]]


def test_a_snapshot_does_not_change_while_the_host_counts_on():
    window = a_window([[0, 1], [1, 0]], window_size=3, step_interval=1)
    window.record(0, np.array([1, 1]), 1)
    first = window.end_step(1)
    window.record(0, np.array([10, 10]), 2)
    window.placed(0, np.array([1, 0]))
    second = window.end_step(2)
    window.record(1, np.array([100, 100]), 3)
    assert first.of_logical_experts().tolist() == [[1, 1], [0, 0]]
    assert second.of_logical_experts().tolist() == [[11, 11], [0, 0]]


def test_sums_beyond_float32_are_exact():
    window = a_window([[0, 1]], window_size=100, step_interval=100)
    for step in range(1, 101):
        window.record(0, np.array([2**40 + 1, 1]), step)
        snapshot = window.end_step(step)
    assert snapshot.of_logical_experts().tolist() == [[100 * (2**40 + 1), 100]]


def test_a_window_below_the_interval_keeps_one_sum_however_many_steps_it_has():
    window = a_window([[0, 1]], window_size=1000, step_interval=3000)
    wanted = []
    for step in range(1, 6001):
        if window.counts_next_step:
            wanted.append(step)
            window.record(0, np.array([1, 2]), step)
        snapshot = window.end_step(step)
        if snapshot is not None:
            assert len(snapshot.segments) == 1
            assert snapshot.of_logical_experts().tolist() == [[1000, 2000]]
    assert wanted == [*range(2001, 3001), *range(5001, 6001)]


@pytest.mark.parametrize(
    ("layer", "counts", "text"),
    [
        (2, [1, 2], "layer 2 is none of the 2 layers"),
        (-1, [1, 2], "layer -1 is none of the 2 layers"),
        (True, [1, 2], "layer True is none"),
        ("0", [1, 2], "layer '0' is none"),
        (0, [1, 2, 3], r"should be real \[2\], one per physical expert, got list \[3\]"),
        (0, np.zeros((1, 2)), r"got float64 \[1, 2\]"),
        (0, np.array(["a", "b"]), r"got <U1 \[2\]"),
        (0, torch.zeros(2, dtype=torch.complex64), r"got torch.complex64 \[2\]"),
        (0, [[1], [2, 3]], "cannot be read as an array"),
        (0, torch.zeros(2, device="meta"), "are on meta, earlier ones were on cpu"),
    ],
)
def test_what_cannot_be_counts_is_refused_where_it_is_recorded(layer, counts, text):
    window = a_window([[0, 1], [1, 0]])
    window.record(0, np.array([0, 0]), 1)
    with pytest.raises(PlanError, match=text) as error:
        window.record(layer, counts, 1)
    assert error.value.code == "EPLB-P010"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -3.0])
def test_numbers_that_are_no_tokens_are_refused_when_they_are_read(bad):
    window = a_window([[0, 1], [1, 0]], step_interval=1)
    window.record(1, np.array([0.0, bad]), 1)
    snapshot = window.end_step(1)
    with pytest.raises(PlanError, match="expert 0 of layer 1 add up to") as error:
        snapshot.of_logical_experts()
    assert error.value.code == "EPLB-P010"


def test_a_device_is_not_waited_for_when_its_counts_are_recorded(monkeypatch):
    """Everything that could wait for a device reads a value; a tensor without memory has none to read."""
    window = a_window([[0, 1]], window_size=2, step_interval=2)
    marks = []
    for step in (1, 2):
        window.record(0, torch.tensor([1, 2], device="meta"), step)
        window.record(0, torch.tensor([1.0, 2.0], device="meta"), step)
        window.placed(0, np.array([1, 0]))
        snapshot = window.end_step(step, mark=lambda: marks.append("event") or "event")
    assert (marks, snapshot.event) == (["event"], "event")


def test_the_worker_waits_for_the_device_before_it_reads():
    window = a_window([[0, 1]], step_interval=1)
    window.record(0, np.array([1, 2]), 1)
    snapshot = window.end_step(1)
    waited = []
    object.__setattr__(snapshot, "event", "event")
    assert snapshot.of_logical_experts(waited.extend).tolist() == [[1, 2]]
    assert waited == ["event"]
