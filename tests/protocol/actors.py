"""Who acts in a walk, and where it is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from eplb_core.voting.operations import Operation, Refusal
from tests.protocol.store import Contents

M = TypeVar("M", bound=Hashable)

Lives = tuple[int, ...]
"""Of every actor the number of its process, counted from 1."""


@dataclass(frozen=True)
class Begin(Generic[M]):
    """An actor goes on with the protocol that its memory stands for."""

    memory: M


@dataclass(frozen=True)
class End(Generic[M]):
    """An actor does nothing more, and why."""

    why: str
    memory: M
    detail: Hashable = None


class Actor(Generic[M]):
    """A rank that runs one protocol after another; what it keeps from each to the next is a value, its memory."""

    refusal: Refusal | None = None
    """With which its pauses may give up."""

    def start(self, memory: M) -> Any:
        """Start the protocol; the steps of what is returned are in its `steps`."""
        raise NotImplementedError

    def again(self, memory: M) -> tuple[Any, Sequence[Any]]:
        """Start the protocol for a memory that `anew` made, and return the answers that lead to where it was made."""
        raise NotImplementedError

    def anew(self, memory: M, run: Any) -> Begin[M] | End[M] | None:
        """Return a new memory where the protocol has just begun from its beginning, so that only this memory counts."""
        return None

    def ended(self, memory: M, run: Any, result: object, late: bool) -> Begin[M] | End[M]:
        """Say what comes after a protocol that returned or raised this; late: it had waited to its limit."""
        raise NotImplementedError

    def crashed(self, memory: M) -> Begin[M] | End[M]:
        """Say what comes after the death of its process."""
        raise NotImplementedError

    def resumed(self, end: End[M], others: Sequence[Local]) -> M | None:
        """Say whether one that has ended has a reason to go on, from where all are."""
        return None

    def life(self, memory: M) -> int:
        return 1

    def owns(self, key: str) -> bool:
        """Does nobody else ever write this key?"""
        return False

    def note(self, memory: M, run: Any, operation: Operation) -> tuple[str, bytes] | None:
        """Return what the walk shall add to a key of its own, for `judge`, when this operation is done."""
        return None

    def judge(self, run: Any, result: object, contents: Contents) -> str | None:
        """Say what is wrong with how a protocol has ended, or begun anew (then without a result)."""
        return None

    def living(self, lives: Lives) -> AbstractContextManager[None]:
        """Return a context in which the processes of these lives are there, and no others."""
        return nullcontext()


class Local:
    """Where one actor is: in a protocol, by the answers that it got since its memory was made; or at its end."""

    __slots__ = (
        "actor",
        "again",
        "answers",
        "end",
        "late",
        "memory",
        "next",
        "note",
        "operation",
        "parts",
        "patience",
        "place",
        "read",
        "waiting",
    )

    def __init__(
        self, actor: Actor[Any], memory: Any, again: bool = False, answers: Sequence[tuple[Any, Lives]] = ()
    ) -> None:
        self.actor = actor
        self.memory = memory
        self.again = again
        """Has the protocol begun anew with this memory?"""
        self.answers = answers
        self.end: End[Any] | None = None
        self.operation: Operation | None = None
        """What it asks for."""
        self.place: tuple[int, ...] = ()
        """Which instruction of the protocol asks."""
        self.note: tuple[str, bytes] | None = None
        self.late = False
        """Has it waited to its limit?"""
        self.read: tuple[bytes | None, ...] = ()
        """Values of the first keys of the `Get` that it asks for."""
        self.waiting: Local = self
        """Where the poll began that it is in."""
        self.patience: Sequence[tuple[Any, Lives]] | None = None
        """The answers after which it has paused, where it may give up."""
        self.next: dict[Any, tuple[Local, Any, object]] = {}
        """By answer; with the run and its result where `judge` has something to say."""
        self.parts: dict[Any, Local] = {}
        """The same place with some keys read, or with leave to give up; all of them share this and `next`."""

    def part(self, read: tuple[bytes | None, ...], name: Hashable = None) -> Local:
        """Return the same place with these values read."""
        name = read if name is None else name
        part = self.parts.get(name)
        if part is None:
            part = self.parts[name] = Local(self.actor, self.memory, self.again, self.answers)
            part.operation, part.place, part.waiting, part.late = self.operation, self.place, self.waiting, self.late
            part.next, part.parts, part.read = self.next, self.parts, read
        return part
