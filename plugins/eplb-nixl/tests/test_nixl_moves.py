"""Rows arrive as they were: over UCX's own choice and over TCP, zero-copy and staged."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("mode", ["zero_copy", "staged"])
def test_three_ranks_with_redundant_experts_hold_the_new_placement(run, mode):
    for said in run("move", 3, redundant=2, options={"mode": mode}):
        assert said["wrong"] == 0
        assert said["mode"] == mode
        assert said["closed"] is True


def test_the_mode_is_each_sources_own(run):
    said = run("mixed_modes", 3)
    assert [each["wrong"] for each in said] == [0, 0, 0]
    assert [each["mode"] for each in said] == ["staged", "zero_copy", "zero_copy"]


def test_auto_reads_live_host_memory_and_says_why(run):
    said = run("move", 2, rounds=1)[0]
    assert said["mode"] == "zero_copy"
    assert said["reason"] == "the live weights can be registered"


@pytest.mark.parametrize("mode", ["zero_copy", "staged"])
def test_layers_may_differ_and_hold_aliases_empty_rows_and_views_of_one_storage(run, mode):
    assert [each["wrong"] for each in run("uneven_layers", 3, options={"mode": mode})] == [0, 0, 0]


@pytest.mark.parametrize("options", [{"progress_thread": "on"}, {"num_threads": 2}, {"spin_s": 0.001}])
def test_moves_are_right_with(run, options):
    assert [each["wrong"] for each in run("move", 2, options=options)] == [0, 0]


def test_a_rank_that_joins_later_is_connected_then(run):
    assert [each["wrong"] for each in run("joins_later", 3)] == [0, 0, 0]


def test_a_slots_rows_stay_until_the_slot_is_used_again(run):
    for said in run("lease", 2):
        assert said["unchanged"]
        assert said["changed"]


def test_weights_that_the_host_deleted_can_still_be_read(run):
    assert [each["right"] for each in run("weights_deleted", 2)] == [True, True]


def test_two_communicators_in_one_process_both_work_and_one_outlives_the_other(run):
    assert [each["wrong"] for each in run("two_in_one_process", 2)] == [[0] * 5] * 2
