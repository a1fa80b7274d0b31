"""Ranks that meet: the real protocol, with nonces and processes that can be told apart and told to be dead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from eplb_core.control.process import ProcessIdentity
from eplb_core.errors import EplbError, error_for
from eplb_core.voting.meeting import Meeting
from eplb_core.voting.operations import Pause, Refusal, Steps
from eplb_core.voting.roll import Joining, Roll
from eplb_core.voting.vote import Vote, all_agree
from eplb_core.wire.ballots import Ballot, Decision
from eplb_core.wire.envelope import MessageScope
from tests.protocol.store import Contents, perform

NAME = "default"
TIMED_OUT = Refusal(error_for("EPLB-T002", seconds=8.0, where="meeting", waiting_for="the others"), fatal=False)


@dataclass(frozen=True)
class Rules:
    """The protocol, or the protocol with one rule taken out."""

    meeting: type[Meeting] = Meeting
    vote: type[Vote] = Vote
    nonce: Callable[[str, int, int], str] = "{}.{}.{}".format
    """From the seat, which of its processes (0 in the old run) and which of its nonces this is."""


THE_RULES = Rules()


class Processes:
    """Which processes there are; the tests' conftest puts it in the place of `ProcessIdentity.in_use`."""

    living: AbstractSet[str] = frozenset()
    unseen: AbstractSet[str] = frozenset()
    """Of another machine: nobody can say whether they live."""

    def in_use(self, process: ProcessIdentity) -> bool | None:
        return None if process.token in self.unseen else process.token in self.living

    @contextmanager
    def are(self, living: AbstractSet[str]) -> Iterator[None]:
        """Let these be the ones that live; called around every step of a protocol."""
        before, self.living = self.living, living
        try:
            yield
        finally:
            self.living = before


PROCESSES = Processes()


def process(seat: str, life: int) -> ProcessIdentity:
    """One of the processes that sit, one after another, at a seat: a rank, and a letter if it is not the only one."""
    pid = 100 + 10 * int(seat[0]) + life + 500 * len(seat[1:])
    return ProcessIdentity("boot", "pid:[1]", pid, "1", f"{seat}.{life}")


@dataclass
class Attempt:
    """One call of one process: its meeting, and what can be seen from outside of how it goes."""

    meeting: Meeting
    steps: Steps[tuple[Roll, Decision] | None]
    nonces: int
    """Made so far by this process."""
    roll: Roll | None = None
    """On which it is voting, or has voted last."""
    posted: str = ""
    """Its nonce."""
    left: list[Roll] = field(default_factory=list)
    """Rolls that it gave up, to come anew."""


def attend(
    rules: Rules,
    rank: int,
    members: tuple[int, ...],
    *,
    seat: str = "",
    life: int = 1,
    epoch: int = 0,
    nonces: int = 0,
    refusal: EplbError | None = None,
    private: bool = False,
) -> Attempt:
    """Come to a meeting, or refuse to."""

    def fresh() -> str:
        if attempt.roll is not None:
            attempt.left.append(attempt.roll)
            attempt.roll = None
        attempt.nonces += 1
        attempt.posted = rules.nonce(seat or str(rank), life, attempt.nonces)
        return attempt.posted

    def join(roll: Roll) -> Joining:
        attempt.roll = roll
        scope = MessageScope(NAME, rank, roll.epoch, 0)
        # Its steps are performed by whoever drives them, so the vote needs no client.
        vote = rules.vote(None, scope, members=roll.members, namespace=roll.namespace, topic="meet", where="meeting")
        return Joining(vote, Ballot(True, cast_at_s=1.0), all_agree(rank))

    meeting = rules.meeting(NAME, rank, members, epoch, process(seat or str(rank), life), private, fresh)
    steps = meeting.attending(join) if refusal is None else meeting.refusing(refusal)
    attempt = Attempt(meeting, steps, nonces)
    return attempt


def ballot_key(roll: Roll, rank: int) -> str:
    return f"{roll.namespace}/0/meet/ballot/{rank}"


def decision_key(roll: Roll) -> str:
    return f"{roll.namespace}/0/meet/decision"


def drive(attempts: Sequence[Attempt], contents: Contents, patience: int = 50) -> Contents:
    """Let attempts go on in turn, an operation each, until all have ended; return what the store then holds.

    One that has paused so many times gives up.
    """
    answers: dict[int, Any] = dict.fromkeys(range(len(attempts)))
    pauses = [0] * len(attempts)
    while answers:
        for place in tuple(answers):
            try:
                operation = attempts[place].steps.send(answers[place])
            except (StopIteration, EplbError):
                del answers[place]
                continue
            if isinstance(operation, Pause):
                pauses[place] += 1
                answers[place] = TIMED_OUT if pauses[place] == patience else None
            else:
                answers[place], contents = perform(operation, contents)
    return contents
