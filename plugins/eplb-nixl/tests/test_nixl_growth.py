"""Nothing grows: not over lives of a backend, not over rearrangements of one, not on the wire with experts."""

from __future__ import annotations

import pytest


def test_twenty_lives_return_threads_and_file_descriptors_to_base(run):
    for said in run("cycles", 2, count=20):
        seen = said["seen"]
        assert [each["wrong"] for each in seen] == [0] * 20
        assert seen[-1]["fds"] <= seen[1]["fds"]
        assert seen[-1]["threads"] <= seen[1]["threads"]


@pytest.mark.parametrize(("layers", "experts", "tensors"), [(61, 256, 4), (61, 4, 6)])
def test_a_large_models_metadata_is_small_and_soon_connected(run, layers, experts, tensors):
    for said in run("metadata_size", 2, layers=layers, experts=experts, tensors=tensors):
        assert said["nbytes"] < 64 << 10
        assert said["connected_s"] < 2.0  # 15 ms on an idle machine


@pytest.mark.soak
def test_a_thousand_rearrangements_leave_nothing_behind(run):
    for said in run("many_rounds", 2, rounds=1000):
        early, late = said["seen"]
        assert late == early


@pytest.mark.parametrize("mode", ["zero_copy", "staged"])
def test_three_hundred_rearrangements_leave_nothing_behind(run, mode):
    for said in run("many_rounds", 2, rounds=300, options={"mode": mode}):
        early, late = said["seen"]
        assert late == early
        assert late["requests"] == 0
        assert late["in_flight"] == 0
