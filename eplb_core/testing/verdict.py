"""Runs the conformance kit on one backend without a test suite of its own; the outcome of each test."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from eplb_core.testing.conformance import kit_tests
from eplb_core.testing.expectation import PREFIX, NotReached
from eplb_core.testing.gate import NOT_RUN

Outcome = Literal["passed", "failed", "not reached", "not run", "not claimed"]
GOOD: tuple[Outcome, ...] = ("passed", "not claimed")

_MODULE = """from eplb_core.testing.conformance import BackendConformance


class TestConformance(BackendConformance):
    backend_name = {name!r}
    env = {env!r}
    device_type = {device_type!r}
    device_group = {device_group!r}
"""

_NOT_REACHED = "eplb not reached"


@dataclass(frozen=True)
class Verdict:
    """How one test of the kit ended.

    Parameters
    ----------
    test : str
        Name of the test, without ``test_``.
    outcome : {"passed", "failed", "not reached", "not run", "not claimed"}
        "not reached": the backend raised, or a rank was lost, before the test could decide. "not run": another test
        failed first, or this machine lacks something. "not claimed": the capability behind it is
        not declared. Only "passed" and "not claimed" are good (`GOOD`).
    meaning : str
        Meaning of the outcome "failed".
    detail : str
        How the test failed, or why it did not run.
    seconds : float
        Time that the test took.
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
    device_group: bool = False,
    tests: Sequence[str] = (),
    told: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Run the kit on an installed backend.

    Parameters
    ----------
    name : str
        Name of the backend.
    env : mapping of str to str or None
        Environment of the ranks.
    device_type : str or None
        Where the weights live; None is the kit's choice.
    device_group : bool
        Give the backend a gloo group as the host's.
    tests : sequence of str
        Names of kit tests, with or without ``test_``, or patterns of names (`fnmatch`); none is all.
    told : callable or None
        Called with each verdict as it falls.

    Returns
    -------
    list of Verdict
        One per test, in the kit's order.

    Raises
    ------
    ValueError
        The kit has no test of a name; close ones are named.
    """
    chosen = _chosen(tests)
    collector = _Collector(told)
    with tempfile.TemporaryDirectory(prefix="eplb-verify-") as folder:
        module = Path(folder) / "test_conformance.py"
        text = _MODULE.format(name=name, env=dict(env or {}), device_type=device_type, device_group=device_group)
        module.write_text(text, encoding="utf-8")
        settings = Path(folder) / "pytest.ini"  # its own: settings of the working directory must not matter
        settings.write_text("[pytest]\n", encoding="utf-8")
        plugins = ("-p", "no:terminal", "-p", "no:cacheprovider")
        wanted = [f"{module}::TestConformance::{test}" for test in chosen] if tests else [str(module)]
        arguments = ["--import-mode=importlib", "-c", str(settings), "--rootdir", folder, *plugins, *wanted]
        pytest.main(arguments, plugins=[collector])
    verdicts = {verdict.test: verdict for verdict in collector.verdicts}
    missing = [test for test in chosen if test.removeprefix("test_") not in verdicts]
    for test in missing:
        verdicts[test.removeprefix("test_")] = _verdict(test, "not run", collector.trouble, 0.0)
    return [verdicts[test.removeprefix("test_")] for test in chosen]


def _chosen(patterns: Sequence[str]) -> list[str]:
    """Return the kit's tests that match one of the patterns, in the kit's order."""
    names = [name.removeprefix("test_") for name in kit_tests()]
    chosen: set[str] = set()
    for pattern in patterns:
        wanted = pattern.removeprefix("test_")
        matching = fnmatch.filter(names, wanted)
        if not matching:
            within = [name for name in names if wanted.strip("*") in name]
            close = dict.fromkeys([*difflib.get_close_matches(wanted, names, n=3, cutoff=0.5), *within[:5]])
            guess = f"Close to it: {', '.join(close)}." if close else "Patterns such as 'wait*' are understood."
            raise ValueError(f"the kit has no test {pattern!r}. {guess}")
        chosen.update(matching)
    return [f"test_{name}" for name in names if not patterns or name in chosen]


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

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
        """Note which tests ended before they could decide, which a report does not say."""
        if call.excinfo is not None and isinstance(call.excinfo.value, NotReached):
            item.user_properties.append((_NOT_REACHED, str(call.excinfo.value).removeprefix(PREFIX)))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the first report of a test that decides its outcome."""
        test = report.nodeid.rpartition("::")[2]
        if any(verdict.test == test.removeprefix("test_") for verdict in self.verdicts):
            return
        seconds = time.monotonic() - self._started
        said = dict(report.user_properties)
        if report.passed and report.when != "call":
            return
        if NOT_RUN in said:
            verdict = _verdict(test, "not run", str(said[NOT_RUN]), seconds)
        elif _NOT_REACHED in said:
            verdict = _verdict(test, "not reached", str(said[_NOT_REACHED]), seconds)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            verdict = _verdict(test, "not claimed", reason.removeprefix("Skipped: "), seconds)
        elif report.failed:
            verdict = _verdict(test, "failed", _failure_of(report), seconds)
        else:
            verdict = _verdict(test, "passed", "", seconds)
        self._started = time.monotonic()
        self.verdicts.append(verdict)
        if self._told is not None:
            self._told(verdict)


def _failure_of(report: pytest.TestReport) -> str:
    """Return the failure without the meaning that the kit puts in front of it, and without pytest's frames."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    return text.partition("\n\n")[2] or text


def _verdict(test: str, outcome: Outcome, detail: str, seconds: float) -> Verdict:
    meaning = " ".join(inspect.cleandoc(kit_tests()[test].__doc__ or "").split())
    return Verdict(test.removeprefix("test_"), outcome, meaning, detail.strip(), round(seconds, 2))
