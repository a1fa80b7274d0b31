"""Written scenarios, one for each rule of the meeting and the vote.

``python tests/protocol/test_scenarios.py`` writes down anew what comes of their commands.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from eplb_core.control.process import ProcessIdentity
from tests.protocol.ranks import PROCESSES
from tests.protocol.scenario import replay

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_it_happens_as_written(path):
    written = path.read_text()
    assert replay(written) == written


def test_a_command_that_is_not_known_fails():
    with pytest.raises(ValueError, match="no such command: 0 sleeps"):
        replay("> 0 sleeps\n")


if __name__ == "__main__":
    ProcessIdentity.in_use = lambda process: PROCESSES.in_use(process)
    for each in SCENARIOS:
        PROCESSES.unseen = frozenset()
        each.write_text(replay(each.read_text()))
