"""Scenarios as text: what hosts, processes and limits do, and what the ranks then do to the store, to be read.

A line that starts with ``>`` is a command; the lines below it are what came of it. Commands, R being a rank, or a rank
and a letter for another process that is the same rank:

    > an old run of 0 1                 was connected, then all of it died
    > R meets 0 1                       its host calls connect or rebuild, of these members
    > R refuses 0 1: its tensors ...    its host says why it cannot take part
    > R goes on                         until there is nothing yet of what it looks for, or to its end
    > all go on                         in turn, until nobody gets any further
    > R waits to its limit
    > R dies
    > the machine of R cannot be seen   by the others, so nobody can say whether it lives
    > the store was made for them       so what is in it is no older than they are
    > the post of R is damaged
    > R votes yes on layer 5            or no; or R fails in layer 5
    > a commit of another life stands in layer 5
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eplb_core.errors import EplbError, error_for
from eplb_core.voting.operations import Count, Get, Operation, Pause, Put, PutFirst, Refusal
from eplb_core.voting.roll import Post, Roll, post_key
from eplb_core.voting.vote import Vote, all_agree
from eplb_core.wire.ballots import Ballot, Decision, decode_ballot, decode_decision, encode_decision
from eplb_core.wire.envelope import OVERHEAD_NBYTES, MessageScope
from tests.protocol.ranks import NAME, PROCESSES, THE_RULES, Attempt, attend, drive
from tests.protocol.store import Contents, perform

LAYERS = MessageScope(NAME, 0, 1, 1)


@dataclass
class Voting:
    """A rank that votes on a layer."""

    vote: Vote
    steps: Any


def whom(waiting_for: Mapping[int, str], members: Sequence[int]) -> str:
    """Name the members that a meeting waits for."""
    return (
        ", ".join(f"rank {rank} {why}".strip() for rank, why in sorted(waiting_for.items())) or f"ranks {list(members)}"
    )


@dataclass
class Seat:
    """A process that is a rank, and those that were before it."""

    name: str
    life: int = 1
    epoch: int = 0
    nonces: int = 0
    run: Attempt | Voting | None = None
    answer: Any = None
    asks: Operation | None = None
    """What it asked for last."""
    waited: str = ""
    """What was last written of what it waits for."""

    @property
    def rank(self) -> int:
        return int(self.name.rstrip("abc"))

    @property
    def token(self) -> str:
        return f"{self.name}.{self.life}"


class Scenario:
    """Does commands, and writes down what comes of them."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}
        self._contents: Contents = {}
        self._private = False
        self._commands: list[tuple[str, Callable[..., Iterator[str]]]] = [
            (r"an old run of ([\d ]+)", self._old_run),
            (r"(\w+) meets ([\d ]+)", self._meets),
            (r"(\w+) refuses ([\d ]+): (.*)", self._refuses),
            (r"(\d\w*) goes on", self._goes_on),
            (r"all go on", self._all_go_on),
            (r"(\w+) waits to its limit", self._waits),
            (r"(\w+) dies", self._dies),
            (r"the machine of (\w+) cannot be seen", self._unseen),
            (r"the store was made for them", self._made_for_them),
            (r"the post of (\d+) is damaged", self._damaged),
            (r"(\d+) votes (yes|no) on layer (\d+)", self._votes),
            (r"(\d+) fails in layer (\d+)", self._fails),
            (r"a commit of another life stands in layer (\d+)", self._stands),
        ]

    def do(self, command: str) -> list[str]:
        """Do a command; return what came of it, a line each."""
        for pattern, action in self._commands:
            match = re.fullmatch(pattern, command)
            if match is not None:
                with PROCESSES.are({seat.token for seat in self._seats.values()}):
                    return list(action(*match.groups()))
        raise ValueError(f"no such command: {command}")

    # --- commands ----------------------------------------------------------------------------------------------------

    def _old_run(self, members: str) -> Iterator[str]:
        ranks = _ranks(members)
        self._contents = drive([attend(THE_RULES, rank, ranks, life=0) for rank in ranks], self._contents)
        for rank in ranks:
            yield _written(rank, post_key(rank), self._contents[post_key(rank)], "has left the post")
        key = f"meet/roll/{ranks[0]}"
        yield _written(ranks[0], key, self._contents[key], "has left the roll")

    def _meets(self, name: str, members: str) -> Iterator[str]:
        return self._come(name, _ranks(members), None)

    def _refuses(self, name: str, members: str, reason: str) -> Iterator[str]:
        rank = Seat(name).rank
        return self._come(name, _ranks(members), error_for("EPLB-M006", rank=rank, reason=reason))

    def _come(self, name: str, members: tuple[int, ...], refusal: EplbError | None) -> Iterator[str]:
        seat = self._seats.setdefault(name, Seat(name))
        if seat.run is not None:
            raise ValueError(f"{name} is in a call already")
        seat.answer, seat.waited = None, ""
        seat.run = attend(
            THE_RULES,
            seat.rank,
            members,
            seat=name,
            life=seat.life,
            epoch=seat.epoch,
            nonces=seat.nonces,
            refusal=refusal,
            private=self._private,
        )
        yield from ()

    def _goes_on(self, name: str) -> Iterator[str]:
        yield from self._run(self._seats[name])

    def _all_go_on(self) -> Iterator[str]:
        while True:
            lines = [line for seat in self._seats.values() if seat.run is not None for line in self._run(seat)]
            yield from lines
            if not lines:
                return

    def _waits(self, name: str) -> Iterator[str]:
        seat = self._seats[name]
        if not isinstance(seat.asks, Pause):
            raise TypeError(f"{name} waits for nothing")
        waiting_for = "the others"
        if isinstance(seat.run, Attempt):
            waiting_for = whom(seat.run.meeting.waiting_for, seat.run.meeting.members)
        error = error_for("EPLB-T002", seconds=8.0, where="meeting", waiting_for=waiting_for)
        seat.answer = Refusal(error, fatal=False)
        yield from self._run(seat)

    def _dies(self, name: str) -> Iterator[str]:
        seat = self._seats[name]
        self._seats[name] = Seat(name, seat.life + 1)
        yield from ()

    def _unseen(self, name: str) -> Iterator[str]:
        PROCESSES.unseen = PROCESSES.unseen | {self._seats[name].token}
        yield from ()

    def _made_for_them(self) -> Iterator[str]:
        self._private = True
        yield from ()

    def _damaged(self, rank: str) -> Iterator[str]:
        key = post_key(int(rank))
        value = bytearray(self._contents[key])
        value[-3] ^= 1
        self._contents = {**self._contents, key: bytes(value)}
        yield from ()

    def _votes(self, name: str, says: str, layer: str) -> Iterator[str]:
        seat = self._seats.setdefault(name, Seat(name))
        error = None if says == "yes" else error_for("EPLB-M006", rank=seat.rank, reason="its transfer failed")
        vote = self._vote(seat, layer)

        def voting() -> Any:
            yield from vote.casting(Ballot(error is None, error, cast_at_s=1.0), all_agree(seat.rank))
            return (yield from vote.awaiting())

        seat.run, seat.answer = Voting(vote, voting()), None
        yield from ()

    def _fails(self, name: str, layer: str) -> Iterator[str]:
        seat = self._seats.setdefault(name, Seat(name))
        vote = self._vote(seat, layer)
        error = error_for("EPLB-M006", rank=seat.rank, reason="its transfer failed")
        seat.run, seat.answer = Voting(vote, vote.aborting(error)), None
        yield from ()

    def _stands(self, layer: str) -> Iterator[str]:
        value = LAYERS.seal("decision", encode_decision(Decision(True, 0)))
        self._contents = {**self._contents, f"epoch/1/{layer}/decision": value}
        yield from ()

    def _vote(self, seat: Seat, layer: str) -> Vote:
        scope = LAYERS.of(rank=seat.rank)
        return Vote(None, scope, members=(0, 1), namespace="epoch", topic=layer, where=f"layer {layer}, phase vote")

    # --- a rank ------------------------------------------------------------------------------------------------------

    def _run(self, seat: Seat) -> Iterator[str]:
        if seat.run is None:
            raise ValueError(f"{seat.name} is in no call")
        while True:
            try:
                seat.asks = seat.run.steps.send(seat.answer)
            except StopIteration as done:
                yield self._ended(seat, done.value)
                return
            except EplbError as error:
                yield self._ended(seat, error)
                return
            seat.answer = None
            if isinstance(seat.asks, Pause):
                waits = self._waits_for(seat)
                if waits != seat.waited:
                    yield waits
                seat.waited = waits
                return
            seat.answer, self._contents = perform(seat.asks, self._contents)
            if not isinstance(seat.asks, Get):
                seat.waited = ""
                yield _done(seat.name, seat.asks, seat.answer)

    def _waits_for(self, seat: Seat) -> str:
        if isinstance(seat.run, Attempt) and seat.run.meeting.waiting_for:
            return f"{seat.name} waits for {whom(seat.run.meeting.waiting_for, ())}"
        refuses = isinstance(seat.run, Attempt) and seat.run.roll is None
        return f"{seat.name} waits for {'the others to read it' if refuses else 'the decision'}"

    def _ended(self, seat: Seat, result: object) -> str:
        run, seat.run, seat.asks = seat.run, None, None
        if isinstance(run, Attempt):
            seat.nonces = run.nonces
        if isinstance(result, EplbError):
            return f"{seat.name} fails: {result}"
        if isinstance(result, Decision):
            return f"{seat.name} obeys: {_decided(result)}"
        if result is None:
            return f"{seat.name} returns to its host"
        roll, _ = result
        seat.epoch = roll.epoch
        return f"{seat.name} is connected in epoch {roll.epoch}"


