"""The figures: what serving cost while experts changed places, and what it costs while they stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving import Run
from traffic import STEPS_OF_A_BATCH

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Figures:
    """Of all runs of one kind, over all ranks.

    Parameters
    ----------
    step_s : ndarray, float64
        Forward steps as rank 0 saw them; an all-to-all in every layer keeps the ranks together.
    moving_s : ndarray, float64
        Those in which a rearrangement was under way.
    held_s : ndarray, float64
        How long `LoadBalancer.step` held an engine's thread, on the rank where it was longest.
    record_s, idle_s : ndarray, float64
        How long rank 0 took for the calls of `record` in a step, and for `step` where nothing was under way.
    tokens_per_s : float
        Of all ranks.
    balancedness : float
        Mean over maximum of the tokens of ranks, averaged over layers and time.
    commits, nbytes_moved : int
        Layers that were switched, and bytes of the experts that changed places by it.
    """

    step_s: Floats
    moving_s: Floats
    held_s: Floats
    record_s: Floats
    idle_s: Floats
    tokens_per_s: float
    balancedness: float
    commits: int
    nbytes_moved: int


def figures_of(rounds: Sequence[Sequence[Run]]) -> Figures:
    """Sum up rounds, each given as the runs of all ranks."""
    first = [runs[0] for runs in rounds]
    step_s = np.concatenate([run.step_s for run in first])
    moving = np.concatenate([np.array(run.moving, bool) for run in first])
    return Figures(
        step_s=step_s,
        moving_s=step_s[: len(moving)][moving],
        held_s=np.concatenate([np.max([run.held_s for run in runs], axis=0) for runs in rounds]),
        record_s=np.concatenate([run.record_s for run in first]),
        idle_s=np.concatenate([run.held_s for run in first])[~moving],
        tokens_per_s=sum(run.tokens for runs in rounds for run in runs) / float(step_s.sum()),
        balancedness=float(np.mean([_balancedness(np.sum([run.load for run in runs], axis=0)) for runs in rounds])),
        commits=sum(len(layers) for run in first for layers in run.committed.values()),
        nbytes_moved=sum(run.nbytes_moved for run in first),
    )


def _balancedness(load: npt.NDArray[np.int64]) -> float:
    """Of [steps, layers, ranks], in pieces as long as a batch: single steps have few tokens."""
    pieces = [load[begin : begin + STEPS_OF_A_BATCH].sum(axis=0) for begin in range(0, len(load), STEPS_OF_A_BATCH)]
    return float(np.mean([piece.mean(axis=1) / piece.max(axis=1).clip(1) for piece in pieces]))


def lines(still: Figures, moving: Figures) -> list[str]:
    """Return what is printed."""
    cost = (
        f"step time, moving over staying: median {_ratio(moving.step_s, still.step_s, 50)}, 99th percentile "
        f"{_ratio(moving.step_s, still.step_s, 99)}; only the {len(moving.moving_s)} steps with a rearrangement under "
        f"way: {_ratio(moving.moving_s, still.step_s, 50)} and {_ratio(moving.moving_s, still.step_s, 99)}"
    )
    held = (
        f"engine's thread held by step(): longest {moving.held_s.max() * 1e3:.1f} ms; with nothing under way median "
        f"{_median_us(moving.idle_s)}; by record() of all layers: median {_median_us(moving.record_s)}"
    )
    return [_serving("experts stay", still), _serving("experts move", moving), cost, held]


def _serving(name: str, figures: Figures) -> str:
    moved = f", {figures.commits} layers rearranged, {figures.nbytes_moved / 1e6:.0f} MB" if figures.commits else ""
    median, late = np.percentile(figures.step_s, (50, 99)) * 1e3
    return (
        f"{name}: {len(figures.step_s)} steps, {figures.tokens_per_s:.0f} tokens/s, step time median {median:.1f} ms, "
        f"99th percentile {late:.1f} ms, balancedness {figures.balancedness:.3f}{moved}"
    )


def _ratio(one: Floats, other: Floats, percentile: float) -> str:
    return f"{np.percentile(one, percentile) / np.percentile(other, percentile):.2f}" if len(one) else "-"


def _median_us(seconds: Floats) -> str:
    return f"{np.median(seconds) * 1e6:.0f} us" if len(seconds) else "-"
