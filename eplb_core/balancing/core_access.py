"""What balancing needs of a communicator beyond its face, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from eplb_core.balancing.comparison import difference
from eplb_core.control.store import StoreGone
from eplb_core.errors import ConfigError, PlanError, error_for
from eplb_core.rearrange.background_moves import BackgroundMoves
from eplb_core.rearrange.begin import begin, poisoning
from eplb_core.wire.ballots import Ballot, Decision

if TYPE_CHECKING:
    from eplb_core.arrays import IntArray
    from eplb_core.communicator import Communicator
    from eplb_core.config import EPLBConfig
    from eplb_core.control.store import StoreClient
    from eplb_core.errors import EplbError
    from eplb_core.rearrange.epoch import Epoch
    from eplb_core.rearrange.rearrangement import Rearrangement
    from eplb_core.voting.diagnosis import Diagnosis
    from eplb_core.voting.members import Members


_LEAVE_LIMIT_S = 10.0

_CLAIMED: WeakSet[Communicator] = WeakSet()
"""Communicators that a load balancer uses."""


class _Refusing:
    """A map that cannot be read, for a reason that every rank is told."""

    def __init__(self, refusal: EplbError) -> None:
        self._refusal = refusal

    def __array__(self, *_: object, **__: object) -> IntArray:
        raise self._refusal


class CoreAccess:
    """A communicator, as the load balancer sees it.

    Parameters
    ----------
    communicator : Communicator
        The host's; connected before anything here is asked.
    config : EPLBConfig
        The load balancer's.
    """

    def __init__(self, communicator: Communicator, config: EPLBConfig) -> None:
        self.communicator = communicator
        self.config = config
        self.timeout_s = float(config.timeout_s)
        self._worked_in = 0
        self.life = ""
        """Names this load balancer among those that used the same epoch; the same on all members."""

    def connect(self, placement: IntArray, given: Mapping[str, Any]) -> None:
        """Take the communicator, connect it, and compare what the hosts gave; collective.

        Parameters
        ----------
        placement : IntArray, [num_moe_layers, num_physical_experts]
            What the rows hold.
        given : Mapping
            What must be the same on all ranks; see `given_here`.

        Raises
        ------
        ConfigError
            Another load balancer has it, or the ranks were given different things (EPLB-C015).
        PlanError
            The maps differ (EPLB-P003), or are not what the rows of a rank hold (EPLB-P008).
        """
        if self.communicator in _CLAIMED:
            problem = f"communicator {self.communicator.name!r} belongs to another LoadBalancer, which is not closed"
            raise ConfigError("EPLB-C015", problem=problem)
        _CLAIMED.add(self.communicator)
        try:
            self.communicator.connect()
            # Connecting is collective, so all members count it alike, whatever the one before left half done.
            self.life = f"{self.members.generation}.{self._epoch.connects}"
            self._compare(self._not_held(placement), given)
            self.note_epoch()
            self._note_held(placement)
        except BaseException:
            self.release()
            raise

    def _not_held(self, placement: IntArray) -> EplbError | None:
        held = self.communicator._state.held
        differs = held.first_difference(placement, self.members.members)
        if differs is None:
            return None
        layer, slot = differs
        given, holds = int(placement[layer, slot]), int(held.map[layer, slot])
        return PlanError("EPLB-P008", rank=self.rank, layer=layer, slot=slot, held=holds, given=given)

    def _note_held(self, placement: IntArray) -> None:
        """What all ranks gave, and none knew better, holds from now on: a rebuild before the first move keeps it."""
        held = self.communicator._state.held
        if not held.known or held.newcomers:
            self.communicator.reloaded(placement)

    def note_epoch(self) -> None:
        """The load balancer works in the present epoch."""
        self._worked_in = self.communicator.epoch

    def _compare(self, refusal: EplbError | None, given: Mapping[str, Any]) -> None:
        """Raise, on all ranks the same, where one of them cannot take part or differs from the others."""
        members = self.members
        vote = members.vote(f"given/{self.life}", "the load balancer, phase connect", generation=0)

        def compared(ballots: Mapping[int, Ballot]) -> Decision:
            differs = difference({rank: ballot.content for rank, ballot in ballots.items()})
            return Decision(differs is None, members.rank, differs)

        with poisoning(self.communicator._lives, self.communicator._state, "connect"):
            if refusal is None:
                vote.cast(Ballot(True, content=given), compared)
                decision = self.watch.decide(vote, timeout_s=self.timeout_s)
            else:
                decision = vote.abort(refusal)
            members.keys.forget_later([vote])
        if not decision.commit:
            raise decision.error or error_for("EPLB-T007", rank=decision.by, where=vote.where, reason="not said")

    def release(self) -> None:
        """Give it back."""
        _CLAIMED.discard(self.communicator)

    @property
    def is_inherited(self) -> bool:
        """Is this a forked child of the process that built it? Then threads and locks are not this one's."""
        return self.communicator._state.forked

    def check_open(self) -> None:
        """Refuse a communicator that is closed (EPLB-T008) or another process's (EPLB-T013)."""
        self.communicator._state.check_open()

    # --- who and how many ---------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank."""
        return self._epoch.rank

    @property
    def is_lowest_member(self) -> bool:
        """Is this the rank that speaks for all?"""
        return self.rank == self._epoch.asked[0]

    @property
    def world_size(self) -> int:
        """Ranks of the group, absent ones included."""
        return self._epoch.control.world_size

    @property
    def num_layers(self) -> int:
        """Layers that are registered."""
        return len(self._epoch.setup.layout.geometries)

    @property
    def num_local_physical_experts(self) -> int:
        """Slots of a rank."""
        return self._epoch.setup.layout.num_local_physical_experts

    @property
    def nodes(self) -> tuple[int, ...] | None:
        """Host number of every rank, when the members are on more than one host."""
        return self._epoch.nodes

    def nbytes_of_expert(self, layer: int) -> int:
        """Bytes of one expert's rows in a layer."""
        geometry = self._epoch.setup.layout.geometries[layer]
        return int(geometry.nbytes[geometry.moving].sum())

    # --- talking with the members -------------------------------------------------------------------------------------

    @property
    def members(self) -> Members:
        """Of the present epoch."""
        return self._epoch.entered[0]

    @property
    def dead(self) -> tuple[int, ...]:
        """Members of the present epoch that are gone; none where they have not met."""
        members = self._epoch.members
        return () if members is None else members.dead

    @property
    def watch(self) -> Diagnosis:
        """This rank's watch over them."""
        return self._epoch.entered[1]

    def key(self, name: str) -> str:
        """Return a key of the store that no other load balancer of this epoch has."""
        return self.members.key(f"balancing/{self.life}/{name}")

    def check_members(self, where: str) -> None:
        """Raise when a member is gone or has left, or when another thread closes the communicator."""
        leaving, ring = self.communicator._state.leaving(), self.members.ring
        if leaving is not None:
            raise leaving
        dead = ring.poll() if ring is not None else None
        if dead is not None:
            raise error_for("EPLB-T003", rank=dead, where=where)
        if ring is not None and ring.departed:
            raise error_for("EPLB-T007", rank=min(ring.departed), where=where, reason="it left this epoch")

    def leave(self) -> None:
        """Bring the members to one generation again: their workers stopped at different moments; collective, bounded.

        Where they do not come together, the communicator is to be rebuilt before it is used again.
        """
        anew = self._epoch.members is None or self.communicator.epoch != self._worked_in
        if not self.communicator.usable or anew:
            return  # it is to be rebuilt, or was: a new epoch begins with equal generations
        state, members = self.communicator._state, self.members

        def latest(ballots: Mapping[int, Ballot]) -> Decision:
            generations = [int(ballot.content["generation"]) for ballot in ballots.values()]
            return Decision(True, members.rank, content={"generation": max(generations)})

        vote = members.vote(f"leave/{self.life}", "the load balancer, phase close", generation=0)
        reason = "the ranks did not close their LoadBalancers together"
        try:
            vote.cast(Ballot(True, content={"generation": members.generation}), latest)
            decision = self.watch.decide(vote, timeout_s=min(self.timeout_s, _LEAVE_LIMIT_S))
            if decision.commit:
                members.generation = int(decision.content["generation"])
                members.keys.forget_later([vote])
                return
        except StoreGone as gone:
            reason = f"the store is lost: {gone}"
        except BaseException:  # Ctrl-C: nobody knows which generation the others go on with
            state.poison(error_for("EPLB-T021", reason="closing the LoadBalancer was interrupted"), "close")
            raise
        state.poison(error_for("EPLB-T021", reason=reason), "close")

    def open_client(self, timeout_s: float) -> StoreClient:
        """Open a connection to the store for a thread of its own."""
        return self._epoch.control.client(f"eplb/{self.communicator.name}", timeout_s)

    def mark(self) -> Any:
        """Record an event on the caller's current stream; None on the host."""
        return self._epoch.setup.streams.mark()

    def settle(self, events: list[Any]) -> None:
        """Wait, within the limit, until events have happened on the device."""
        self._epoch.setup.streams.wait_for(events)

    def begin(self, old_map: IntArray, new_map: IntArray, refusal: EplbError | None = None) -> BackgroundMoves:
        """Begin a rearrangement, or tell the others, where they agree on it, why this rank does not want it."""
        given = old_map if refusal is None else _Refusing(refusal)
        lives, state = self.communicator._lives, self.communicator._state
        with state.calling():
            return begin(lives, state, given, new_map, kind=BackgroundMoves)

    def end(self, rearrangement: Rearrangement) -> None:
        """End a rearrangement all of whose layers were staged; one that a dead worker left in between stays open."""
        if self.communicator._state.open is rearrangement:
            with suppress(PlanError):
                rearrangement.end()

    def take_backend(self, name: str) -> None:
        """Use another backend from the next `rebuild` on, the same on every rank; EplbError where it cannot be used."""
        self.communicator._lives.take_backend(name)

    @property
    def _epoch(self) -> Epoch:
        return self.communicator._lives.epoch
