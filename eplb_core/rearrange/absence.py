"""Whom a meeting waits for: the lowest member, which alone reads all posts, tells the others, so that all name them."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from eplb_core.errors import EplbError, MetadataError, error_for
from eplb_core.wire.envelope import MessageScope

if TYPE_CHECKING:
    from eplb_core.control.plane import ControlPlane
    from eplb_core.control.store import StoreClient
    from eplb_core.voting.meeting import Meeting

_TELL_EVERY_S = 0.25
_NAMED = 8
_LIMIT_NBYTES = 1 << 16
_WHERE = "connect, phase meeting"


class Absence:
    """The members that have not come to a meeting, as this rank knows them.

    Parameters
    ----------
    meeting : Meeting
        This rank's part in it.
    client : StoreClient
        In the namespace of the communicator.
    control : ControlPlane
        Knows where ranks should be.

    Notes
    -----
    What the lowest member tells is for messages alone; no decision depends on it.
    """

    def __init__(self, meeting: Meeting, client: StoreClient, control: ControlPlane) -> None:
        self._meeting = meeting
        self._client = client
        self._control = control
        self._told: dict[int, str] = {}
        self._told_at_s = time.monotonic()

    def tell(self) -> None:
        """Tell the other members, from time to time, whom the lowest one waits for."""
        meeting = self._meeting
        now_s = time.monotonic()
        if meeting.rank != meeting.members[0] or now_s - self._told_at_s < _TELL_EVERY_S:
            return
        self._told_at_s = now_s
        first = dict(sorted(meeting.waiting_for.items())[:_NAMED])
        if first != self._told:
            self._told = first
            body = json.dumps([len(meeting.waiting_for), sorted(first.items())]).encode()
            self._client.set(self._key, self._scope.seal("absent", body))

    def error(self, timeout_s: float, missing_ballots: list[int]) -> EplbError:
        """Make the error of a meeting whose limit is over on this rank."""
        meeting = self._meeting
        waiting = dict(meeting.waiting_for)
        count = len(waiting)
        if set(waiting) == {meeting.members[0]} and meeting.rank != meeting.members[0]:
            told = self._told_by_the_lowest()
            if told is not None:
                count, waiting = told
        waiting.pop(meeting.rank, None)  # what the lowest member told may be a moment old
        if not waiting and missing_ballots:
            waiting = dict.fromkeys(missing_ballots, "which came, and does not go on")
            count = len(waiting)
        if not waiting:
            return error_for("EPLB-T002", seconds=timeout_s, where=_WHERE, waiting_for=f"ranks {list(meeting.members)}")
        named = [self._named(rank, why) for rank, why in sorted(waiting.items())[:_NAMED]]
        endpoints = ", ".join(named) + (f" and {count - _NAMED} more" if count > _NAMED else "")
        detail = f"Members {_span(meeting.members)} meet ({_WHERE})."
        return error_for("EPLB-T023", seconds=timeout_s, endpoints=endpoints, detail=detail)

    def _named(self, rank: int, why: str) -> str:
        host, store = self._control.host_of(rank), self._control.store_address
        seen = "" if why else f"not seen at the store{f' {store}' if store else ''}"
        inside = "; ".join(part for part in (host, seen) if part)
        return f"rank {rank}" + (f" ({inside})" if inside else "") + (f" {why}" if why else "")

    def _told_by_the_lowest(self) -> tuple[int, dict[int, str]] | None:
        value = self._client.read(self._key)
        with suppress(MetadataError, ValueError, TypeError):
            if value is not None:
                count, waiting = json.loads(self._scope.unseal(value, "absent", _LIMIT_NBYTES))
                return int(count), {int(rank): str(why) for rank, why in waiting}
        return None

    @property
    def _scope(self) -> MessageScope:
        return MessageScope(self._meeting.name, self._meeting.members[0], 0, 0)

    @property
    def _key(self) -> str:
        return f"meet/absent/{self._meeting.members[0]}"


def _span(members: tuple[int, ...]) -> str:
    if len(members) > _NAMED and members == tuple(range(members[0], members[0] + len(members))):
        return f"{members[0]} to {members[-1]}"
    return str(list(members))