# --- texts -----------------------------------------------------------------------------------------------------------


def _done(name: str, operation: Operation, answer: Any) -> str:
    match operation:
        case Put(key, value):
            return _written(name, key, value)
        case Count():
            return f"{name} is counted, as number {answer}"
        case PutFirst(_, value):
            verb = "decides" if answer == value else "finds decided"
            return f"{name} {verb}: {_decided(decode_decision(answer[OVERHEAD_NBYTES:]))}"
    return f"{name} {operation}"


def _written(name: object, key: str, value: bytes, verb: str = "") -> str:
    what, body = key.split("/"), value[OVERHEAD_NBYTES:]
    if what[:2] == ["meet", "read"]:
        return f"{name} notes that it has read the post {what[2]}"
    if what[:2] == ["meet", "contested"]:
        return f"{name} leaves word that another process posted {what[2]}"
    if what[:2] == ["meet", "post"]:
        post = Post.from_bytes(body)
        purpose = f"refusing: {post.refusal}" if post.refusal else f"to meet {_list(post.members)}"
        return f"{name} {verb or 'posts'} {post.nonce}, {purpose}"
    if what[:2] == ["meet", "roll"]:
        roll = Roll.from_bytes(body)
        if roll.refused_by is not None:
            return f"{name} passes on that rank {roll.refused_by} refuses"
        return f"{name} {verb or 'publishes the roll'} {', '.join(roll.nonces.values())} of epoch {roll.epoch}"
    return f"{name} votes {'yes' if decode_ballot(body).ok else 'no'}"


def _decided(decision: Decision) -> str:
    return "commit" if decision.commit else f"abort: {decision.error}"


def _list(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def replay(text: str) -> str:
    """Return a scenario with what comes of its commands today."""
    scenario, lines = Scenario(), []
    for line in text.splitlines():
        if line.startswith("> "):
            lines.append(line)
            lines.extend(f"    {each}" for each in scenario.do(line[2:]))
        elif not line.startswith("    "):
            lines.append(line)
    return "\n".join(lines) + "\n"
