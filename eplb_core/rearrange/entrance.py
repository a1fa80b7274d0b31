"""Entering an epoch: the members meet, close the ring, and learn what every row holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eplb_core.backend.toolkit import Deadline
from eplb_core.control.hosts import Location, node_ids, why_unreachable
from eplb_core.errors import EplbError, error_for
from eplb_core.errors.texts import describe
from eplb_core.rearrange import records, recovery
from eplb_core.rearrange.absence import Absence
from eplb_core.rearrange.epoch import Epoch
from eplb_core.rearrange.link import all_pairs, error_of, exchange, note_linked, vote_on
from eplb_core.voting.liveness import Ring
from eplb_core.voting.meeting import Meeting, contested_error, contested_member
from eplb_core.voting.members import Members
from eplb_core.voting.operations import Refusal, perform
from eplb_core.voting.roll import Joining, Roll
from eplb_core.voting.vote import Tally, Vote, all_agree
from eplb_core.wire.ballots import Ballot, Decision
from eplb_core.wire.envelope import MessageScope

if TYPE_CHECKING:
    from eplb_core.control.store import StoreClient
    from eplb_core.rearrange.held import HeldPlacement

_LONGEST_PAUSE_S = 10e-3


class Entrance:
    """Takes this rank into an epoch: a meeting, and one vote, before which the ring is closed and the placement known.

    Parameters
    ----------
    epoch : Epoch
        The epoch to enter; its backend is built and has its buffers.
    client : StoreClient
        In the namespace of the communicator.
    meeting : Meeting
        This rank's part in the meeting.
    held : HeldPlacement
        What this rank's rows hold.
    """

    def __init__(self, epoch: Epoch, client: StoreClient, meeting: Meeting, held: HeldPlacement) -> None:
        self._epoch = epoch
        self._client = client
        self._meeting = meeting
        self._held = held
        self._record = records.record_of(epoch)
        self._absence = Absence(meeting, client, epoch.control)
        self._members: Members | None = None
        self._ring: Ring | None = None
        self._vote: Vote | None = None

    def enter(self, timeout_s: float, *, everyone: bool) -> None:
        """Meet and join; with `everyone`, also link the backends of all members. Collective.

        Raises
        ------
        MetadataError
            The members do not fit together, or one could not take part.
        StalledError, PeerLostError
            A member did not come, or died.
        """
        deadline = Deadline(timeout_s)
        try:
            roll, decision = perform(
                self._meeting.attending(lambda roll: self._join(roll, everyone)), self._client, self._pause(deadline)
            )
        except EplbError as error:
            self._abandon()
            stands = self._vote.decision if self._vote is not None else None
            if self._members is not None and stands is not None and stands.error is error:
                raise records.told_here(self._members, self._record, stands) from error
            raise
        except BaseException:
            self._abandon()
            raise
        self._joined(roll, decision, max(1.0, deadline.left_s))

    # --- the meeting -------------------------------------------------------------------------------------------------

    def _join(self, roll: Roll, everyone: bool) -> Joining:
        """Join a roll: listen for the neighbour, publish this rank's record and what it knows of layers in doubt."""
        epoch, control = self._epoch, self._epoch.control
        self._abandon()
        scope = MessageScope(self._meeting.name, self._meeting.rank, roll.epoch, 0)
        members = Members(
            self._client, scope, members=roll.members, namespace=roll.namespace, timeout_s=epoch.timeout_s
        )
        self._members = members
        self._ring = Ring(
            control.host,
            name=members.name,
            rank=members.rank,
            epoch=roll.epoch,
            members=roll.members,
            ports=control.ports,
        )
        records.publish(members, self._record)
        content = {
            "digest": self._record.shared_digest().hex(),
            "location": control.location.to_json(),
            "port": self._ring.port,
            "known": recovery.known_of(self._held),
            "everyone": everyone,
        }
        self._vote = members.vote("meet", "connect, phase meeting")
        return Joining(self._vote, Ballot(True, content=content), lambda ballots: self._tally(members, ballots))

    @staticmethod
    def _tally(members: Members, ballots: Mapping[int, Ballot]) -> Decision:
        decision = all_agree(members.rank)(ballots)
        if not decision.commit:
            return decision
        differs = records.first_difference(members, ballots)
        if differs is not None:
            return differs
        places = {rank: Location.from_json(ballot.content["location"]) for rank, ballot in ballots.items()}
        problem = why_unreachable(places)
        if problem is not None:
            return Decision(False, members.rank, error_for("EPLB-C009", problem=problem))
        return Decision(
            True,
            members.rank,
            content={
                "boots": {str(rank): place.boot_id for rank, place in places.items()},
                "addresses": {str(rank): [places[rank].host, ballots[rank].content["port"]] for rank in ballots},
                "forward": recovery.to_roll_forward(ballots),
                "everyone": any(ballot.content["everyone"] for ballot in ballots.values()),
            },
        )

    def _pause(self, deadline: Deadline) -> Any:
        pause_s = 100e-6

        def pause() -> Refusal | None:
            nonlocal pause_s
            leaving = self._epoch.leaving()
            if leaving is not None:
                return Refusal(leaving)
            self._absence.tell()
            if deadline.over:
                return Refusal(self._meeting.stalled or self._nobody_came(deadline))
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
            return None

        return pause

    def _nobody_came(self, deadline: Deadline) -> EplbError:
        joined = self._vote is not None and not self._meeting.waiting_for
        return self._absence.error(deadline.timeout_s, self._vote.missing() if self._vote and joined else [])

    def _abandon(self) -> None:
        if self._ring is not None:
            self._ring.close(goodbye=False)
            self._ring = None

    # --- joining -----------------------------------------------------------------------------------------------------

    def _joined(self, roll: Roll, decision: Decision, timeout_s: float) -> None:
        epoch, members, ring = self._epoch, self._members, self._ring
        if members is None or ring is None:
            raise RuntimeError("a meeting ended without a roll")
        prefix = f"{self._client.prefix}/{members.namespace}/backend"
        epoch.met(members, epoch.control.client(prefix, epoch.timeout_s))
        members.ring = ring
        content = decision.content
        boots = [str(content["boots"].get(str(rank), "")) for rank in range(epoch.control.world_size)]
        nodes = node_ids(boots)
        epoch.nodes = nodes if len({nodes[rank] for rank in members.members}) > 1 else None
        try:
            self._held.roll_forward(content["forward"])
        except BaseException as error:
            reason = describe(error)
            raise error_for("EPLB-T006", layer="in doubt", rank=members.rank, reason=reason) from error
        recovery.publish_held(members, self._held)
        vote = members.vote("join", "connect, phase join")
        ballot = Ballot(True, content={"held": self._held.digest(members.members)})

        def ready() -> None:
            if len(members.members) > 1:
                host, port = content["addresses"][str(ring.right)]
                ring.connect((str(host), int(port)), timeout_s, give_up=lambda: _refusal(vote))
            if content["everyone"]:
                exchange(epoch, vote, _others(members), Deadline(timeout_s))

        decision = vote_on(epoch, vote, ready, ballot, timeout_s, _tally_joined(members, roll))
        if content["everyone"]:
            note_linked(epoch, all_pairs(members.members))
        recovery.settle_held(members, self._held, {int(r): str(d) for r, d in decision.content["held"].items()})


def _tally_joined(members: Members, roll: Roll) -> Tally:
    rank = members.rank

    def tally(ballots: Mapping[int, Ballot]) -> Decision:
        decision = all_agree(rank)(ballots)
        if not decision.commit:
            return decision
        contested = contested_member(members.client, roll)
        if contested is not None:
            return Decision(False, rank, contested_error(members.name, contested))
        return Decision(True, rank, content={"held": {str(r): b.content["held"] for r, b in ballots.items()}})

    return tally


def _others(members: Members) -> list[int]:
    return [rank for rank in members.members if rank != members.rank]


def _refusal(vote: Vote) -> EplbError | None:
    decision = vote.poll()
    return None if decision is None or decision.commit else error_of(decision)
