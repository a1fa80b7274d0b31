"""What holds for every run of the tests, the core's and the plugins': a run that proves nothing fails."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Cores may be busy: how long an example takes says nothing about the code, and pytest-timeout bounds the whole test.
settings.register_profile("eplb", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eplb")

# torch looks up the name of every address it connects to or accepts. A name server that loses one question in thirty
# costs 5 s a connection, at random. All addresses of the tests are loopback's or in /etc/hosts: none is asked.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

if sys.flags.optimize:
    _KEEP_ASSERTS = Path(__file__).parent / "tests" / "keep_asserts"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_KEEP_ASSERTS), os.environ.get("PYTHONPATH")]))
    runpy.run_path(str(_KEEP_ASSERTS / "sitecustomize.py"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Turn a green run in which no test passed (all skipped) into a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # one of several workers, of which any may have had nothing to do
        return
    if exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
