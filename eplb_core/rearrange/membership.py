"""What a communicator does when its group or its weights change; the part of its face that is about that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eplb_core.errors import PlanError
from eplb_core.rearrange.begin import poisoning
from eplb_core.rearrange.inheritance import Inheritance
from eplb_core.rearrange.succession import arguments_of, check_succession

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from typing_extensions import Self

    from eplb_core.control.plane import ControlPlane
    from eplb_core.rearrange.lives import Lives
    from eplb_core.rearrange.state import CommunicatorState
    from eplb_core.report import RearrangeReport
    from eplb_core.weights.host_landing import Landing


class ChangingMembers:
    """Base of `Communicator`: other members, a larger or smaller group, weights that sleep."""

    _lives: Lives
    _state: CommunicatorState

    def connect(self, timeout_s: float | None = None) -> None:
        """See `Communicator.connect`."""
        raise NotImplementedError

    def close(self, force: bool = False) -> None:
        """See `Communicator.close`."""
        raise NotImplementedError

    def successor(
        self,
        control: ControlPlane,
        rank_mapping: Mapping[int, int] | Sequence[int],
        weights: Sequence[Sequence[torch.Tensor | Sequence[torch.Tensor]]] | None = None,
        timeout_s: float | None = None,
        *,
        device_group: Any = None,
        landing: Landing | None = None,
        observers: Sequence[object] = (),
    ) -> Self:
        """Build the same communicator over a larger or smaller group, connected and warm; this one goes on meanwhile.

        Collective over the new group: ranks that go on call this, new ranks build a `Communicator` of the same name and
        call its `connect`. Ranks that leave do neither. Where it fails, this communicator is as it was. Any thread may
        call it, also while another one rearranges; this communicator is the host's to close, once the successor is
        in use.

        Parameters
        ----------
        control : ControlPlane
            Over another store than this communicator's, or a PrefixStore of its own in it; new numbers.
        rank_mapping : mapping of int to int, or sequence of int
            New rank of every old rank; -1 for one that leaves. `eplb_core.translate_map` translates maps with it.
        weights : sequence of sequence of torch.Tensor or None
            See `Communicator`; None takes this communicator's.
        timeout_s : float or None
            Limit, seconds; the configuration's by default.
        device_group : ProcessGroup or None
            The host's group of the new ranks, for backends that use one.
        landing : as in `Communicator`, or None
            Landing rows of the host's own, others than this communicator's.
        observers : sequence of object
            See `Communicator`.

        Returns
        -------
        Communicator
            Its first rearrangement, or `LoadBalancer.adopt`, takes the host's map for the slots of new ranks; for all
            others it must be what this communicator holds then.

        Raises
        ------
        ConfigError
            The backend is not elastic_safe (EPLB-C005), or an argument does not fit (EPLB-C010).
        PlanError
            The mapping is none (EPLB-P001).
        MetadataError, TransferError
            The members do not fit together, or one did not come; see `connect`.
        """
        self._state.check_usable()
        setup = self._lives.setup
        mapping = check_succession(self._lives, setup, control, rank_mapping)
        arguments = arguments_of(setup) | ({} if weights is None else {"weights": weights})
        more = {"device_group": device_group, "landing": landing, "observers": observers, "stream": setup.streams.side}
        build: Callable[..., Self] = type(self)
        new = build(control=control, **arguments, **more)
        try:
            held, world_size = self._state.held, control.world_size
            new._state.held.inherited = Inheritance(held.known_map, mapping, held.num_local, world_size)
            new.connect(timeout_s)
        except BaseException:
            new.close(force=True)
            raise
        return new

    def suspend(self) -> None:
        """Deregister everything: weights may be freed, offloaded, moved, reloaded by a training loop. Local.

        From here to `resume` every use but `close` is refused (EPLB-T025). Members that go on meanwhile are told that
        this rank left. A `LoadBalancer` is closed first, or adopts the communicator once it is resumed.

        Raises
        ------
        PlanError
            A rearrangement is open (EPLB-P004).
        TransferError
            Landing memory may still be written, and too much is quarantined already (EPLB-T009).
        """
        with self._state.calling(), self._state.committing():
            self._state.check_open()
            if self._state.open is not None:
                raise PlanError("EPLB-P004", problem="suspend() while a rearrangement is open")
            self._lives.suspend()
            self._state.suspended = True

    def resume(
        self,
        weights: Sequence[Sequence[torch.Tensor]] | None = None,
        map: npt.ArrayLike | None = None,  # noqa: A002 - as every host calls it
        *,
        landing: Sequence[Sequence[torch.Tensor]] | None = None,
        device_group: Any = None,
    ) -> None:
        """Register again after `suspend`. Local; the members meet anew at the next rearrangement or `connect`.

        Parameters
        ----------
        weights : sequence of sequence of torch.Tensor or None
            As many layers and experts as before, wherever they are now. None takes the same tensor objects with the
            memory that they have now; they are not kept alive meanwhile.
        map : array-like of int, [num_moe_layers, num_physical_experts], or None
            What all rows hold, as in `Communicator.reloaded`; None: what they held before.
        landing : sequence of sequence of torch.Tensor or None
            New landing rows of the host, where it gave some.
        device_group : ProcessGroup or None
            A new one, for backends that use one.

        Raises
        ------
        PlanError
            It is not suspended (EPLB-P004), or the map has another shape (EPLB-P001).
        ConfigError, MetadataError
            The weights are gone, have another shape (EPLB-C010), or cannot be registered (EPLB-M001). It stays
            suspended.
        """
        with self._state.calling():
            self._state.check_not_closed()
            if not self._state.suspended:
                raise PlanError("EPLB-P004", problem="resume() without suspend()")
            if map is not None:
                self._state.held.reloaded(map)
            self._lives.resume(weights, landing, device_group)
            self._state.suspended = False
            self._state.new_epoch(self._state.epoch)

    def rebuild(
        self,
        timeout_s: float,
        control: ControlPlane | None = None,
        ranks: Sequence[int] | None = None,
        device_group: Any = None,
        landing: Landing | None = None,
    ) -> RearrangeReport:
        """Make the communicator usable again after a failure; collective over the ranks named.

        The members meet again and settle layers in doubt, so that all know the same placement; a new epoch begins with
        new connections. Ranks may call it at different times and unequally often: they meet at the first attempts that
        overlap.

        Parameters
        ----------
        timeout_s : float
            Limit, seconds.
        control : ControlPlane or None
            A new one when the store was lost; ranks keep their numbers.
        ranks : sequence of int or None
            Members from now on, this rank among them; None keeps the members. Map columns keep their numbers; those of
            ranks that take no part become -1.
        device_group : ProcessGroup or None
            A new one, for backends that use one.
        landing : as in `Communicator`, or None
            New landing rows, needed if those the host gave are quarantined.

        Returns
        -------
        RearrangeReport
            The placement that holds on all members.

        Raises
        ------
        TransferError
            Too much landing memory is quarantined (EPLB-T009), or a member did not come (EPLB-T023).
        """
        with self._state.calling():
            self._lives.renew(control=control, ranks=ranks, device_group=device_group, landing=landing)
            with poisoning(self._lives, self._state, "rebuild"):
                self._lives.enter(timeout_s, everyone=False)
            return self._state.report()
