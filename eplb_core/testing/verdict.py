"""Runs the conformance kit on one backend, outside a test suite of its own, and says how each test ended."""

from __future__ import annotations

import inspect
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from eplb_core.testing.conformance import kit_tests

Outcome = Literal["passed", "failed", "not claimed"]

_MODULE = """from eplb_core.testing.conformance import BackendConformance


class TestConformance(BackendConformance):
    backend_name = {name!r}
    env = {env!r}
    device_type = {device_type!r}
"""


@dataclass(frozen=True)
class Verdict:
    """How one test of the kit ended.

    Parameters
    ----------
    test : str
        Its name, without ``test_``.
    outcome : {"passed", "failed", "not claimed"}
        "not claimed": the capability behind it is not declared, or its device is not here.
    meaning : str
        What a failure means.
    detail : str
        How it failed, or why it did not run.
    seconds : float
        How long it took.
    """

    test: str
    outcome: Outcome
    meaning: str
    detail: str
    seconds: float


def examine(
    name: str,
    *,
    env: Mapping[str, str] | None = None,
    device_type: str | None = None,
    tests: Sequence[str] = (),
    told: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Run the kit on an installed backend.

    Parameters
    ----------
    name : str
        Of the backend.
    env : mapping of str to str or None
        Environment of the ranks.
    device_type : str or None
        Where the weights live; None is the kit's choice.
    tests : sequence of str
        Names of kit tests, without ``test_``; none is all.
    told : callable or None
        Called with each verdict as it falls.

    Returns
    -------
    list of Verdict
        One per test, in the kit's order.

    Raises
    ------
    ValueError
        The kit has no test of a name.
    """
    names = [f"test_{test.removeprefix('test_')}" for test in tests]
    unknown = sorted(set(names) - set(kit_tests()))
    if unknown:
        raise ValueError(f"the kit has no {', '.join(unknown)}")
    chosen = [test for test in kit_tests() if not names or test in names]
    collector = _Collector(told)
    with tempfile.TemporaryDirectory(prefix="eplb-verify-") as folder:
        module = Path(folder) / "test_conformance.py"
        module.write_text(_MODULE.format(name=name, env=dict(env or {}), device_type=device_type), encoding="utf-8")
        settings = Path(folder) / "pytest.ini"  # of its own: the working directory's are not the kit's business
        settings.write_text("[pytest]\n", encoding="utf-8")
        plugins = ("-p", "no:terminal", "-p", "no:cacheprovider")
        wanted = [f"{module}::TestConformance::{test}" for test in chosen] if names else [str(module)]
        arguments = ["--import-mode=importlib", "-c", str(settings), "--rootdir", folder, *plugins, *wanted]
        pytest.main(arguments, plugins=[collector])
    verdicts = {verdict.test: verdict for verdict in collector.verdicts}
    missing = [test for test in chosen if test.removeprefix("test_") not in verdicts]
    for test in missing:
        verdicts[test.removeprefix("test_")] = _verdict(test, "failed", f"it did not run: {collector.trouble}", 0.0)
    return [verdicts[test.removeprefix("test_")] for test in chosen]


class _Collector:
    """A pytest plugin that turns reports into verdicts."""

    def __init__(self, told: Callable[[Verdict], None] | None) -> None:
        self.verdicts: list[Verdict] = []
        self.trouble = "pytest ended early"
        self._told = told
        self._started = time.monotonic()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why nothing could be collected."""
        if report.failed:
            self.trouble = str(report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a test's first report that decides."""
        test = report.nodeid.rpartition("::")[2]
        if any(verdict.test == test.removeprefix("test_") for verdict in self.verdicts):
            return
        seconds = time.monotonic() - self._started
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            verdict = _verdict(test, "not claimed", reason.removeprefix("Skipped: "), seconds)
        elif report.failed:
            verdict = _verdict(test, "failed", _failure_of(report), seconds)
        elif report.when == "call":
            verdict = _verdict(test, "passed", "", seconds)
        else:
            return
        self._started = time.monotonic()
        self.verdicts.append(verdict)
        if self._told is not None:
            self._told(verdict)


def _failure_of(report: pytest.TestReport) -> str:
    """Return what failed, without the meaning that the kit puts in front of it, and without pytest's frames."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    return text.partition("\n\n")[2] or text


def _verdict(test: str, outcome: Outcome, detail: str, seconds: float) -> Verdict:
    meaning = " ".join(inspect.cleandoc(kit_tests()[test].__doc__ or "").split())
    return Verdict(test.removeprefix("test_"), outcome, meaning, detail.strip(), round(seconds, 2))
