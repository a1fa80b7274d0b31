"""What must hold of every call, whatever the history: the findings that make a history fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np

from tests.lives.calls import Call
from tests.lives.processes import RankProcess
from tests.lives.worlds import Map, World


class Kind(Enum):
    """What can be wrong; the value says it."""

    WRONG_AFTER_SUCCESS = "wrong bytes after success"
    WRONG_AFTER_ERROR = "wrong bytes after an error"
    WRONG_WHILE_IDLE = "wrong bytes while idle"
    EARLY = "the report counts a decided layer as committed"
    UNTYPED = "an untyped error left the API"
    NO_REPORT = "an error without a report"
    LATE = "a call past its bound"
    CRASH = "a process ended by itself"
    MAPS_DIFFER = "ranks report different placements after one call"
    NOT_NEW = "success, and the report is not the new placement"
    SOME_ONLY = "success on some ranks, another placement on others"
    REBUILT_ALONE = "rebuild succeeded on some members only"
    EPOCHS_DIFFER = "a rebuild that succeeded in different epochs"
    IN_DOUBT = "layers in doubt after a rebuild"
    CLEAN_FAILED = "a healthy rearrangement failed"
    UNEVEN = "after a failure, usable on some ranks only"
    NOT_RELOADED = "reloaded() refused"
    NEVER_MET = "ranks never met again"
    NEVER_MOVED = "ranks met, and no rearrangement succeeded"
    NOT_CLOSED = "close() did not end in peace"


# The weights, or what is known of them, are no more what the report says: nothing that follows proves anything.
ENDS_THE_HISTORY = {
    Kind.WRONG_AFTER_SUCCESS,
    Kind.WRONG_AFTER_ERROR,
    Kind.WRONG_WHILE_IDLE,
    Kind.LATE,
    Kind.CRASH,
    Kind.UNTYPED,
}


@dataclass(frozen=True)
class Finding:
    """One thing that does not hold.

    Parameters
    ----------
    kind : Kind
        What.
    where : str
        Step and rank.
    text : str
        The evidence.
    """

    kind: Kind
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.where}): {self.text}"


def bound_s(world: World, limit_s: float = 0.0) -> float:
    """Return how long one call may last: a few waits of `timeout_s` each, what a loaded machine adds, a limit given."""
    return 4 * world.timeout_s + 2 * limit_s + 10


def judge_call(world: World, process: RankProcess, call: Call, where: str, limit_s: float) -> list[Finding]:
    """Judge one call of one rank by itself."""
    found = []

    def add(kind: Kind, text: str) -> None:
        found.append(Finding(kind, where, f"{call}\n{text}"))

    if call.wrong:
        idle = call.name == "nothing"
        kind = Kind.WRONG_WHILE_IDLE if idle else Kind.WRONG_AFTER_SUCCESS if call.ok else Kind.WRONG_AFTER_ERROR
        add(kind, "\n".join(call.wrong))
    if call.early:
        add(Kind.EARLY, "\n".join(call.early))
    if call.outcome == "untyped":
        add(Kind.UNTYPED, call.text)
    if call.outcome == "error":
        if not call.reported and call.collective:
            add(Kind.NO_REPORT, call.text)
        if call.name == "reloaded":
            add(Kind.NOT_RELOADED, call.text)
        if call.name.startswith("close") and not call.invalid:
            add(Kind.NOT_CLOSED, call.text)
    seconds = call.seconds - process.stopped_s(call.began_s, call.ended_s)
    if seconds > bound_s(world, limit_s):
        add(Kind.LATE, f"{seconds:.1f} s, the bound is {bound_s(world, limit_s):.1f} s")
    return found


@dataclass(frozen=True)
class Together:
    """One rearrangement, as ranks that held the same placement entered it.

    Parameters
    ----------
    where : str
        Which step.
    new : Mapping[int, Map]
        By rank, where to.
    """

    where: str
    new: Mapping[int, Map]


def judge_together(together: Together, ends: Mapping[int, Call]) -> list[Finding]:
    """Judge what a rearrangement did on the ranks that came back from it: one outcome, layer by layer.

    Layers that a rank is in doubt about, or that its host has yet to commit, are its own affair; a rank whose commit
    failed says nothing.
    """
    found = []
    known = {rank: call for rank, call in ends.items() if call.placement is not None and not call.invalid}
    for rank, call in known.items():
        if call.whole and not np.array_equal(_placement(call), together.new[rank]):
            found.append(Finding(Kind.NOT_NEW, f"{together.where}, rank {rank}", str(call)))
    ranks = sorted(known)
    for one, other in pairwise(ranks):
        a, b = known[one], known[other]
        skipped = {*a.doubtful, *b.doubtful, *a.decided, *b.decided}
        layers = np.flatnonzero((_placement(a) != _placement(b)).any(axis=1)).tolist()
        layers = [layer for layer in layers if layer not in skipped]
        if layers:
            kind = Kind.SOME_ONLY if a.whole or b.whole else Kind.MAPS_DIFFER
            text = f"layers {layers} differ\n  rank {one}: {a}\n  rank {other}: {b}"
            found.append(Finding(kind, together.where, text))
    return found


def judge_rebuild(where: str, members: Mapping[int, list[int]], ends: Mapping[int, Call]) -> list[Finding]:
    """Judge rebuilds: one that succeeds does so on every member that lives, in one epoch, with one placement."""
    found = []
    for rank, call in ends.items():
        if not call.ok:
            continue
        if call.doubtful:
            found.append(Finding(Kind.IN_DOUBT, f"{where}, rank {rank}", str(call)))
        for other in members[rank]:
            end = ends.get(other)
            if other == rank or end is None or members[other] != members[rank]:
                continue
            text = f"\n  rank {rank}: {call}\n  rank {other}: {end}"
            if not end.ok:
                found.append(Finding(Kind.REBUILT_ALONE, where, text))
            elif other > rank and end.epoch != call.epoch:
                found.append(Finding(Kind.EPOCHS_DIFFER, where, text))
            elif other > rank and not np.array_equal(_placement(call), _placement(end)):
                found.append(Finding(Kind.MAPS_DIFFER, where, text))
    return found


def _placement(call: Call) -> Map:
    assert call.placement is not None
    return call.placement
