"""Every order in which the store operations of several actors can happen: what is reached, and from where the goal is not.

An actor goes through its protocol by the answers that it gets. Where that has led it (a `Local`) is worked out once, by
running the real generator, and used wherever several orders lead there. Three things keep the number of states finite
without leaving any order out:

- A poll that has found nothing is as if it had not been. The walk checks that the protocol then does stand where the
  poll began, and asks the same again.
- What an actor remembers from one round to the next is its memory (`Actor.round`), not how the round went.
- The keys of one `Get` are read one after another, as a client does when not all are there; to read at once a key that
  nobody else writes leaves nothing out.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, TypeVar

from eplb_core.voting.operations import Get, Operation, Pause, Refusal, Steps
from tests.protocol.store import Contents, perform

M = TypeVar("M", bound=Hashable)
Lives = tuple[int, ...]


@dataclass(frozen=True)
class Begin(Generic[M]):
    """What an actor does next: the protocol that its memory stands for, from its beginning."""

    memory: M


@dataclass(frozen=True)
class End(Generic[M]):
    """It does nothing more, and why."""

    why: str
    memory: M
    detail: Hashable = None


class Actor(Generic[M]):
    """Who acts in a walk; what it keeps from one protocol to the next is a value, its memory."""

    refusal: Refusal | None = None
    """With which its pauses may give up."""

    def start(self, memory: M) -> Any:
        """Start the protocol; what is returned has its steps in `steps`."""
        raise NotImplementedError

    def round(self, memory: M, run: Any) -> Begin[M] | End[M] | None:
        """Return a new memory where the protocol has just begun anew, so that only that memory still counts."""
        return None

    def again(self, memory: M) -> tuple[Any, Sequence[Any]]:
        """Start as `start`, for a memory of `round`, and say by which answers that point is reached."""
        raise NotImplementedError

    def ended(self, memory: M, run: Any, result: object) -> Begin[M] | End[M]:
        """Say what comes after a protocol that returned or raised this."""
        raise NotImplementedError

    def crashed(self, memory: M) -> Begin[M] | End[M]:
        """Say what comes after its process died."""
        raise NotImplementedError

    def resumes(self, end: End[M], locals_: Sequence[Local]) -> M | None:
        """Say whether an actor that has ended has a reason to go on, from where it and the others are."""
        return None

    def life(self, memory: M) -> int:
        """Return the number of its process."""
        return 1

    def owns(self, key: str) -> bool:
        """Does nobody else write this key?"""
        return False

    def mark(self, memory: M, run: Any, operation: Operation) -> tuple[str, bytes] | None:
        """Return what the walk shall note in the store for the judge, beside this operation."""
        return None

    def judge(self, run: Any, result: object, contents: Contents) -> str | None:
        """Say what is wrong with how a protocol ended or began anew."""
        return None

    def living(self, lives: Lives) -> Any:
        """Return a context in which the processes of these lives are there, and no others."""
        raise NotImplementedError


class Local:
    """Where one actor is."""

    __slots__ = (
        "actor", "answers", "begin", "end", "late", "next", "note", "operation", "parts", "patience", "place", "read", "waiting",
    )  # fmt: skip

    def __init__(self, actor: Actor, begin: Any, answers: tuple[tuple[Any, Lives], ...], again: bool) -> None:
        self.actor = actor
        self.begin = (begin, again)
        self.answers = answers
        self.operation: Operation | None = None
        self.end: End | None = None
        self.late = False
        """Has it waited to its limit in this round?"""
        self.place: tuple[int, ...] = ()
        self.read: tuple[bytes | None, ...] = ()
        self.note: tuple[str, bytes] | None = None
        self.next: dict[Any, tuple[Local, Any, object]] = {}
        """By answer; the run and its result where something ended or began anew."""
        self.parts: dict[Any, Local] = {}
        """The same with some keys read, or with leave to give up; all share this and `next`."""
        self.waiting: Local = self
        """Where the poll that it is in began."""
        self.patience: tuple[tuple[Any, Lives], ...] | None = None
        """The answers after which it paused, if it may give up here."""

    @property
    def memory(self) -> Any:
        return self.end.memory if self.end else self.begin[0]


State = tuple[Any, ...]
"""A `Local` for each actor, and the contents of the store."""


@dataclass
class Step:
    """One thing that can happen in a state."""

    text: str
    quiet: bool
    """No time-out, no crash."""
    state: State
    wrong: str | None


class Stored:
    """The contents of the store, the same object for the same contents."""

    __slots__ = ("contents", "next")

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.next: dict[Local, tuple[Any, Stored, str | None]] = {}


class Walk:
    """All states that actors can reach.

    Parameters
    ----------
    actors : sequence of Actor
        Who acts.
    memories : sequence
        What each begins with.
    contents : mapping
        What the store holds at first.
    crashes : int
        How often a process may die.
    """

    def __init__(self, actors: Sequence[Actor], memories: Sequence[Any], contents: Contents, crashes: int = 0) -> None:
        self.actors = tuple(actors)
        self.crashes = crashes
        self._begun: dict[Any, Local] = {}
        self._ended: dict[Any, Local] = {}
        self._stored: dict[frozenset[tuple[str, bytes]], Stored] = {}
        self._steps: dict[Any, list[tuple[str, bool, Local, Stored, str | None]]] = {}
        self._all_first = (1,) * len(self.actors)
        stored = self._store(contents)
        locals_ = [self._begin(actor, memory) for actor, memory in zip(self.actors, memories, strict=True)]
        lives = self._lives(locals_)
        self.first: State = (*(self._settled(local, stored, lives)[0] for local in locals_), stored)

    # --- exploring ---------------------------------------------------------------------------------------------------

    def explore(self, limit: int = 2_000_000) -> Found:
        """Go through all states, breadth first, up to the first in which something is wrong."""
        found = Found(self, [self.first], array("l", [-1]), {self.first: 0})
        todo = deque([0])
        while todo:
            at = todo.popleft()
            for step in self.steps(found.states[at]):
                place = found.numbers.get(step.state)
                if place is None:
                    place = found.numbers[step.state] = len(found.states)
                    found.states.append(step.state)
                    found.parents.append(at)
                    todo.append(place)
                if step.wrong is not None:
                    found.wrong = step.wrong
                    found.schedule = [*found.way(at), step.text]
                    return found
                if step.quiet:
                    found.sources.append(at)
                    found.targets.append(place)
            if len(found.states) > limit:
                raise RuntimeError(f"more than {limit} states")
        return found

    def steps(self, state: State) -> Iterator[Step]:
        """What can happen next."""
        *locals_, stored = state
        lives = self._lives(locals_)
        crashes = self.crashes and sum(lives) - len(lives) < self.crashes
        for seat, local in enumerate(locals_):
            if local.end is not None:
                memory = local.actor.resumes(local.end, locals_)
                if memory is not None:
                    after, wrong = self._settled(self._begin(local.actor, memory), stored, lives)
                    yield Step(f"{seat} goes on", True, (*state[:seat], after, *state[seat + 1 :]), wrong)
            key = (local, stored, lives, crashes)
            steps = self._steps.get(key)
            if steps is None:
                steps = self._steps[key] = list(self._of(seat, local, stored, lives, crashes))
            for text, quiet, after, stored_after, wrong in steps:
                yield Step(text, quiet, (*state[:seat], after, *state[seat + 1 : -1], stored_after), wrong)

    def _of(
        self, seat: int, local: Local, stored: Stored, lives: Lives, crashes: bool
    ) -> Iterator[tuple[str, bool, Local, Stored, str | None]]:
        actor, end = local.actor, local.end
        if end is not None:
            pass
        elif isinstance(local.operation, Get):
            after, wrong = self._read(local, stored, lives)
            yield f"{seat} reads {local.operation.keys[len(local.read)]}", True, after, stored, wrong
            if local.patience is not None and actor.refusal is not None:
                after, wrong = self._answered(local, actor.refusal, stored, lives, giving_up=True)
                yield f"{seat} has waited to its limit", False, after, stored, wrong
        else:
            operation = local.operation
            answer, stored_after, wrong = self._performed(local, operation, stored)
            after, wrong_after = self._answered(local, answer, stored_after, lives)
            yield f"{seat} {_text(operation, answer)}", True, after, stored_after, wrong or wrong_after
        if crashes and not (end is not None and end.why == "dead"):
            then = actor.crashed(local.memory)
            after = self._then(actor, then)
            lives_after = (*lives[:seat], actor.life(after.memory), *lives[seat + 1 :])
            after, wrong = self._settled(after, stored, lives_after)
            yield f"{seat} crashes", False, after, stored, wrong

    # --- one operation -----------------------------------------------------------------------------------------------

    def _read(self, local: Local, stored: Stored, lives: Lives) -> tuple[Local, str | None]:
        """Read the next key of a `Get`, and those after it that nobody else writes."""
        keys = local.operation.keys
        read = (*local.read, stored.contents.get(keys[len(local.read)]))
        while len(read) < len(keys) and local.actor.owns(keys[len(read)]):
            read = (*read, stored.contents.get(keys[len(read)]))
        if len(read) == len(keys):
            return self._answered(local, list(read), stored, lives)
        return self._partly(local, read), None

    def _partly(self, local: Local, read: tuple[bytes | None, ...]) -> Local:
        return local.parts.get(read) or _part(local, read)

    def _settled(self, local: Local, stored: Stored, lives: Lives) -> tuple[Local, str | None]:
        """Go on with reads of keys that nobody else writes."""
        if isinstance(local.operation, Get) and local.actor.owns(local.operation.keys[len(local.read)]):
            return self._read(local, stored, lives)
        return local, None

    def _performed(self, local: Local, operation: Any, stored: Stored) -> tuple[Any, Stored, str | None]:
        known = stored.next.get(local)
        if known is None:
            answer, contents = perform(operation, stored.contents)
            key, wrong = getattr(operation, "key", ""), None
            if key.endswith("/decision") and stored.contents.get(key, contents.get(key)) != contents.get(key):
                wrong = f"a decision that stood was changed: {key}"
            if local.note is not None:
                key, value = local.note
                contents = {**contents, key: contents.get(key, b"") + value}
            known = stored.next[local] = answer, self._store(contents), wrong
        return known

    def _answered(
        self, local: Local, answer: Any, stored: Stored, lives: Lives, *, giving_up: bool = False
    ) -> tuple[Local, str | None]:
        key = (tuple(answer) if isinstance(answer, list) else answer, lives, giving_up)
        known = local.next.get(key)
        wrong = None
        if known is None:
            known = local.next[key] = self._advanced(local, answer, lives, giving_up)
        after, run, result = known
        if run is not None:
            wrong = local.actor.judge(run, result, stored.contents)
        settled, wrong_after = self._settled(after, stored, lives)
        return settled, wrong or wrong_after

    # --- the protocol ------------------------------------------------------------------------------------------------

    def _run(self, local: Local, patient: bool = False) -> tuple[Any, Any]:
        """Bring a new run of the protocol to where an actor is."""
        actor, (memory, again) = local.actor, local.begin
        answers: Sequence[tuple[Any, Lives]] = (local.patience or ()) if patient else local.answers
        if again:
            run, before = actor.again(memory)
            answers = [*((answer, ()) for answer in before), *answers]
        else:
            run = actor.start(memory)
        operation = run.steps.send(None)
        for answer, lives in answers:
            with actor.living(lives):
                operation = run.steps.send(list(answer) if isinstance(answer, tuple) else answer)
        return run, operation

    def _advanced(self, local: Local, answer: Any, lives: Lives, giving_up: bool) -> tuple[Local, Any, object]:
        """Where an answer leads; and, where something can be judged, the run and its result."""
        actor, memory = local.actor, local.begin[0]
        run, operation = self._run(local, giving_up)
        before = (local.patience or ()) if giving_up else local.answers
        answers = (*before, (tuple(answer) if isinstance(answer, list) else answer, lives))
        try:
            with actor.living(lives):
                operation = run.steps.send(answer)
        except StopIteration as done:
            return self._then(actor, actor.ended(memory, run, done.value)), run, done.value
        except Exception as error:
            return self._then(actor, actor.ended(memory, run, error)), run, error
        anew = actor.round(memory, run)
        if anew is not None:
            return self._then(actor, anew, again=True), run, None
        if isinstance(operation, Pause):
            return self._paused(local, run, answers), None, None
        after = Local(actor, memory, answers, local.begin[1])
        after.operation, after.place = operation, _place(run.steps)
        after.late = local.late or giving_up
        after.note = actor.mark(memory, run, operation)
        if isinstance(local.operation, Get) and not giving_up:
            after.waiting = local.waiting
        return after, None, None

    def _paused(self, local: Local, run: Any, answers: tuple[tuple[Any, Lives], ...]) -> Local:
        """Where a poll that has found nothing leads: back to where it began, but now it may give up."""
        start = local.waiting
        operation = run.steps.send(None)
        if (operation, _place(run.steps)) != (start.operation, start.place):
            raise RuntimeError(f"after a pause {operation} is asked at {_place(run.steps)}, not {start.operation}")
        paused = start.parts.get("paused")
        if paused is None:
            paused = _part(start, (), "paused")
            paused.patience = answers
        return paused

    def _then(self, actor: Actor, then: Begin | End, *, again: bool = False) -> Local:
        return self._over(actor, then) if isinstance(then, End) else self._begin(actor, then.memory, again=again)

    def _begin(self, actor: Actor, memory: Any, *, again: bool = False) -> Local:
        local = self._begun.get((actor, memory, again))
        if local is None:
            local = self._begun[actor, memory, again] = Local(actor, memory, (), again)
            run, local.operation = self._run(local)
            local.place = _place(run.steps)
        return local

    def _over(self, actor: Actor, end: End) -> Local:
        local = self._ended.get((actor, end))
        if local is None:
            local = self._ended[actor, end] = Local(actor, end.memory, (), False)
            local.end = end
        return local

    def _store(self, contents: Contents) -> Stored:
        key = frozenset(contents.items())
        stored = self._stored.get(key)
        if stored is None:
            stored = self._stored[key] = Stored(contents)
        return stored

    def _lives(self, locals_: Sequence[Local]) -> Lives:
        if not self.crashes:
            return self._all_first
        return tuple(actor.life(local.memory) for actor, local in zip(self.actors, locals_, strict=True))


@dataclass
class Found:
    """What a walk found."""

    walk: Walk
    states: list[State]
    parents: array[int]
    numbers: dict[State, int]
    wrong: str | None = None
    schedule: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.sources, self.targets = array("l"), array("l")

    def way(self, number: int) -> list[str]:
        """Say what has to happen to come to a state."""
        texts = []
        while (before := self.parents[number]) >= 0:
            state = self.states[number]
            texts.append(next(s.text for s in self.walk.steps(self.states[before]) if s.state == state))
            number = before
        return texts[::-1]

    def stuck(self, goal: Any, counts: Any) -> list[int]:
        """Return the states that count and from which no state of the goal is reached without time-outs and crashes."""
        before: list[list[int]] = [[] for _ in self.states]
        for source, target in zip(self.sources, self.targets, strict=True):
            before[target].append(source)
        reached = bytearray(len(self.states))
        todo = [number for number, state in enumerate(self.states) if goal(state)]
        for number in todo:
            reached[number] = 1
        while todo:
            for source in before[todo.pop()]:
                if not reached[source]:
                    reached[source] = 1
                    todo.append(source)
        return [number for number, state in enumerate(self.states) if not reached[number] and counts(state)]


def _part(local: Local, read: tuple[bytes | None, ...], name: Hashable = None) -> Local:
    part = Local(local.actor, local.begin[0], local.answers, local.begin[1])
    part.operation, part.place, part.waiting, part.read = local.operation, local.place, local.waiting, read
    part.late = local.late
    part.next, part.parts = local.next, local.parts
    return local.parts.setdefault(name or read, part)


def _place(steps: Steps[Any]) -> tuple[int, ...]:
    """Where a generator stands: the instruction of each generator it waits in."""
    places = []
    inner: Any = steps
    while inner is not None:
        frame: FrameType = inner.gi_frame
        places.append(frame.f_lasti)
        inner = inner.gi_yieldfrom
    return tuple(places)


def _text(operation: Any, answer: Any) -> str:
    name = type(operation).__name__
    key = getattr(operation, "key", "")
    return f"{name} {key}" + (f" -> {answer}" if name == "Count" else "")
