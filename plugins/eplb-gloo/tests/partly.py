"""Two members of which one is killed in the middle of a message: partly in, or partly out, on the one that lives on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from members import UNTOUCHED, Case, Member

from eplb_core.backend import Cancelled
from eplb_core.testing.ranks import Rank

ROW_NBYTES = 64 << 20  # tens of milliseconds on its way
DIRECTIONS = {"in": ((1, 1),), "out": ((0, 0),)}  # new maps: rank 0 receives and nothing else, or sends


class Survivor(Member):
    """Rank 0. Its core knows that rank 1 is dead as soon as that is so, unless `is_told` is False."""

    def __init__(self, rank: Rank, direction: str, is_told: bool = True) -> None:
        case = Case(((ROW_NBYTES,),), num_rows=1, staging_layers=1, new_map=DIRECTIONS[direction])
        super().__init__(rank, case, lambda: self._look() if is_told else None)
        self.connect()
        self.direction = direction
        self.meet("connected")

    def _look(self) -> Cancelled | None:
        return Cancelled("rank 1 is gone", peer_lost=True) if self.store.check(["talk/dying"]) else None

    def start_until_the_peer_dies(self) -> Any:
        plan, handle = self.start(0)
        if self.direction == "in":
            await_first_bytes(self.landing.slots[plan.slot])
            self.store.set("talk/dying", b"1")
            os.kill(int(self.store.get("talk/pid")), signal.SIGKILL)
        return plan, handle


def peer_that_dies(rank: Rank, direction: str) -> None:
    """Rank 1."""
    member = Member(rank, Case(((ROW_NBYTES,),), num_rows=1, staging_layers=1, new_map=DIRECTIONS[direction]))
    member.connect()
    member.store.set("talk/pid", str(os.getpid()).encode())
    member.meet("connected")
    plan, _ = member.start(0)
    if direction == "out":
        await_first_bytes(member.landing.slots[plan.slot])
        member.store.set("talk/dying", b"1")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # until it is killed


def await_first_bytes(slot: Any) -> None:
    until = time.monotonic() + 30
    while bool((slot[:4096] == UNTOUCHED).all()):
        if time.monotonic() > until:
            raise TimeoutError("nothing landed")
