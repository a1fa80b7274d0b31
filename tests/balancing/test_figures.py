"""Balancing at scale: what it costs the engine's thread, and what alignment saves."""

from __future__ import annotations

from eplb_core.balancing import alignment, placement
from tests.balancing import figures


def test_the_interpreter_is_held_for_less_than_a_millisecond_at_a_time():
    assert figures.longest_hold_s() < 1e-3


def test_without_letting_others_run_it_is_held_longer(monkeypatch):
    held_s = figures.longest_hold_s(3)
    for module in (alignment, placement):
        monkeypatch.setattr(module, "let_others_run", lambda: None)
    assert figures.longest_hold_s(3) > 2 * held_s


def test_alignment_saves_rows_while_the_load_drifts():
    for aligned, unaligned in figures.rows_moved(intervals=3):
        assert aligned < unaligned
