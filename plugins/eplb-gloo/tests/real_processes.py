"""A rank that is a process of its own to the very end, finalisation included; see test_letting_go.py."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, cast

from eplb_core.errors import EplbError
from eplb_core.testing.ranks import Rank

sys.path.insert(0, str(Path(__file__).parent))

from members import Case, Member
from partly import Survivor, peer_that_dies

kept: list[Any] = []  # until the modules are cleared


def is_left_with_a_thread_inside(rank: Rank, direction: str, ending: str) -> None:
    if rank.rank == 1:
        peer_that_dies(rank, direction)
    member = Survivor(rank, direction)
    _, handle = member.start_until_the_peer_dies()
    try:
        member.backend.wait(handle, 60.0)
    except EplbError as error:
        print(error)
    if ending == "closed":
        member.backend.abort(handle, "the wait failed")
        assert member.backend.close(force=True) is False
    if ending != "dropped":
        kept.append(member)


def forks_a_child_that_ends(rank: Rank) -> None:
    member = Member(rank, Case(((300 << 10,), (64,)), num_rows=2, new_map=((2, 3, 0, 1),) * 2))
    kept.append(member)
    member.connect()
    member.rounds(3)
    member.meet("used")
    if rank.rank == 0:
        child = os.fork()
        if child == 0:
            sys.exit(7)  # clears modules, runs finalizers: all that a child should not do, and helpers do
        until = time.monotonic() + 20
        while (reaped := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, 9)
                raise TimeoutError("the child does not end")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(reaped[1]) == 7, reaped
    member.meet("forked")
    print(f"{member.rounds(3)} bytes moved after the fork")
    member.meet("moved")
    member.backend.close()


if __name__ == "__main__":
    mode, direction, ending, number, port = sys.argv[1:]
    this = Rank(int(number), 2, int(port), cast("Any", None))
    if mode == "stuck":
        is_left_with_a_thread_inside(this, direction, ending)
    else:
        forks_a_child_that_ends(this)
    print("last word at", time.time(), flush=True)
