"""Ranks of a walk that call, one call after another, for meetings; and what must hold in every state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from eplb_core.errors import EplbError
from eplb_core.voting.meeting import Roll, post_key
from eplb_core.voting.operations import Operation, Put
from eplb_core.wire.ballots import decode_decision
from eplb_core.wire.envelope import MessageScope
from tests.protocol.ranks import NAME, PROCESSES, THE_RULES, TIMED_OUT, Attempt, Rules, attend, decision_key, drive
from tests.protocol.store import Contents
from tests.protocol.walk import Actor, Begin, End, Lives, Local, State, Walk


@dataclass(frozen=True)
class Call:
    """What a host does: it calls for a meeting of these members, again after a failure."""

    members: tuple[int, ...]
    tries: int = 1
    refusal: EplbError | None = None


@dataclass(frozen=True)
class Memory:
    """What is left of a rank between two rounds of a meeting."""

    life: int = 1
    call: int = 0
    tried: int = 0
    epoch: int = 0
    nonces: int = 0


class Host(Actor[Memory]):
    """One rank and what its host calls, one call after another."""

    refusal = TIMED_OUT

    def __init__(
        self, rank: int, calls: Sequence[Call], *, rules: Rules = THE_RULES, rounds: int = 3, seat: str = "",
        alone: bool = True, private: bool = False, expected: Sequence[str] = ("EPLB-T002",),
    ) -> None:  # fmt: skip
        self.rank = rank
        self.seat = seat or str(rank)
        self.calls = tuple(calls)
        self.rules = rules
        self.rounds = rounds
        self.seats: tuple[str, ...] = ()
        self.alone = alone
        self.private = private
        self.expected = expected

    def start(self, memory: Memory) -> Attempt:
        return self._attempt(memory, memory.nonces)

    def again(self, memory: Memory) -> tuple[Attempt, Sequence[Any]]:
        # No other process was this rank, and it made the nonce that its memory holds.
        return self._attempt(memory, memory.nonces - 1), ([None],)

    def _attempt(self, memory: Memory, nonces: int) -> Attempt:
        call = self.calls[memory.call]
        return attend(
            self.rules, self.rank, call.members, seat=self.seat, life=memory.life, epoch=memory.epoch, nonces=nonces,
            refusal=call.refusal, private=self.private,
        )  # fmt: skip

    def round(self, memory: Memory, run: Attempt) -> Begin[Memory] | End[Memory] | None:
        if run.nonces == memory.nonces:
            return None
        memory = replace(memory, nonces=run.nonces)
        return End("beyond the bound", memory) if run.nonces > self.rounds else Begin(memory)

    def ended(self, memory: Memory, run: Attempt, result: object) -> Begin[Memory] | End[Memory]:
        call = self.calls[memory.call]
        if isinstance(result, tuple):
            roll, _ = result
            memory = replace(memory, epoch=roll.epoch)
            done = End("connected", memory, roll.to_bytes())
        elif result is None:
            done = End("refused", memory)
        elif not isinstance(result, EplbError):
            raise result
        elif memory.tried + 1 < call.tries:
            return Begin(replace(memory, tried=memory.tried + 1))
        else:
            done = End("gave up", memory, result.code)
        if memory.call + 1 < len(self.calls):
            return Begin(replace(memory, call=memory.call + 1, tried=0))
        return done

    def crashed(self, memory: Memory) -> Begin[Memory]:
        return Begin(replace(memory, life=memory.life + 1, epoch=0, nonces=0))

    def life(self, memory: Memory) -> int:
        return memory.life

    def owns(self, key: str) -> bool:
        return self.alone and key == post_key(self.rank)

    def resumes(self, end: End[Memory], locals_: Sequence[Local]) -> Memory | None:
        # The ring tells those that are connected when one of them has died or left; their hosts then rebuild.
        if end.why == "connected":
            for nonce in Roll.from_bytes(end.detail).nonces.values():
                seat, *which = nonce.split(".")
                if which and _has_left(locals_[self.seats.index(seat)], end, tuple(map(int, which))):
                    return end.memory
        return None

    def mark(self, memory: Memory, run: Attempt, operation: Operation) -> tuple[str, bytes] | None:
        if isinstance(operation, Put) and run.roll is not None:
            return _cast_key(run.roll, self.rank), f"{run.posted} ".encode()
        return None

    def living(self, lives: Lives) -> AbstractContextManager[None]:
        return PROCESSES.are({f"{seat}.{life}" for seat, life in zip(self.seats, lives, strict=False)})

    def judge(self, run: Attempt, result: object, contents: Contents) -> str | None:
        if run.left and _committed(run.left[-1], contents):
            return f"rank {self.rank} gave up a roll that was committed: {run.left[-1]}"
        if isinstance(result, tuple):
            return self._why_not_safe(run, result[0], contents)
        if isinstance(result, EplbError):
            if run.roll is not None and _committed(run.roll, contents):
                return f"rank {self.rank} gave up a roll that was committed: {run.roll}"
            if result.code not in self.expected:
                return f"rank {self.rank} gave up before its limit: {result}"
        return None

    def _why_not_safe(self, run: Attempt, roll: Roll, contents: Contents) -> str | None:
        which = f"rank {self.rank} is connected by {roll}, "
        for rank, nonce in roll.nonces.items():
            cast = contents.get(_cast_key(roll, rank), b"").decode().split()
            if cast != [nonce]:
                return f"{which}on which rank {rank} voted as {' and '.join(cast) or 'nobody of this run'}"
        if roll.nonces[self.rank] != run.posted:
            return f"{which}which does not hold {run.posted}"
        if not _committed(roll, contents):
            return f"{which}which was not committed"
        if roll.epoch <= run.meeting.epoch:
            return f"{which}but has been in epoch {run.meeting.epoch} before"
        return None


def _has_left(local: Local, end: End[Memory], which: tuple[int, int]) -> bool:
    if local.end is not None and (local.end.why, local.end.detail) != (end.why, end.detail):
        return True
    memory, posted = local.begin if local.end is None else (local.memory, True)
    return not posted or (memory.life, memory.nonces) != which


def _cast_key(roll: Roll, rank: int) -> str:
    return f"cast/{roll.namespace}/{rank}"  # not the protocol's: what the walk notes for `judge`


def _committed(roll: Roll, contents: Contents) -> bool:
    value = contents.get(decision_key(roll))
    scope = MessageScope(NAME, 0, roll.epoch, 0)
    return value is not None and decode_decision(scope.unseal(value, "decision", 1 << 20)).commit


def old_run(members: Sequence[int], *, rules: Rules = THE_RULES) -> Contents:
    """Return what a run leaves in the store whose members were connected and then died."""
    return drive([attend(rules, rank, tuple(members), life=0) for rank in members], {})


def meet(
    calls: Mapping[int, Sequence[Call]] | Sequence[Host], contents: Contents | None = None, *, crashes: int = 0,
    rules: Rules = THE_RULES, rounds: int = 3, **settings: Any,
) -> Walk:  # fmt: skip
    """Return the walk of ranks that make these calls, one after another."""
    hosts = (
        [Host(rank, those, rules=rules, rounds=rounds, **settings) for rank, those in calls.items()]
        if isinstance(calls, Mapping) else calls
    )  # fmt: skip
    for host in hosts:
        host.seats = tuple(each.seat for each in hosts)
    return Walk(hosts, [Memory() for _ in hosts], contents or {}, crashes)


def all_connected(state: State) -> bool:
    """Are all connected by one roll?"""
    ends = [local.end for local in state[:-1]]
    return all(end is not None and end.why == "connected" for end in ends) and len({end.detail for end in ends}) == 1


def nobody_leaves(rounds: int) -> Callable[[State], bool]:
    """Return whether nobody has given up for good or is about to, and all are that far from the bound on rounds."""

    def stays(local: Local) -> bool:
        if local.end is not None:
            return local.end.why == "connected" and local.memory.nonces <= rounds
        last_try = local.memory.tried + 1 == local.actor.calls[local.memory.call].tries
        in_last_call = local.memory.call + 1 == len(local.actor.calls)
        return in_last_call and local.memory.nonces <= rounds and not (local.late and last_try)

    return lambda state: all(map(stays, state[:-1]))
