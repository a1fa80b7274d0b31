"""Peers that stop, die, or send the wrong metadata: typed errors within their limits, and survivors that survive."""

from __future__ import annotations

import os
import re
import signal

import pytest


def test_a_stopped_source_is_a_stall_within_the_limit_and_its_landing_memory_is_kept(fresh_over_tcp):
    fresh_over_tcp.start("source_stops", 2, signal_name="SIGSTOP", limit_s=1.0)
    reader = fresh_over_tcp.ranks[1].answers()
    assert (reader["outcome"], reader["code"]) == ("StalledError", "EPLB-T002")
    assert "waiting for rank 0." in reader["text"]
    assert "layer 0" in reader["text"]
    assert 1.0 <= reader.line("outcome")["seconds"] < 2.5
    assert reader["drained"] is False
    assert reader.line("drained")["seconds"] < 1.0
    assert reader["closed"] is False
    assert reader["mapped"] is True
    half_way = r"rank 1 has waited 0\.\d s for rank 0, in layer 0, phase wait over NIXL"
    assert re.search(half_way, fresh_over_tcp.ranks[1].errors())
    os.kill(fresh_over_tcp.ranks[0].process.pid, signal.SIGCONT)
    assert fresh_over_tcp.ranks[1].end() == 0


def test_a_killed_source_is_a_nixl_failure_that_names_peer_layer_and_keys(fresh_over_tcp):
    fresh_over_tcp.start("source_stops", 2, signal_name="SIGKILL", limit_s=20.0)
    reader = fresh_over_tcp.ranks[1].answers()
    assert (reader["outcome"], reader["code"]) == ("TransferError", "EPLB-T001")
    assert reader["text"].startswith("NIXL transfer failed with state=ERR ")
    for part in ("layer 0", "rank 0", "(0, 0)", "NIXL_ERR_REMOTE_DISCONNECT"):
        assert part in reader["text"]
    assert reader.line("outcome")["seconds"] < 10.0
    assert reader["drained"] is False
    assert fresh_over_tcp.ranks[1].end() == 0


def test_a_death_that_the_core_saw_ends_the_wait_at_once(fresh_over_tcp):
    fresh_over_tcp.start("source_stops", 2, signal_name="SIGKILL", limit_s=20.0, told=True)
    reader = fresh_over_tcp.ranks[1].answers()
    assert (reader["outcome"], reader["code"]) == ("TransferError", "EPLB-T001")
    assert "state=cancelled" in reader["text"]
    assert "its process ended" in reader["text"]
    assert reader.line("outcome")["seconds"] < 1.0
    assert reader.line("drained")["seconds"] < 0.4
    assert fresh_over_tcp.ranks[1].end() == 0


@pytest.mark.parametrize("both", [False, True], ids=["it only serves", "it reads too"])
def test_a_source_outlives_a_reader_that_died_with_unserved_requests(fresh_over_tcp, both):
    fresh_over_tcp.start("reader_dies", 2, both=both)
    source = fresh_over_tcp.ranks[0].answers()
    assert source.facts[-1] == {"end": "well"}
    # READs of its own toward the dead rank may not even be asked about: that would serve the requests too.
    assert source["drained"] is not both
    assert source["closed"] is not both
    assert fresh_over_tcp.ranks[0].end() == 0


def test_a_wait_ends_when_somebody_else_aborts_and_nothing_is_left_in_flight(run):
    reader = run("cancelled", 2)[1]
    assert reader["posted"] == ["UNPOSTED"]
    assert reader["code"] == "EPLB-T001"
    assert reader["text"].startswith("NIXL transfer failed with state=cancelled ")
    assert "for reasons of its own" in reader["text"]
    assert "(layer 0, phase wait for rank 0)" in reader["text"]
    assert reader["drained"] is True
    assert reader["closed"] is True


def test_metadata_that_is_not_the_peers_own_is_refused_and_the_right_one_then_taken(run):
    for said in run("metadata_refused", 3):
        for name, text in said["texts"].items():
            assert text.startswith("EPLB-M005 Refused a message from rank"), (name, text)
        assert "checksum" in said["texts"]["flipped"]
        assert "is of rank" in said["texts"]["stale"]
        assert said["wrong"] == 0


@pytest.mark.parametrize(
    ("craft", "code", "part"),
    [
        ("metadata", "EPLB-M005", "NIXL found agent"),
        ("address", "EPLB-T001", "brought another agent's bytes"),
        ("version", "EPLB-M004", "NIXL EPLB library version mismatch with rank"),
        ("name", "EPLB-M005", "and a random part"),
        ("tensors", "EPLB-M005", "expected 1 of 9"),
        ("slots", "EPLB-M005", "expected 2 of 9"),
    ],
)
def test_a_whole_payload_that_does_not_fit_is_refused(run, craft, code, part):
    for said in run("metadata_crafted", 3, craft=craft):
        assert said["code"] == code
        assert part in said["text"]
