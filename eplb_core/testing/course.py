"""A failed run of ranks: which failure of which rank is shown for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from eplb_core.testing.expectation import PREFIX, NotReached, Unmet

_NOT_REACHED = {
    "not reached": "what this builds on failed before it could be checked",
    "raised": "the backend raised before this could be checked",
    "died": "a rank died before this could be checked",
    "stuck": "a rank did not come back before this could be checked",
    "silent": "a rank did not end, so this could not be checked",
    "unheard": "ranks waited for each other, so this could not be checked",
}


class Course:
    """The course of a run: which ranks failed and how, and which rank is in which call since when."""

    def __init__(self, timeout_s: float) -> None:
        self.failures: dict[int, tuple[str, str]] = {}
        self._timeout_s = timeout_s
        self._inside: dict[int, tuple[str, bool, float]] = {}

    def goes(self, rank: int, where: tuple[str, bool] | None) -> None:
        """Note that a rank went into a call, or came out of it."""
        if where is None:
            self._inside.pop(rank, None)
        else:
            self._inside[rank] = (*where, time.monotonic())

    def explained_by(self, silent: Sequence[int]) -> bool:
        """Does a rank that does not come back from a call explain the silence of all others?"""
        unheard = bool(self.failures) and all(kind == "unheard" for kind, _ in self.failures.values())
        return unheard and any(rank in self._inside for rank in silent)

    def verdict(self, silent: Sequence[int]) -> Unmet | NotReached:
        """Return the error to raise; ranks that only heard nothing, or did not end, are named when nobody says more."""
        texts: dict[str, dict[str, list[int]]] = {}
        for rank, (kind, text) in sorted(self.failures.items()):
            call, judged, _ = self._inside.get(rank, ("", False, 0.0))
            died = f"{text}, in {call}" if kind == "died" and call else text
            texts.setdefault("unmet" if kind == "died" and judged else kind, {}).setdefault(died, []).append(rank)
        for rank in silent:
            if rank in self._inside:
                call, judged, since = self._inside[rank]
                text = f"is still in {call} after {time.monotonic() - since:.0f} s"
                texts.setdefault("unmet" if judged else "stuck", {}).setdefault(text, []).append(rank)
            else:
                text = f"did not end within {self._timeout_s:.0f} s"
                texts.setdefault("silent", {}).setdefault(text, []).append(rank)
        if "unmet" in texts:
            return Unmet(_by_rank(texts["unmet"], texts.get("raised", {})))
        for kind, why in _NOT_REACHED.items():
            if kind in texts:
                return NotReached(f"{PREFIX}{why}\n{_by_rank(texts[kind])}")
        raise ValueError(f"no rank failed: {self.failures}, {silent}")


def _by_rank(*groups: Mapping[str, Sequence[int]]) -> str:
    lines = []
    for group in groups:
        for text, ranks in group.items():
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            lines.append(f"{who} {text}" if text.startswith(("is still in", "did not end")) else f"{who}: {text}")
    return "\n".join(lines)
