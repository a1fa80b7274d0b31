"""Balancing at scale: what it costs the engine's thread, and what alignment saves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.balancing import figures

ROOT = Path(__file__).parents[2]


def test_the_interpreter_is_held_for_less_than_a_millisecond_at_a_time():
    assert figures.longest_hold_s(tries=100, enough_s=0.9e-3) < 1e-3


def test_what_aligning_needs_is_imported_when_a_load_balancer_is_built_and_not_beside_the_engine():
    pytest.importorskip("scipy")
    code = "import sys; from tests.balancing import figures; figures.policy(); print('scipy.optimize' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert said.stdout.strip() == "True"


def test_alignment_saves_rows_while_the_load_drifts():
    for aligned, unaligned in figures.rows_moved(intervals=3):
        assert aligned < unaligned
