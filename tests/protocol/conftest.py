"""What every test of the protocol needs: processes that live and die when the test says so."""

from __future__ import annotations

import pytest

from eplb_core.control.process import ProcessIdentity
from tests.protocol.ranks import PROCESSES


@pytest.fixture(autouse=True)
def _processes_of_the_test(monkeypatch):
    monkeypatch.setattr(ProcessIdentity, "in_use", lambda process: PROCESSES.in_use(process))
    monkeypatch.setattr(PROCESSES, "living", frozenset())
    monkeypatch.setattr(PROCESSES, "unseen", frozenset())
