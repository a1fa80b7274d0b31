"""Every order in which the store operations of several actors can happen.

An actor goes through its protocol by the answers that it gets; where they lead is worked out once, by running the real
generator, and known wherever several orders lead there. Three things keep the states few and leave no order out:

- A poll that has found nothing is as if it had not been. The walk checks that the protocol is where the poll began.
- What an actor keeps when its protocol begins anew is its memory, not how it came to that.
- The keys of a `Get` are read one after another, as a client does that does not find all of them; but a key that nobody
  else writes is read at once.
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eplb_core.voting.operations import Get, Pause
from tests.protocol.actors import Actor, Begin, End, Lives, Local
from tests.protocol.store import Contents, perform

State = tuple[Any, ...]
"""A `Local` of each actor, and the `Stored`."""


class Stored:
    """What the store holds: one object for the same contents."""

    __slots__ = ("contents", "next")

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.next: dict[Local, tuple[Any, Stored, str | None]] = {}


@dataclass(frozen=True)
class Step:
    """What can happen in a state; quiet: it is neither a time-out nor a crash."""

    text: str
    quiet: bool
    state: State
    wrong: str | None


class Walk:
    """The states that actors can reach.

    Parameters
    ----------
    actors : sequence of Actor
        Who acts.
    memories : sequence
        Of each at the beginning.
    contents : mapping
        Of the store at the beginning.
    crashes : int
        How many processes may die.
    """

    def __init__(self, actors: Sequence[Actor[Any]], memories: Sequence[Any], contents: Contents, crashes: int) -> None:
        self._crashes = crashes
        self._first_lives: Lives = (1,) * len(actors)
        self._begun: dict[Any, Local] = {}
        self._ended: dict[Any, Local] = {}
        self._stored: dict[frozenset[tuple[str, bytes]], Stored] = {}
        self._steps: dict[Any, list[tuple[str, bool, Local, Stored, str | None]]] = {}
        stored = self._store(contents)
        begun = [self._begin(actor, memory) for actor, memory in zip(actors, memories, strict=True)]
        self.first: State = (*(self._settled(local, stored, self._first_lives)[0] for local in begun), stored)

    def explore(self, limit: int = 2_000_000) -> Found:
        """Go to all states, the nearest first, until something is wrong."""
        collects = gc.isenabled()
        gc.disable()  # nothing that is made here becomes garbage; looking for some takes half of the time
        try:
            return self._explored(limit)
        finally:
            if collects:
                gc.enable()

    def _explored(self, limit: int) -> Found:
        found = Found(self, [self.first], array("l", [-1]))
        numbers = {self.first: 0}
        todo = deque([0])
        while todo:
            at = todo.popleft()
            for step in self.steps(found.states[at]):
                number = numbers.get(step.state)
                if number is None:
                    number = numbers[step.state] = len(found.states)
                    found.states.append(step.state)
                    found.parents.append(at)
                    todo.append(number)
                if step.wrong is not None:
                    found.wrong, found.schedule = step.wrong, [*found.way(at), step.text]
                    return found
                edges = found.quiet if step.quiet else found.loud
                edges.append(at)
                edges.append(number)
            if len(found.states) > limit:
                raise RuntimeError(f"more than {limit} states")
        return found

    def steps(self, state: State) -> Iterator[Step]:
        """Say what can happen next."""
        *locals_, stored = state
        lives = self._lives(locals_)
        may_crash = sum(lives) - len(lives) < self._crashes
        for seat, local in enumerate(locals_):
            if local.end is not None:
                memory = local.actor.resumed(local.end, locals_)
                if memory is not None:
                    after, wrong = self._settled(self._begin(local.actor, memory), stored, lives)
                    yield Step(f"{seat} goes on", True, (*state[:seat], after, *state[seat + 1 :]), wrong)
            key = local, stored, lives, may_crash
            steps = self._steps.get(key)
            if steps is None:
                steps = self._steps[key] = list(self._of_one(seat, *key))
            for text, quiet, after, stored_after, wrong in steps:
                yield Step(text, quiet, (*state[:seat], after, *state[seat + 1 : -1], stored_after), wrong)

    def _of_one(
        self, seat: int, local: Local, stored: Stored, lives: Lives, may_crash: bool
    ) -> Iterator[tuple[str, bool, Local, Stored, str | None]]:
        actor, operation = local.actor, local.operation
        if isinstance(operation, Get):
            yield f"{seat} reads {operation.keys[len(local.read)]}", True, *self._read(local, stored, lives)
            if local.patience is not None and actor.refusal is not None:
                after, wrong = self._answered(local, actor.refusal, stored, lives, giving_up=True)
                yield f"{seat} has waited to its limit", False, after, stored, wrong
        elif operation is not None:
            answer, stored_after, wrong = self._performed(local, stored)
            after, wrong_after = self._answered(local, answer, stored_after, lives)
            text = f"{seat} {type(operation).__name__} {operation.key}"
            yield text, True, after, stored_after, wrong or wrong_after
        if may_crash and (local.end is None or local.end.why != "dead"):
            after = self._then(actor, actor.crashed(local.memory))
            lives_after = (*lives[:seat], actor.life(after.memory), *lives[seat + 1 :])
            after, wrong = self._settled(after, stored, lives_after)
            yield f"{seat} crashes", False, after, stored, wrong

    # --- the store ---------------------------------------------------------------------------------------------------

    def _read(self, local: Local, stored: Stored, lives: Lives) -> tuple[Local, Stored, str | None]:
        """Read the next key of a `Get`, and those after it that nobody else writes."""
        keys, read = local.operation.keys, local.read
        while len(read) == len(local.read) or (len(read) < len(keys) and local.actor.owns(keys[len(read)])):
            read = (*read, stored.contents.get(keys[len(read)]))
        if len(read) < len(keys):
            return local.part(read), stored, None
        after, wrong = self._answered(local, read, stored, lives)
        return after, stored, wrong

    def _settled(self, local: Local, stored: Stored, lives: Lives) -> tuple[Local, str | None]:
        """Go on where the next key to be read is one that nobody else writes."""
        if isinstance(local.operation, Get) and local.actor.owns(local.operation.keys[len(local.read)]):
            after, _, wrong = self._read(local, stored, lives)
            return after, wrong
        return local, None

    def _performed(self, local: Local, stored: Stored) -> tuple[Any, Stored, str | None]:
        known = stored.next.get(local)
        if known is None:
            answer, contents = perform(local.operation, stored.contents)
            key, wrong = getattr(local.operation, "key", ""), None
            if key.endswith("/decision") and stored.contents.get(key, contents.get(key)) != contents.get(key):
                wrong = f"a decision that stood was changed: {key}"
            if local.note is not None:
                key, value = local.note
                contents = {**contents, key: contents.get(key, b"") + value}
            known = stored.next[local] = answer, self._store(contents), wrong
        return known

    def _store(self, contents: Contents) -> Stored:
        key = frozenset(contents.items())
        stored = self._stored.get(key)
        if stored is None:
            stored = self._stored[key] = Stored(contents)
        return stored

    # --- the protocol ------------------------------------------------------------------------------------------------

    def _answered(
        self, local: Local, answer: Any, stored: Stored, lives: Lives, *, giving_up: bool = False
    ) -> tuple[Local, str | None]:
        key = answer, lives, giving_up
        known = local.next.get(key)
        if known is None:
            known = local.next[key] = self._advanced(local, answer, lives, giving_up)
        after, run, result = known
        wrong = None if run is None else local.actor.judge(run, result, stored.contents)
        settled, wrong_after = self._settled(after, stored, lives)
        return settled, wrong or wrong_after

    def _advanced(self, local: Local, answer: Any, lives: Lives, giving_up: bool) -> tuple[Local, Any, object]:
        """Where an answer leads; and the run and its result where `judge` has something to say."""
        actor, memory = local.actor, local.memory
        before = (local.patience or ()) if giving_up else local.answers
        run, _ = _run(local, before)
        late = local.late or giving_up
        try:
            with actor.living(lives):
                operation = run.steps.send(list(answer) if isinstance(answer, tuple) else answer)
        except StopIteration as done:
            return self._then(actor, actor.ended(memory, run, done.value, late)), run, done.value
        except Exception as error:
            return self._then(actor, actor.ended(memory, run, error, late)), run, error
        anew = actor.anew(memory, run)
        if anew is not None:
            run.steps.close()
            return self._then(actor, anew, again=True), run, None
        after = Local(actor, memory, local.again, (*before, (answer, lives)))
        after.late = late
        if isinstance(operation, Pause):
            return self._paused(local, run, after.answers), None, None
        after.operation, after.place = operation, _place(run.steps)
        after.note = actor.note(memory, run, operation)
        if isinstance(local.operation, Get) and not giving_up:
            after.waiting = local.waiting
        return after, None, None

    def _paused(self, local: Local, run: Any, answers: Sequence[tuple[Any, Lives]]) -> Local:
        """Where a poll leads that has found nothing: back to where it began, now with leave to give up."""
        start = local.waiting
        operation = run.steps.send(None)
        if (operation, _place(run.steps)) != (start.operation, start.place):
            raise RuntimeError(f"after a pause {operation} is asked for at {_place(run.steps)}, not {start.operation}")
        paused = start.part((), "paused")
        paused.patience = paused.patience or answers
        return paused

    def _then(self, actor: Actor[Any], then: Begin[Any] | End[Any], *, again: bool = False) -> Local:
        if isinstance(then, Begin):
            return self._begin(actor, then.memory, again=again)
        local = self._ended.get((actor, then))
        if local is None:
            local = self._ended[actor, then] = Local(actor, then.memory, again=True)
            local.end = then
        return local

    def _begin(self, actor: Actor[Any], memory: Any, *, again: bool = False) -> Local:
        local = self._begun.get((actor, memory, again))
        if local is None:
            local = self._begun[actor, memory, again] = Local(actor, memory, again)
            run, local.operation = _run(local, ())
            local.place, local.note = _place(run.steps), actor.note(memory, run, local.operation)
        return local

    def _lives(self, locals_: Sequence[Local]) -> Lives:
        if not self._crashes:
            return self._first_lives
        return tuple(local.actor.life(local.memory) for local in locals_)


@dataclass
class Found:
    """What a walk has found."""

    walk: Walk
    states: list[State]
    parents: array[int]
    quiet: array[int] = field(default_factory=lambda: array("l"))
    """Pairs of states, one after the other without a time-out or a crash."""
    loud: array[int] = field(default_factory=lambda: array("l"))
    """Pairs of states with one of these between."""
    wrong: str | None = None
    schedule: Sequence[str] = ()
    """What had to happen for it."""

    def way(self, number: int) -> list[str]:
        """Say what has to happen to come to a state."""
        texts = []
        while (before := self.parents[number]) >= 0:
            state = self.states[number]
            texts.append(next(step.text for step in self.walk.steps(self.states[before]) if step.state == state))
            number = before
        return texts[::-1]

    def stuck(
        self, goal: Callable[[State], bool], counts: Callable[[State], bool], *, quietly: bool = True
    ) -> Sequence[int]:
        """Return the states that count and from which the goal cannot be reached (without time-outs and crashes)."""
        before: list[list[int]] = [[] for _ in self.states]
        for edges in [self.quiet] if quietly else [self.quiet, self.loud]:
            for source, target in zip(edges[::2], edges[1::2], strict=True):
                before[target].append(source)
        todo = [number for number, state in enumerate(self.states) if goal(state)]
        reached = bytearray(len(self.states))
        for number in todo:
            reached[number] = 1
        while todo:
            for source in before[todo.pop()]:
                if not reached[source]:
                    reached[source] = 1
                    todo.append(source)
        return [number for number, state in enumerate(self.states) if not reached[number] and counts(state)]


def _run(local: Local, answers: Sequence[tuple[Any, Lives]]) -> tuple[Any, Any]:
    """Bring a new run of a protocol to where these answers lead; return it and what it asks for."""
    actor = local.actor
    run, before = actor.again(local.memory) if local.again else (actor.start(local.memory), ())
    operation = run.steps.send(None)
    for answer, lives in [*((answer, ()) for answer in before), *answers]:
        with actor.living(lives):
            operation = run.steps.send(list(answer) if isinstance(answer, tuple) else answer)
    return run, operation


def _place(steps: Any) -> tuple[int, ...]:
    """Return the instruction at which a generator waits, and those it waits in."""
    places = []
    while steps is not None:
        places.append(steps.gi_frame.f_lasti)
        steps = steps.gi_yieldfrom
    return tuple(places)
