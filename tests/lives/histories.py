"""Seeded random histories of a job: kills, stops, retries, rebuilds, restarts, reloads; no row differs from a report.

``python -m tests.lives.histories --backend torch_gloo --seeds 0:100`` runs them and shows those that fail.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.lives.ending import come_to_an_end
from tests.lives.oracle import Finding
from tests.lives.play import HistoryOver, Play
from tests.lives.steps import Steps
from tests.lives.worlds import World, draw_world

BACKENDS = ("torch_gloo", "nixl")
_STEPS_LIMIT_S = 12.0


@dataclass(frozen=True)
class History:
    """One history, as it went.

    Parameters
    ----------
    backend, seed
        From what it follows.
    world : World
        Ranks and weights.
    findings : tuple of Finding
        What did not hold; none when it passed.
    lines : tuple of str
        What happened.
    seconds : float
        How long it took.
    num_calls, faults_armed, faults_acted : int
        Calls that were judged; faults that were to be injected, and that were.
    """

    backend: str
    seed: int
    world: World
    findings: tuple[Finding, ...]
    lines: tuple[str, ...]
    seconds: float
    num_calls: int
    faults_armed: int
    faults_acted: int

    def __str__(self) -> str:
        kinds = sorted({finding.kind.value for finding in self.findings})
        lines = [f"{self.backend} seed {self.seed}: {', '.join(kinds) or 'passed'}", f"  {self.world}"]
        return "\n".join([*lines, *(f"  {line}" for line in self.lines)])


def run_history(backend: str, seed: int, verbose: bool = False) -> History:
    """Run the history of a seed.

    Parameters
    ----------
    backend : str
        Over which.
    seed : int
        Equal ones decide the same, as far as the machine's timing lets them.
    verbose : bool
        Print what happens as it happens.

    Returns
    -------
    History
    """
    name = f"{backend}/{seed}"
    world = draw_world(backend, name)
    began = time.monotonic()
    with Play(world, verbose) as play:
        steps = Steps(play, name)
        try:
            steps.begin()
            for number in range(steps.rng.randint(2, 7)):
                steps.step(number)
                if time.monotonic() - began > _STEPS_LIMIT_S:
                    break
            come_to_an_end(steps)
        except HistoryOver:
            pass
    return History(
        backend,
        seed,
        world,
        tuple(play.findings),
        tuple(play.lines),
        time.monotonic() - began,
        play.num_calls,
        play.faults_armed,
        play.faults_acted,
    )


def run_histories(backend: str, seeds: Iterable[int], jobs: int = 3) -> Iterator[History]:
    """Run the histories of several seeds, some at a time: they wait more than they work.

    Parameters
    ----------
    backend : str
        Over which.
    seeds : iterable of int
        Which.
    jobs : int
        How many at a time.

    Yields
    ------
    History
        In the order of the seeds.
    """
    with ThreadPoolExecutor(jobs, thread_name_prefix="history") as pool:
        yield from pool.map(lambda seed: run_history(backend, seed), seeds)


def main(arguments: list[str] | None = None) -> int:
    """Run seeds from the command line; 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lives.histories", description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: all")
    parser.add_argument("--seeds", default="0:20", help="A, or A:B for those from A to B - 1, or several with commas")
    parser.add_argument("--jobs", type=int, default=3, help="histories at a time")
    parser.add_argument("--verbose", action="store_true", help="print every failing history; with one seed, live")
    options = parser.parse_args(arguments)
    seeds = _seeds(options.seeds)
    failed: dict[str, list[str]] = defaultdict(list)
    began, histories = time.monotonic(), []
    for backend in options.backend or BACKENDS:
        if len(seeds) == 1:
            found: Iterable[History] = [run_history(backend, seeds[0], options.verbose)]
        else:
            found = run_histories(backend, seeds, options.jobs)
        for history in found:
            histories.append(history)
            for kind in sorted({finding.kind.value for finding in history.findings}):
                failed[f"{backend}: {kind}"].append(str(history.seed))
            if history.findings:
                shown = str(history) if options.verbose and len(seeds) > 1 else str(history).splitlines()[0]
                print(shown, flush=True)
    seconds = time.monotonic() - began
    bad = sum(bool(history.findings) for history in histories)
    print(
        f"{len(histories)} histories, {bad} failed, {sum(each.num_calls for each in histories)} calls judged, "
        f"{sum(each.faults_acted for each in histories)} of {sum(each.faults_armed for each in histories)} injected "
        f"faults acted, {seconds:.1f} s, {len(histories) / seconds:.2f} seeds/s"
    )
    for kind, which in sorted(failed.items()):
        print(f"  {len(which):4}  {kind}: seeds {', '.join(which[:12])}{' ...' if len(which) > 12 else ''}")
    return int(bad > 0)


def _seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        seeds.extend(range(int(first), int(last) if last else int(first) + 1))
    return seeds


if __name__ == "__main__":
    # torch looks up the name of every address that it connects to; see conftest.py.
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    threading.stack_size(1 << 20)
    sys.exit(main())
