"""One epoch of a communicator: its backend, built and registered, its landing memory, and its council of members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eplb_core.backend import BackendContext, Buffers
from eplb_core.control.plane import ControlPlane
from eplb_core.memory.landing import LandingMemory
from eplb_core.rearrange.connect import Connection
from eplb_core.rearrange.hooks import BackendHooks
from eplb_core.rearrange.setup import Assembly
from eplb_core.voting.members import Council, refuse

if TYPE_CHECKING:
    import torch


class Session:
    """A backend, built and registered for one epoch, and the talk with its members.

    Parameters
    ----------
    assembly : Assembly
        What it is made of.
    control : ControlPlane
        The store, and this rank.
    epoch : int
        Its number.
    members : sequence of int
        Ranks that take part, ascending.
    device_group : ProcessGroup or None
        The host's, for backends that use one.
    host_landing : list of list of torch.Tensor or None
        The host's own landing rows.

    Raises
    ------
    EplbError
        The backend could not be built or refused the buffers; the members learn it at connect.
    """

    def __init__(
        self,
        assembly: Assembly,
        control: ControlPlane,
        epoch: int,
        members: Sequence[int],
        device_group: Any,
        host_landing: list[list[torch.Tensor]] | None,
    ) -> None:
        self.assembly = assembly
        self.control = control
        self.rank = control.rank
        self.epoch = epoch
        self.timeout_s = float(assembly.config.timeout_s)
        self._prefix = namespace(assembly.name, epoch)
        self.council = Council(
            control.client(self._prefix, self.timeout_s),
            name=assembly.name,
            rank=control.rank,
            epoch=epoch,
            members=members,
            timeout_s=self.timeout_s,
        )
        try:
            self._build(device_group, host_landing)
        except Exception as error:
            refuse(self.council.vote("records", "connect, phase records"), self.rank, error)
            raise
        self.connection = Connection(self)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that take part, ascending."""
        return self.council.members

    def _build(self, device_group: Any, host_landing: list[list[torch.Tensor]] | None) -> None:
        import torch

        made = self.assembly
        config, layout, cls = made.config, made.layout, made.backend_class
        self.landing = LandingMemory(
            layout,
            staging_layers=config.staging_layers,
            landing_layout=cls.landing_layout,
            landing_device=layout.device if cls.landing_device == "weights" else torch.device("cpu"),
            num_peers=len(self.members) - 1,
            allocator=made.allocator,
            host_landing=host_landing,
        )
        try:
            self._build_backend(device_group, host_landing)
        except BaseException:
            self.landing.release()  # nobody is connected who could write there
            raise

    def _build_backend(self, device_group: Any, host_landing: list[list[torch.Tensor]] | None) -> None:
        import torch.distributed as dist

        made = self.assembly
        config, layout, cls = made.config, made.layout, made.backend_class
        context = BackendContext(
            rank=self.rank,
            world_size=self.control.world_size,
            members=self.members,
            epoch=self.epoch,
            name=made.name,
            store=dist.PrefixStore(f"{self._prefix}/backend", self.control.connection()),
            device=layout.device,
            stream=made.streams.side,
            device_group=device_group,
            staging=made.allocator,
            staging_layers=config.staging_layers,
            timeout_s=self.timeout_s,
            host=self.control.host,
            cancelled=self.council.cancelled,
            max_ops_per_batch=config.max_ops_per_batch,
        )
        self.backend: Any = cls(made.options, context)
        self.hooks = BackendHooks(made.info.name, self.backend, made.observers)
        if getattr(self.backend, "needs_progress", True):
            self.council.pump = self.backend.progress
        buffers = Buffers(
            rows=layout.rows,
            landing=self.landing.slots,
            landing_rows=host_landing,
            send_nbytes=max(geometry.nbytes_rows for geometry in layout.geometries),
        )
        self.local = self.hooks.register_buffers(buffers)

    @property
    def coalesce_nbytes(self) -> int:
        """Rows below this travel packed, for backends that pack."""
        return int(getattr(self.backend, "coalesce_nbytes", 0))

    @property
    def shared_options(self) -> Mapping[str, str | int | float | bool]:
        """Options of the backend that must be equal on all ranks."""
        return dict(getattr(self.backend, "shared_options", {}))

    def backend_connected(self) -> bool:
        """Tell whether what ``exchange_metadata`` began is usable."""
        connected = getattr(self.backend, "connected", None)
        return True if connected is None else bool(connected())

    def close_backend(self, *, force: bool) -> bool:
        """Close the backend; True when landing memory is certainly not written any more."""
        return self.backend.close(force) is True


def namespace(name: str, epoch: int) -> str:
    """Return the store namespace of one epoch of a communicator; never used twice."""
    return f"eplb/{name}/{epoch}"
