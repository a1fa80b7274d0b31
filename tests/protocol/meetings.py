"""Ranks of a walk that call for meetings, one call after another; and what must hold whatever the order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from eplb_core.errors import EplbError
from eplb_core.voting.operations import Operation, Put
from eplb_core.voting.roll import Roll, post_key
from eplb_core.wire.ballots import decode_decision
from eplb_core.wire.envelope import MessageScope
from tests.protocol.actors import Actor, Begin, End, Lives, Local
from tests.protocol.ranks import NAME, PROCESSES, THE_RULES, TIMED_OUT, Attempt, Rules, attend, decision_key, drive
from tests.protocol.store import Contents
from tests.protocol.walk import State, Walk


@dataclass(frozen=True)
class Call:
    """What a host calls: a meeting of these members, again when it fails; or its rank refuses to take part."""

    members: tuple[int, ...]
    tries: int = 1
    refusal: EplbError | None = None


@dataclass(frozen=True)
class Memory:
    """What a rank keeps from one round of a meeting to the next."""

    life: int = 1
    call: int = 0
    tried: int = 0
    epoch: int = 0
    nonces: int = 0


class Host(Actor[Memory]):
    """A process that is a rank, and its calls.

    Parameters
    ----------
    rank : int
        Which.
    calls : sequence of Call
        Each is made when the one before it has ended, well or not.
    rules : Rules
        Of the protocol.
    rounds : int
        After so many nonces a process is followed no further.
    seat : str
        Told apart from other processes that are the same rank.
    alone : bool
        Are there none?
    private : bool
        See `Meeting`.
    expected : sequence of str
        Codes of the errors with which a call may fail.
    """

    refusal = TIMED_OUT

    def __init__(
        self,
        rank: int,
        calls: Sequence[Call],
        *,
        rules: Rules = THE_RULES,
        rounds: int = 4,
        seat: str = "",
        alone: bool = True,
        private: bool = False,
        expected: Sequence[str] = ("EPLB-T002",),
        patient: bool = False,
    ) -> None:
        self.rank = rank
        self.calls = tuple(calls)
        self.seat = seat or str(rank)
        self.seats: Sequence[str] = ()
        self._rules = rules
        self._rounds = rounds
        self._alone = alone
        self._private = private
        self._expected = expected
        if patient:
            self.refusal = None

    def start(self, memory: Memory) -> Attempt:
        return self._attempt(memory, memory.nonces)

    def again(self, memory: Memory) -> tuple[Attempt, Sequence[Any]]:
        # It found nobody else in its place, and made the nonce that its memory counts.
        return self._attempt(memory, memory.nonces - 1), [(None,)]

    def _attempt(self, memory: Memory, nonces: int) -> Attempt:
        call = self.calls[memory.call]
        return attend(
            self._rules,
            self.rank,
            call.members,
            seat=self.seat,
            life=memory.life,
            epoch=memory.epoch,
            nonces=nonces,
            refusal=call.refusal,
            private=self._private,
        )

    def anew(self, memory: Memory, run: Attempt) -> Begin[Memory] | End[Memory] | None:
        if run.nonces == memory.nonces:
            return None
        memory = replace(memory, nonces=run.nonces)
        return End("endless", memory) if run.nonces > self._rounds else Begin(memory)

    def ended(self, memory: Memory, run: Attempt, result: object, late: bool) -> Begin[Memory] | End[Memory]:
        call = self.calls[memory.call]
        if isinstance(result, tuple):
            memory = replace(memory, epoch=result[0].epoch)
            end = End("connected", memory, result[0].to_bytes())
        elif result is None:
            end = End("refused", memory, "at its limit" if late else "heard")
        elif not isinstance(result, EplbError):
            raise result
        elif memory.tried + 1 < call.tries:
            return Begin(replace(memory, tried=memory.tried + 1))
        else:
            end = End("gave up", memory, result.code)
        if memory.call + 1 < len(self.calls):
            return Begin(replace(memory, call=memory.call + 1, tried=0))
        return end

    def crashed(self, memory: Memory) -> Begin[Memory]:
        return Begin(replace(memory, life=memory.life + 1, epoch=0, nonces=0))

    def resumed(self, end: End[Memory], others: Sequence[Local]) -> Memory | None:
        # The ring tells those that are connected when one of them has died or left; their hosts then rebuild.
        if end.why == "connected":
            for nonce in Roll.from_bytes(end.detail).nonces.values():
                seat, *numbers = nonce.split(".")
                # a nonce that names no life and number is one of broken rules
                if len(numbers) == 2 and _has_left(others[self.seats.index(seat)], end, *map(int, numbers)):
                    return end.memory
        return None

    def life(self, memory: Memory) -> int:
        return memory.life

    def living(self, lives: Lives) -> AbstractContextManager[None]:
        return PROCESSES.are({f"{seat}.{life}" for seat, life in zip(self.seats, lives, strict=False)})

    def owns(self, key: str) -> bool:
        return self._alone and key == post_key(self.rank)

    def note(self, memory: Memory, run: Attempt, operation: Operation) -> tuple[str, bytes] | None:
        if isinstance(operation, Put) and run.roll is not None:
            return _cast_key(run.roll, self.rank), f"{_voter(run.posted, run.meeting.members)};".encode()
        return None

    def judge(self, run: Attempt, result: object, contents: Contents) -> str | None:
        for roll in [*run.left, run.roll]:
            if roll is not None and not isinstance(result, tuple) and _committed(roll, contents):
                return f"rank {self.rank} has left {roll}, which is committed"
        if isinstance(result, tuple):
            wrong = self._why_not_safe(run, result[0], contents)
            return None if wrong is None else f"rank {self.rank} is connected by {result[0]}, {wrong}"
        if isinstance(result, EplbError) and result.code not in self._expected:
            return f"rank {self.rank} fails before its limit: {result}"
        return None

    def _why_not_safe(self, run: Attempt, roll: Roll, contents: Contents) -> str | None:
        for rank, nonce in roll.nonces.items():
            voters = contents.get(_cast_key(roll, rank), b"").decode().split(";")[:-1]
            if voters != [_voter(nonce, roll.members)]:
                return f"on which rank {rank} has voted as {' and '.join(voters) or 'nobody of this run'}"
        if roll.nonces[self.rank] != run.posted:
            return f"which holds another nonce of it than {run.posted}"
        if roll.members != run.meeting.members:
            return f"but was told to meet {run.meeting.members}"
        if roll.epoch <= run.meeting.epoch:
            return f"but has been in epoch {run.meeting.epoch} before"
        if not _committed(roll, contents):
            return "which is not committed"
        return None


def meet(
    calls: Mapping[int, Sequence[Call]] | Sequence[Host],
    contents: Contents | None = None,
    *,
    crashes: int = 0,
    memories: Sequence[Memory] | None = None,
    **settings: Any,
) -> Walk:
    """Return the walk of hosts, or of one for each rank with these calls and settings."""
    hosts = [Host(rank, those, **settings) for rank, those in calls.items()] if isinstance(calls, Mapping) else calls
    for host in hosts:
        host.seats = tuple(each.seat for each in hosts)
    return Walk(hosts, memories or [Memory() for _ in hosts], contents or {}, crashes)


def old_run(members: Sequence[int], rules: Rules = THE_RULES) -> Contents:
    """Return what a run leaves in the store that was connected and then died: posts, the roll, a vote with a commit."""
    return drive([attend(rules, rank, tuple(members), life=0) for rank in members], {})


# --- states ----------------------------------------------------------------------------------------------------------


def all_connected(state: State) -> bool:
    """Are all connected by one roll?"""
    ends = [local.end for local in state[:-1]]
    return all(end is not None and end.why == "connected" for end in ends) and len({end.detail for end in ends}) == 1


def nobody_leaves(state: State) -> bool:
    """Has nobody given up for good, and is nobody about to, in the last call of all?"""
    return all(map(_stays, state[:-1]))


def someone_is_endless(state: State) -> bool:
    """Has somebody come anew so often that it is followed no further?"""
    return any(local.end is not None and local.end.why == "endless" for local in state[:-1])


def _stays(local: Local) -> bool:
    if local.end is not None:
        return local.end.why == "connected"
    calls, memory = local.actor.calls, local.memory
    last_try = memory.tried + 1 == calls[memory.call].tries
    return memory.call + 1 == len(calls) and not (local.late and last_try)


def _has_left(local: Local, end: End[Memory], life: int, nonce: int) -> bool:
    if local.end is not None and (local.end.why, local.end.detail) != (end.why, end.detail):
        return True
    return not local.again or (local.memory.life, local.memory.nonces) != (life, nonce)


def _voter(nonce: str, members: Sequence[int]) -> str:
    return f"{nonce} of ranks {list(members)}"


def _cast_key(roll: Roll, rank: int) -> str:
    return f"cast/{roll.namespace}/{rank}"  # no key of the protocol: who has voted, for `judge`


def _committed(roll: Roll, contents: Contents) -> bool:
    value = contents.get(decision_key(roll))
    scope = MessageScope(NAME, 0, roll.epoch, 0)
    return value is not None and decode_decision(scope.unseal(value, "decision", 1 << 20)).commit
