"""The engine's part in the promise protocol: the end of one forward step, which waits for nothing but a promise."""

from __future__ import annotations

from typing import Any

from eplb_core.balancing.promise import Operation, Outcome, PromiseBook


class EngineStep:
    """The end of one forward step; driven by the engine's thread.

    Its operations are of three kinds: "book"; "pause", in which the driver waits for ``book.changed`` and answers
    whether to give up, for the limit is over or the worker is dead; "put" about `layer`, with the engine's **own**
    store client, for a worker that hangs may hold its own for ever.

    Parameters
    ----------
    book : PromiseBook
        Promises and steps of this rank.
    rank : int
        This one.

    Attributes
    ----------
    layer : int or None
        What it waits for, or has to settle.
    number : int or None
        Number of the step once it has begun, so that one that is interrupted is not counted twice.
    due : list of int
        What to commit before the step is left, once `operation` is None.
    """

    def __init__(self, book: PromiseBook, rank: int) -> None:
        self.book = book
        self.rank = rank
        self.phase = "enter"
        self.layer: int | None = None
        self.number: int | None = None
        self.due: list[int] = []
        self._stands: Outcome | None = None

    def operation(self) -> Operation | None:
        """Return what to do next; None when nothing keeps the engine here."""
        if self.phase == "over":
            return None
        if self.phase == "wait":
            return Operation("pause", "decision")
        if self.phase == "settle":
            return Operation("put", "decision", Outcome(None, self.rank))
        return Operation("book")

    def take(self, result: Any = None) -> None:
        """Take the result of the operation, and move on."""
        if self.phase == "enter":
            self.number = self.number or self.book.step + 1
            self.book.begin_step(self.number)
            self.phase = "look"
        elif self.phase == "look":
            self.layer, self.due = self.book.look()
            self.phase = "over" if self.layer is None else "wait"
        elif self.phase == "wait":
            self.phase = "settle" if result else "look"
        elif self.phase == "settle":
            self._stands, self.phase = result, "learn"
        elif self.layer is not None and self._stands is not None:
            self.book.learn(self.layer, self._stands)
            self.phase = "look"
