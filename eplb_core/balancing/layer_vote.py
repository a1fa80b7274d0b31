"""A rank's part in the vote about one landed layer: landed, ready, promise, decision, one operation at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eplb_core.balancing.promise import Operation, Outcome, PromiseBook
from eplb_core.errors import EplbError, MetadataError


class LayerVote:
    """One rank's part in deciding about one layer that has landed here; driven by the worker.

    ``while (operation := vote.operation()) is not None: vote.take(execute(operation))``. A driver that finds a reason
    to give up, in a pause, calls `fail` and goes on.

    Parameters
    ----------
    book : PromiseBook
        Promises and steps of this rank.
    layer : int
        Its name in the book.
    rank : int
        This one.
    members : sequence of int
        The ranks that vote, ascending.
    landed : object
        What this rank's landed ballot says.
    """

    def __init__(self, book: PromiseBook, layer: int, rank: int, members: Sequence[int], landed: Any = None) -> None:
        self.book = book
        self.layer = layer
        self.rank = rank
        self.members = tuple(members)
        self.phase = "land"
        self.promised: int | None = None
        self.outcome: Outcome | None = None
        self._landed = landed
        self._proposal: Outcome | None = None

    def operation(self) -> Operation | None:
        """Return what to do next; None when the outcome is known here."""
        return None if self.phase == "over" else getattr(self, f"_{self.phase}")()

    def take(self, result: Any) -> None:
        """Take the result of the operation, and move on."""
        getattr(self, f"_after_{self.phase}")(result)

    def fail(self, error: EplbError | None = None, *, fatal: bool = False) -> None:
        """Give up instead of pausing on: the next operation puts abort, and what stands is obeyed."""
        self._propose(Outcome(None, self.rank, error, fatal))

    # --- landed: nobody promises before everybody's rows are there ---------------------------------------------------

    def _land(self) -> Operation:
        return Operation("set", "landed", self._landed)

    def _after_land(self, result: object) -> None:
        self.phase = "count_landed"

    def _count_landed(self) -> Operation:
        return Operation("add", "landed")

    def _after_count_landed(self, count: int) -> None:
        self.phase = "compare" if count == len(self.members) else "look"

    def _compare(self) -> Operation:
        return Operation("read all", "landed")

    def _after_compare(self, ballots: Mapping[int, Any]) -> None:
        refusal = self.refusal(ballots)
        if refusal is None:
            self.phase = "ready"
        else:
            self._propose(refusal)

    def refusal(self, ballots: Mapping[int, Any]) -> Outcome | None:
        """Say why landed ballots do not fit together; the last to count asks."""
        return self._missing(ballots)

    def ready_value(self) -> Any:
        """Return what stands in *ready*, for all to read; anything but None."""
        return True

    def note_ready(self, value: Any) -> None:
        """Take note of what stands in *ready*."""

    def note_promises(self, promises: Mapping[int, int]) -> None:
        """Look at the promises of all; whoever decides asks."""

    def _ready(self) -> Operation:
        return Operation("set", "ready", self.ready_value())

    def _after_ready(self, result: object) -> None:
        self.phase = "promise"

    def _look(self) -> Operation:
        return Operation("read", "decision")

    def _after_look(self, outcome: Outcome | None) -> None:
        if outcome is None:
            self.phase = "look_ready"
        elif outcome.step is None:
            self._obey(outcome)
        else:
            problem = f"layer {self.layer} stands as decided without this rank's promise"
            raise MetadataError("EPLB-M005", peer=outcome.by, problem=problem)

    def _look_ready(self) -> Operation:
        return Operation("read", "ready")

    def _after_look_ready(self, ready: Any) -> None:
        if ready is not None:
            self.note_ready(ready)
        self.phase = "wait_ready" if ready is None else "promise"

    def _wait_ready(self) -> Operation:
        return Operation("pause", "ready")

    def _after_wait_ready(self, result: object) -> None:
        self.phase = "look"

    # --- promises: registered here before anybody can read them ------------------------------------------------------

    def _promise(self) -> Operation:
        return Operation("book")

    def _after_promise(self, result: object) -> None:
        self.promised = self.book.promise(self.layer)
        self.phase = "cast"

    def _cast(self) -> Operation:
        return Operation("set", "promise", self.promised)

    def _after_cast(self, result: object) -> None:
        self.phase = "count"

    def _count(self) -> Operation:
        return Operation("add", "promise")

    def _after_count(self, count: int) -> None:
        self.phase = "tally" if count == len(self.members) else "look_decision"

    def _tally(self) -> Operation:
        return Operation("read all", "promise")

    def _after_tally(self, promises: Mapping[int, int]) -> None:
        missing = self._missing(promises)
        if missing is None:
            self.note_promises(promises)
        self._propose(missing or Outcome(max(promises.values()), self.rank))

    def _missing(self, ballots: Mapping[int, Any]) -> Outcome | None:
        """Never go on with less than all ballots; cannot be while the store keeps its word."""
        missing = [rank for rank in self.members if rank not in ballots]
        if not missing:
            return None
        return Outcome(None, self.rank, MetadataError("EPLB-M005", peer=missing[0], problem="its ballot is missing"))

    # --- the decision ------------------------------------------------------------------------------------------------

    def _propose(self, outcome: Outcome) -> None:
        self._proposal = outcome
        self.phase = "decide"

    def _decide(self) -> Operation:
        return Operation("put", "decision", self._proposal)

    def _after_decide(self, stands: Outcome) -> None:
        self._obey(stands)

    def _look_decision(self) -> Operation:
        return Operation("read", "decision")

    def _after_look_decision(self, outcome: Outcome | None) -> None:
        if outcome is None:
            self.phase = "wait_decision"
        else:
            self._obey(outcome)

    def _wait_decision(self) -> Operation:
        return Operation("pause", "decision")

    def _after_wait_decision(self, result: object) -> None:
        self.phase = "look_decision"

    def _obey(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.phase = "learn"

    def _learn(self) -> Operation:
        return Operation("book")

    def _after_learn(self, result: object) -> None:
        if self.outcome is not None:
            self.book.learn(self.layer, self.outcome)
        self.phase = "over"
