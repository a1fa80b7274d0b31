"""Installs the mutants beside the backend they are made of, and runs kit tests on them.

``python -m tests.conformance_mutants.runner`` runs every kit test on every mutant and prints the table.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from eplb_core.testing.conformance import BackendConformance, gate_of, kit_tests
from eplb_core.testing.expectation import Unmet
from eplb_core.testing.pool import RankPool, Subject
from eplb_core.testing.scaffold import new_backend

HERE = Path(__file__).parent
sys.path.append(str(HERE / "site"))

from eplb_mutants.table import MUTANTS  # noqa: E402


def install(folder: Path) -> None:
    """Put the good backend, as a stranger gets it, and the mutants onto sys.path, with what pip would write of them."""
    new_backend("good", folder / "eplb-good")
    points = {"eplb-good": {"good": "eplb_good.hooks"}, "eplb-mutants": {}}
    for name in MUTANTS:
        points["eplb-mutants"][name] = "eplb_mutants.hooks"
    points["eplb-mutants"]["heavy_hooks"] = "eplb_mutants.heavy"
    site = folder / "site"
    for distribution, entries in points.items():
        info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {module}" for name, module in entries.items()]
        (info / "entry_points.txt").write_text("[eplb_core.plugins]\n" + "\n".join(lines) + "\n")
    sys.path[:0] = [str(site), str(folder / "eplb-good" / "src")]


class Examination:
    """Runs tests of the kit on one backend, outside pytest.

    Parameters
    ----------
    name : str
        Of the backend.
    """

    def __init__(self, name: str) -> None:
        env = {"EPLB_PLUGINS": name}
        # The other plugins need not be looked at a thousand times; the subprocess of a kit test sees the same.
        os.environ.update(env)
        self.name = name
        self.kit = type("TestMutant", (BackendConformance,), {"backend_name": name, "env": env})()
        self.pool = RankPool(3, env)
        self._measured: dict = {}

    def failure_of(self, test: str) -> BaseException | None:
        """Return how a kit test fails, or None; only an `Unmet` says that what it is about does not hold."""
        from eplb_core.discovery.discover import discover

        info = discover().backends[self.name]
        fixtures = {
            "info": info,
            "ranks": self.pool,
            "subject": Subject(self.name),
            "measured": self._measured,
        }
        function = kit_tests()[test]
        wanted = list(inspect.signature(function).parameters)[1:]
        try:
            function(self.kit, **{name: fixtures[name] for name in wanted})
        except (AssertionError, pytest.fail.Exception) as failed:
            return failed
        return None

    def close(self) -> None:
        self.pool.close()
        os.environ.pop("EPLB_PLUGINS", None)


def applicable(name: str, declares: dict) -> list[str]:
    """Return the kit tests that a backend's claims call for; the one about the class's own tests needs pytest."""
    claims = {"async_safe", "elastic_safe", *(key for key, value in declares.items() if value is True)}
    return [test for test in kit_tests() if test != "test_the_kit_is_complete" and gate_of(test) in {None, *claims}]


def main() -> int:
    """Print which kit tests each mutant fails; 0 when every one fails the test meant for it and the good one none."""
    options = argparse.ArgumentParser()
    options.add_argument("--only-meant", action="store_true", help="run on each mutant only the test meant for it")
    options.add_argument("names", nargs="*", help="mutants; none is all")
    given = options.parse_args()
    escaped = []
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        chosen = given.names or ["good", *MUTANTS]
        print(f"{'backend':<24}{'meant for it':<48}{'caught':<8}{'seconds':>8}  other kit tests that fail", flush=True)
        for name in chosen:
            mutant = MUTANTS.get(name)
            meant = f"test_{mutant.test}" if mutant else ""
            tests = applicable(name, mutant.declares if mutant else {})
            if given.only_meant and mutant:
                tests = [meant]
            examination, failed, started = Examination(name), {}, time.monotonic()
            try:
                failed = {test: failure for test in tests if (failure := examination.failure_of(test)) is not None}
            finally:
                examination.close()
            caught = isinstance(failed.get(meant), Unmet) if mutant else not failed
            escaped += [] if caught else [name]
            others = [test for test in failed if test != meant]
            unmet = [test.removeprefix("test_") for test in others if isinstance(failed[test], Unmet)]
            shown = "-" if given.only_meant else ": ".join([str(len(unmet)), *filter(None, [", ".join(unmet)])])
            if not given.only_meant and len(others) > len(unmet):
                shown += f"; {len(others) - len(unmet)} not reached"
            if not caught:
                shown = str(failed.get(meant, failed))
            verdict = ("yes" if caught else "NO") if mutant else ("passes" if caught else "FAILS")
            seconds = time.monotonic() - started
            print(f"{name:<24}{mutant.test if mutant else '':<48}{verdict:<8}{seconds:8.1f}  {shown}", flush=True)
    print(f"{len(chosen) - len(escaped)} of {len(chosen)} as they should be" + (f"; not: {escaped}" if escaped else ""))
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
