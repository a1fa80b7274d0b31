"""The promise protocol: how a layer's commit gets a forward step that no rank can pass without knowing it.

One layer on one rank is a `layer_vote.LayerVote`, driven by the worker; one forward step is an
`engine_step.EngineStep`, driven by the engine's thread; both share a `PromiseBook`. They name their operations one at a
time and are told the results, so the code that decides is the same over a real store, in threads, and under a scheduler
that tries every order.

The protocol, for a layer that has landed on this rank:

1. Set a *landed* ballot, then count it. Whoever counts last has every ballot, and sets *ready*.
2. When ready stands, **promise** a step P under the lock: "my engine will not leave ``step()`` number P before it knows
   the decision". Only then set the promise in the store, and count it.
3. Whoever counts last reads every promise and puts, by compare-and-set, the decision: commit at S = max P.
4. Anyone may instead put abort, by the same compare-and-set; everyone obeys what stands.

**No rank passes S without knowing it.** Let S stand in a decision to commit, and r be any member. S was written by one
who read the promises of all members, so r's P is among them and P <= S. It was read after it was set, and r set it
after it had registered it in its book (2). P is more than the step at which r registered it, and both are one critical
section, so ``step()`` number P had not begun then, for it begins by raising the number under the same lock. It does not
return while a promise of at most its number is registered and undecided (`PromiseBook.look`), and nothing but the
decision takes a promise away (`PromiseBook.learn`). So when r leaves step P it knows what stands, which is S, for the
decision key is only ever put once. And P <= S: it knows S before it leaves step S, and commits in that step, for what
is due is asked after the wait. A rank that dies or gives up puts abort, or finds that commit stands, and obeys.

**No rank waits for a transfer**: nobody promises before all have landed (1), so what an engine waits for at its P is a
few operations on the store, never rows.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from eplb_core.errors import EplbError, TransferError

MARGIN = 3
"""Steps from registering a promise to its P: whole steps that go by from ready to everyone knowing the decision, one
more, and how far a host's engine runs ahead of its device. Too few cost a wait at P, never a wrong commit."""


@dataclass(frozen=True)
class Outcome:
    """What stands in the decision of a layer.

    Parameters
    ----------
    step : int or None
        S, the forward step at which every rank commits; None is abort.
    by : int
        The rank that wrote it.
    error : EplbError or None
        Why it was aborted.
    fatal : bool
        Members are gone or stalled: nobody is asked whether it drained.
    """

    step: int | None
    by: int
    error: EplbError | None = None
    fatal: bool = False


class Operation(NamedTuple):
    """One atomic operation: on the store, on the book under its lock, or a pause.

    Parameters
    ----------
    verb : {"set", "add", "read", "read all", "put", "book", "pause"}
        "set" this rank's own value; "add" one and return the count; "read" a value or None; "read all" members' values
        by rank, missing ones left out; "put" unless there is a value and return what stands; "book" touches this
        process alone; "pause" lets time pass.
    topic : {"landed", "ready", "promise", "decision", ""}
        What it is about: the layer has one of each, or one per rank.
    value : object
        For "set" and "put".
    """

    verb: Literal["set", "add", "read", "read all", "put", "book", "pause"]
    topic: Literal["landed", "ready", "promise", "decision", ""] = ""
    value: Any = None


class PromiseBook:
    """What the engine's thread and the worker of one rank share; every method takes the lock.

    Parameters
    ----------
    margin : int
        See `MARGIN`; at least 1.
    """

    def __init__(self, margin: int = MARGIN) -> None:
        if margin < 1:
            raise ValueError(f"margin={margin}: a promise of the step at hand can be broken before it is made")
        self.changed = threading.Condition()
        self.margin = margin
        self.step = 0
        self.promised: dict[int, int] = {}
        """Undecided layers, and the P that this rank promised."""
        self.due: dict[int, int] = {}
        """Layers to be committed, and their S."""
        self.known: dict[int, Outcome] = {}
        """Decisions of the rearrangement at hand."""
        self.dropping = False
        """Is what is decided from now on not to be committed?"""
        self._unwanted: set[int] = set()
        """Layers whose commit was learned while dropping; whoever staged them discards them."""

    def begin_step(self, number: int) -> None:
        """The engine enters ``step()``, for the first time or again, with the number after the last."""
        with self.changed:
            self.step = number

    def promise(self, layer: int) -> int:
        """Register a promise and return its P: from now on the engine stops there until the layer is decided."""
        with self.changed:
            # Not before what is due: an engine that stopped at an earlier P could keep the others from an S of theirs,
            # and with it from the commit that frees the memory which their workers need to go on.
            promised = max([self.step + self.margin, *self.due.values()])
            self.promised[layer] = promised
            return promised

    def learn(self, layer: int, outcome: Outcome) -> None:
        """Take note of a decision and wake the engine that may wait for it; whoever knows first, the second is heard.

        Raises
        ------
        TransferError
            EPLB-T020: this rank's engine is past the step.
        """
        with self.changed:
            self.promised.pop(layer, None)
            if layer not in self.known:
                self.known[layer] = outcome
                if outcome.step is not None and self.dropping:
                    self._unwanted.add(layer)
                elif outcome.step is not None:
                    self.due[layer] = outcome.step
            self.changed.notify_all()
            self._check_due()

    def look(self) -> tuple[int | None, list[int]]:
        """Tell what the step at hand waits for, and else what is to be committed in it.

        Returns
        -------
        layer : int or None
            One that the step may not leave undecided, if there is one.
        due : list of int
            The layers to commit now, in the order of their decisions; none while one blocks. They stay due until
            `committed`, for the worker must not take a layer for committed while its copies are about to be made.

        Raises
        ------
        TransferError
            EPLB-T020: one was to be committed in an earlier step.
        """
        with self.changed:
            for layer, promised in self.promised.items():
                if promised <= self.step:
                    return layer, []
            self._check_due()
            return None, [layer for layer, step in self.due.items() if step == self.step]

    def committed(self, layer: int) -> None:
        """A layer's copies are enqueued; the worker that may wait for it wakes up."""
        with self.changed:
            self.due.pop(layer, None)
            self.changed.notify_all()

    def drop(self) -> list[int]:
        """Give up every layer whose step has not come, whether it is decided or will be; return those decided."""
        with self.changed:
            dropped = list(self.due)
            self.due.clear()
            self.dropping = True
            return dropped

    def take_unwanted(self, layer: int) -> bool:
        """Tell, once, whether a layer was decided while dropping: it was never due, so `drop` did not return it."""
        with self.changed:
            unwanted = layer in self._unwanted
            self._unwanted.discard(layer)
            return unwanted

    def forget(self) -> None:
        """A rearrangement is over, and its layers are committed or dropped."""
        with self.changed:
            self.known.clear()
            self._unwanted.clear()
            self.dropping = False

    def _check_due(self) -> None:
        for layer, step in self.due.items():
            if step < self.step:
                raise TransferError("EPLB-T020", layer=layer, due=step, step=self.step)
