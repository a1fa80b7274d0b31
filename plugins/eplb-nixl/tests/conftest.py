"""Ranks as processes: a team per UCX setting runs scenario after scenario; tests that kill ranks get fresh ones."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
import torch.distributed as dist

HERE = Path(__file__).parent
LIMIT_S = 150.0

OVER_TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
"""Everything through the loopback device: READs are served by their source, which must make progress."""

BY_DEFAULT: dict[str, str] = {"UCX_NET_DEVICES": "lo"}
"""UCX chooses, without leaving the machine: on one host, memory of another process is read directly."""


class Said:
    """What a rank said in one scenario: the last value under each name."""

    def __init__(self, facts: list[dict[str, Any]], rank: Process) -> None:
        self.facts, self._rank = facts, rank

    def __getitem__(self, name: str) -> Any:
        return self.line(name)[name]

    def line(self, name: str) -> dict[str, Any]:
        """The last line with this name in it."""
        for facts in reversed(self.facts):
            if name in facts:
                return facts
        raise AssertionError(f"the rank never said {name!r}: {self.facts}\n{self._rank.errors()}")


class Process:
    """One rank's process."""

    def __init__(self, rank: int, port: int, environment: dict[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))}
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "rank.py"), str(rank), str(port)],
            env={**clean, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,  # UCX, however, writes its errors to stdout
            text=True,
        )
        self._noise: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, run: int, scenario: str, world: int, arguments: dict[str, Any]) -> None:
        command = {"run": run, "scenario": scenario, "world": world, "arguments": arguments}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answers(self) -> Said:
        """Wait for the end of the scenario, or of the process."""
        facts: list[dict[str, Any]] = []
        limit = time.monotonic() + LIMIT_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no end within {LIMIT_S:.0f} s: {facts}\n{self.errors()}") from None
            if line is None:
                return Said([*facts, {"status": self.process.wait()}], self)
            if not line.startswith("{"):
                self._noise.append(line)
            else:
                facts.append(json.loads(line))
                if "end" in facts[-1]:
                    return Said(facts, self)

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4000:] + "".join(self._noise[-40:])

    def end(self) -> int:
        """Let it come to its end by itself, as a program does."""
        self.process.stdin.close()
        return self.process.wait(timeout=30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Team:
    """Ranks that share a store and a UCX setting."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._runs = 0
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
        )
        self.ranks: list[Process] = []

    def start(self, scenario: str, world: int = 2, **arguments: Any) -> None:
        """Ask every rank to run a scenario; start those there are not yet."""
        while len(self.ranks) < world:
            self.ranks.append(Process(len(self.ranks), self._store.port, self._environment))
        self._runs += 1
        for rank in self.ranks[:world]:
            rank.ask(self._runs, scenario, world, arguments)

    def run(self, scenario: str, world: int = 2, **arguments: Any) -> list[Said]:
        """Run a scenario on every rank to its end."""
        self.start(scenario, world, **arguments)
        try:
            said = [rank.answers() for rank in self.ranks[:world]]
            for number, each in enumerate(said):
                assert "end" in each.facts[-1], f"rank {number} ended: {each.facts}\n{self.ranks[number].errors()}"
                assert each["end"] == "well", (
                    f"rank {number} of {scenario}: {each.facts}\n{self.ranks[number].errors()}"
                )
        except AssertionError:
            self.dismiss()  # the next test gets fresh ones
            raise
        return said

    def dismiss(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.ranks = []


def _team(environment: dict[str, str]) -> Iterator[Team]:
    team = Team(environment)
    yield team
    team.dismiss()


@pytest.fixture(scope="session")
def team_by_default() -> Iterator[Team]:
    yield from _team(BY_DEFAULT)


@pytest.fixture(scope="session")
def team_over_tcp() -> Iterator[Team]:
    yield from _team(OVER_TCP)


@pytest.fixture(params=["default", "tcp"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[Said]]:
    """Run a scenario on a team, over UCX's own choice and over TCP."""
    name = {"default": "team_by_default", "tcp": "team_over_tcp"}[request.param]
    team: Team = request.getfixturevalue(name)
    return team.run


@pytest.fixture
def fresh_over_tcp() -> Iterator[Team]:
    """A team of this test's own, to be stopped and killed."""
    yield from _team(OVER_TCP)
