"""What balancing needs of a communicator beyond its face, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eplb_core.rearrange.setup import set_up

if TYPE_CHECKING:
    from eplb_core.communicator import Communicator
    from eplb_core.control.store import StoreClient
    from eplb_core.rearrange.epoch import Epoch
    from eplb_core.rearrange.rearrangement import Rearrangement
    from eplb_core.voting.diagnosis import Diagnosis
    from eplb_core.voting.members import Members
    from eplb_core.voting.vote import Vote
    from eplb_core.wire.ballots import Ballot, Decision


class CoreAccess:
    """A communicator, as the load balancer sees it.

    Parameters
    ----------
    communicator : Communicator
        Connected.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    # --- who and how many ---------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank."""
        return self._epoch.rank

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
    def watch(self) -> Diagnosis:
        """This rank's watch over them."""
        return self._epoch.entered[1]

    def open_client(self, timeout_s: float) -> StoreClient:
        """Open a connection to the store for a thread of its own."""
        return self._epoch.control.client(f"eplb/{self.communicator.name}", timeout_s)

    def mark(self) -> Any:
        """Record an event on the caller's current stream; None on the host."""
        return self._epoch.setup.streams.mark()

    def settle(self, events: list[Any]) -> None:
        """Wait, within the limit, until events have happened on the device."""
        self._epoch.setup.streams.settle(events)

    def landed_vote(self, rearrangement: Rearrangement, layer: int) -> Vote:
        """Make the vote whose ballots are the landed ones; its keys go when those of the layer's vote go."""
        vote = self.members.vote(f"{layer}/landed", f"layer {layer}, phase landed")
        rearrangement._moving.votes.append(vote)
        return vote

    def tally(self, rearrangement: Rearrangement, layer: int, ballots: Mapping[int, Ballot]) -> Decision:
        """Let the core and the observers of this rank look at the landed ballots of all."""
        return rearrangement._tally(rearrangement._moving.started[layer], ballots)

    def accept(self, rearrangement: Rearrangement, layer: int) -> None:
        """Note, from the engine's thread, that a layer is decided which a worker that is dead did not note."""
        moving = rearrangement._moving.started.get(layer)
        if moving is not None:
            rearrangement._moving.note_decided(moving)

    def is_accepted(self, rearrangement: Rearrangement, layer: int) -> bool:
        """Has the core noted that a layer is decided?"""
        return layer in rearrangement._moving.decided

    # --- another backend ----------------------------------------------------------------------------------------------

    def take_backend(self, name: str) -> None:
        """Use another backend from the next `rebuild` on; the same on every rank.

        Raises
        ------
        EplbError
            It cannot be used for these weights, or on this machine.
        """
        lives, config = self.communicator._lives, self.communicator.config
        before = lives._setup
        setup = set_up(
            config.model_copy(update={"communicator": name, "fallback": None}),
            before.layout,
            stream=before.streams.side,
            options=None,
            observers=before.observers,
            name=before.name,
        )
        lives._setup = setup
        self.communicator._state._backend = setup.info.name
        self.communicator._state._allocator = setup.allocator

    @property
    def _epoch(self) -> Epoch:
        return self.communicator._lives.epoch
