"""Nothing grows: not over lives of a backend, not over rearrangements of one."""

from __future__ import annotations

import pytest


def test_twenty_lives_return_threads_and_file_descriptors_to_base(run):
    for said in run("cycles", 2, count=20):
        seen = said["seen"]
        assert [each["wrong"] for each in seen] == [0] * 20
        assert seen[-1]["fds"] <= seen[1]["fds"]
        assert seen[-1]["threads"] <= seen[1]["threads"]


@pytest.mark.parametrize("mode", ["zero_copy", "staged"])
def test_three_hundred_rearrangements_leave_nothing_behind(run, mode):
    for said in run("many_rounds", 2, rounds=300, options={"mode": mode}):
        early, late = said["seen"]
        assert late == early
        assert late["requests"] == 0
        assert late["in_flight"] == 0
