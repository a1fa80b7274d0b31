"""One epoch of a communicator: its backend, its landing memory, and the members once they have met."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eplb_core.backend import BackendContext, Buffers, Cancelled
from eplb_core.errors import EplbError
from eplb_core.memory.landing import LandingMemory
from eplb_core.rearrange.hooks import BackendHooks
from eplb_core.voting.diagnosis import Diagnosis
from eplb_core.voting.members import Members

if TYPE_CHECKING:
    from eplb_core.control.plane import ControlPlane
    from eplb_core.control.store import StoreClient
    from eplb_core.rearrange.setup import Setup


class Epoch:
    """The backend and landing memory of one epoch, and the connection to its members.

    Parameters
    ----------
    setup : Setup
        Backend class, options, layout and allocator.
    control : ControlPlane
        The store, and the number of this rank.
    members : sequence of int
        Ranks that are to take part, ascending.
    device_group : ProcessGroup or None
        The host's, for backends that use one.
    host_landing : list of list of torch.Tensor or None
        The host's own landing rows.
    leaving : callable
        Returns the reason to give up, once another thread closes the communicator.

    Attributes
    ----------
    members : Members or None
        The members, once they have met; None before.
    watch : Diagnosis or None
        This rank's watch over them.
    nodes : tuple of int or None
        Host number of every rank, when the members are on more than one host.
    linked : ndarray of bool, [world_size, world_size]
        Pairs (low, high) whose backends are connected.
    exchanged : bool
        Has ``exchange_metadata`` been called?
    retired : bool
        Has the epoch ended?
    connects : int
        Calls of ``connect`` in the current generation; equal on all members.

    Raises
    ------
    EplbError
        The backend could not be built or refused the buffers.

    Notes
    -----
    Building an epoch is local. Ranks may build theirs minutes apart and meet later.
    """

    def __init__(
        self,
        setup: Setup,
        control: ControlPlane,
        members: Sequence[int],
        device_group: Any,
        host_landing: list[list[torch.Tensor]] | None,
        leaving: Callable[[], EplbError | None],
    ) -> None:
        self.setup = setup
        self.control = control
        self.rank = control.rank
        self.asked = tuple(members)
        self.timeout_s = float(setup.config.timeout_s)
        self.members: Members | None = None
        self.watch: Diagnosis | None = None
        self.nodes: tuple[int, ...] | None = None
        self.linked = np.zeros((control.world_size, control.world_size), dtype=bool)
        self.exchanged = False
        self.connects = 0
        self.leaving = leaving
        self._store: StoreClient | None = None
        self.retired = False
        cls, layout = setup.backend_class, setup.layout
        self.landing = LandingMemory(
            layout,
            staging_layers=setup.config.staging_layers,
            landing_layout=cls.landing_layout,
            landing_device=layout.device if cls.landing_device == "weights" else torch.device("cpu"),
            num_peers=max(len(self.asked) - 1, 1 if setup.sources else 0),
            allocator=setup.allocator,
            host_landing=host_landing,
        )
        try:
            self._build_backend(device_group)
        except BaseException:
            self.landing.release()  # no peer is connected yet that could write there
            raise

    def _build_backend(self, device_group: Any) -> None:
        setup = self.setup
        config, layout = setup.config, setup.layout
        self.context = BackendContext(
            rank=self.rank,
            world_size=self.control.world_size,
            members=self.asked,
            epoch=0,
            name=setup.name,
            store=None,
            device=layout.device,
            stream=setup.streams.side,
            device_group=device_group,
            staging=setup.allocator,
            staging_layers=config.staging_layers,
            timeout_s=self.timeout_s,
            host=self.control.host,
            cancelled=self.cancelled,
            max_ops_per_batch=config.max_ops_per_batch,
        )
        self.backend: Any = setup.backend_class(setup.options, self.context)
        self.hooks = BackendHooks(setup.info.name, self.backend, setup.observers)
        self.buffers = Buffers(
            rows=layout.rows,
            landing=self.landing.slots,
            landing_rows=self.landing.rows,
            send_nbytes=max((geometry.nbytes_rows for geometry in layout.geometries), default=0),
        )
        self.local = self.hooks.register_buffers(self.buffers)

    # --- once they have met ------------------------------------------------------------------------------------------

    def met(self, members: Members, store: StoreClient) -> None:
        """Note that the members have met: the epoch gets its number, the backend its own connection to the store."""
        self.members = members
        self._store = store
        self.watch = Diagnosis(members, self.leaving)
        if getattr(self.backend, "needs_progress", True):
            members.pump = self.backend.progress
        self.context.begin(members.epoch, store.store)

    @property
    def entered(self) -> tuple[Members, Diagnosis]:
        """Return the members and the watch over them; they must have met."""
        if self.members is None or self.watch is None:
            raise RuntimeError("the members have not met")
        return self.members, self.watch

    @property
    def number(self) -> int:
        """Number of the epoch; 0 before the members have met."""
        return self.members.epoch if self.members is not None else 0

    def cancelled(self) -> Cancelled | None:
        """Return why a backend's loop should give up, or None."""
        return self.watch.cancelled() if self.watch is not None else None

    # --- the backend -------------------------------------------------------------------------------------------------

    @property
    def coalesce_nbytes(self) -> int:
        """Size below which rows are packed into one message, for backends that pack."""
        return int(getattr(self.backend, "coalesce_nbytes", 0))

    @property
    def shared_options(self) -> Mapping[str, str | int | float | bool]:
        """Options of the backend that must be equal on all ranks."""
        return dict(getattr(self.backend, "shared_options", {}))

    def backend_connected(self) -> bool:
        """Return whether the connections that ``exchange_metadata`` began are usable."""
        connected = getattr(self.backend, "connected", None)
        return True if connected is None else bool(connected())

    def close_backend(self, *, force: bool, undrained: bool) -> bool:
        """Close the backend; True when it certainly no longer touches landing memory and live rows."""
        answer = self.backend.close(force)
        return answer is True or (answer is not False and not undrained)

    def let_go(self) -> None:
        """Drop every reference to landing memory and the store, so that both are freed without a garbage collection."""
        self.hooks.close()
        self.landing.let_go()
        self.buffers.landing.clear()
        self.context.begin(self.number, None)
        if self._store is not None:
            self._store.close()
