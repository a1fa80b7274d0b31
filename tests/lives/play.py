"""Ranks told to act together, once: signals at their moments, everyone's calls heard, and all of it judged."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.lives.calls import Call, Command
from tests.lives.oracle import (
    ENDS_THE_HISTORY,
    Finding,
    Kind,
    Together,
    bound_s,
    judge_call,
    judge_rebuild,
    judge_together,
)
from tests.lives.processes import RankProcess, StoreProcess, Timer, listen
from tests.lives.worlds import World

_SHOWN = 3
"""Findings of one kind; more tell nothing new."""


class HistoryOver(Exception):
    """A finding after which nothing more can be found out."""


class Play:
    """The processes of one history and what was found so far; a context manager that leaves none behind.

    Parameters
    ----------
    world : World
        The history's.
    verbose : bool
        Print lines as they come.

    Attributes
    ----------
    ranks : dict of int to RankProcess
        The present life of each rank, dead ones included.
    strangers : list of RankProcess
        Former lives that are still there, and another group's ranks.
    store_stopped, starved : bool
        During the last play: was the store's host stopped, and did a call lack a core for long?
    """

    def __init__(self, world: World, verbose: bool = False) -> None:
        self.world = world
        self.verbose = verbose
        self.ranks: dict[int, RankProcess] = {}
        self.strangers: list[RankProcess] = []
        self.findings: list[Finding] = []
        self.lines: list[str] = []
        self.step = "start"
        self.faults_acted = 0
        self.faults_armed = 0
        self.num_calls = 0
        self.store_stopped = False
        self.starved = False
        self._began_s = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="eplb-lives-")
        self._everyone: list[RankProcess] = []
        self._together: dict[RankProcess, tuple[Together, dict[int, Call]]] = {}
        self._limit_s: dict[RankProcess, float] = {}
        self.store = StoreProcess(Path(self._folder.name))

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in [*self._everyone, self.store]:
            process.end()
        self._folder.cleanup()

    # --- lives -------------------------------------------------------------------------------------------------------

    def start(self, ranks: list[int], label: str = "rank") -> list[RankProcess]:
        """Start processes, one for each of some ranks."""
        started = []
        for rank in ranks:
            lives = sum(each.label.startswith(f"{label} {rank}") for each in self._everyone)
            name = f"{label} {rank}" + (f" life {lives + 1}" if lives else "")
            started.append(RankProcess(self.world, rank, name, self.store.port, Path(self._folder.name)))
            self._everyone.append(started[-1])
        for process in started:
            process.await_start()
        return started

    def living(self) -> list[RankProcess]:
        """Return the present lives that are not over, by rank."""
        return [self.ranks[rank] for rank in sorted(self.ranks) if not self.ranks[rank].gone]

    def free(self) -> list[RankProcess]:
        """Return those that have a communicator and wait for a command."""
        return [process for process in self.living() if process.free and process.built]

    def end(self, process: RankProcess) -> None:
        """Kill one, and wait until it is gone."""
        process.kill()
        process.exit_code(10.0)
        process.gone, process.built, process.stopped, process.running = True, False, False, None

    # --- one play ----------------------------------------------------------------------------------------------------

    def act(
        self,
        commands: Mapping[RankProcess, Command],
        moments: list[tuple[float, Callable[[], None]]] | None = None,
        *,
        together: Together | None = None,
        rebuilding: Mapping[int, list[int]] | None = None,
        limit_s: float = 0.0,
    ) -> dict[RankProcess, list[Call]]:
        """Let processes act at once, and hear all that run until they are done; then look at everyone's bytes.

        Parameters
        ----------
        commands : mapping of RankProcess to Command
            Who does what.
        moments : list of (float, callable)
            Seconds from now, and what to do then.
        together : Together or None
            These commands are one rearrangement, entered with one placement in one epoch.
        rebuilding : mapping of int to list of int or None
            These commands rebuild; by rank, with whom.
        limit_s : float
            The limit that the calls are given, if they are.

        Returns
        -------
        dict
            The calls of those that are done.
        """
        began = time.monotonic()
        ends: dict[int, Call] = {}
        for process, command in commands.items():
            self._limit_s[process] = limit_s
            if together is not None:
                self._together[process] = (together, ends)
            if command.fault is not None:
                self.faults_armed += 1
            process.tell(command)
        done: dict[RankProcess, list[Call]] = {}

        def finished(process: RankProcess) -> None:
            done[process] = process.calls
            self._judge(process)

        timers = [Timer(began + at_s, what) for at_s, what in moments or ()]
        listen(self._everyone, timers, finished=finished, died=self._died, late=self._late)
        if rebuilding is not None and not self.store_stopped:
            now = {process.rank: calls[-1] for process, calls in done.items() if process in commands and calls}
            for finding in judge_rebuild(self.step, rebuilding, now):
                self.find(finding)
        self.store_stopped = self.store.stopped
        self.starved = any(call.starved for calls in done.values() for call in calls)
        self._look_at_everyone()
        return {process: calls for process, calls in done.items() if process in commands}

    def find(self, finding: Finding) -> None:
        """Note a finding, once."""
        if finding in self.findings or sum(each.kind is finding.kind for each in self.findings) >= _SHOWN:
            return
        self.findings.append(finding)
        self.say(f"FOUND {finding}")
        if finding.kind in ENDS_THE_HISTORY:
            raise HistoryOver

    def say(self, line: str) -> None:
        """Add to the history."""
        line = f"{time.monotonic() - self._began_s:6.2f}  {line}"
        self.lines.append(line)
        if self.verbose:
            print(line, flush=True)

    # --- what they hear ----------------------------------------------------------------------------------------------

    def _judge(self, process: RankProcess) -> None:
        calls = process.calls
        for call in calls:
            if call.name != "nothing":
                self.num_calls += 1
                self.say(f"  {process.label}: {call}")
            process.invalid = call.invalid
            if call.collective:
                process.fresh = False
                process.open = call.ok and call.name.startswith(("begin", "stage", "commit"))
            if call.placement is not None:
                process.held = call.placement
        self.faults_acted += any(call.acted for call in calls)
        where = f"{self.step}, {process.label}"
        entry = self._together.pop(process, None)
        for call in calls:
            for finding in judge_call(self.world, process, call, where, self._limit_s.get(process, 0.0)):
                self.find(finding)
        if entry is not None and calls:
            together, ends = entry
            ends[process.rank] = calls[-1]
            for finding in judge_together(together, ends):
                self.find(finding)

    def _died(self, process: RankProcess) -> None:
        self._together.pop(process, None)
        code = process.exit_code(10.0)
        process.built = False
        self.say(f"  {process.label}: ended with exit code {code}")
        if not process.condemned or code not in (0, -9):
            self.find(Finding(Kind.CRASH, f"{self.step}, {process.label}", f"exit code {code}\n{process.tail()}"))

    def _late(self, process: RankProcess) -> None:
        text = f"{process.busy_s():.1f} s in {process.running}; it is inside:\n{process.stacks()}"
        process.kill()
        self.find(Finding(Kind.LATE, f"{self.step}, {process.label}", text))

    def _look_at_everyone(self) -> None:
        everyone = [process for process in self._everyone if process.free and process.version >= 0]
        for process in everyone:
            process.tell(Command("check", bound_s=bound_s(self.world)))
        listen(self._everyone, [], finished=self._judge, died=self._died, late=self._late)
