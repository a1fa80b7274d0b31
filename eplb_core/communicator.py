"""The communicator, which a host engine embeds: it chooses a backend, registers the weights, and rearranges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy.typing as npt

from eplb_core.config import EPLBConfig
from eplb_core.control.plane import ControlPlane
from eplb_core.errors import EplbError
from eplb_core.rearrange.begin import begin, connect
from eplb_core.rearrange.held import HeldPlacement
from eplb_core.rearrange.lives import Lives
from eplb_core.rearrange.membership import ChangingMembers
from eplb_core.rearrange.rearrangement import Rearrangement
from eplb_core.rearrange.setup import check_arguments, set_up
from eplb_core.rearrange.state import CommunicatorState
from eplb_core.report import RearrangeReport
from eplb_core.sources.provider import SourceProvider, checked_sources
from eplb_core.weights.layout import build_layout

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from eplb_core.weights.host_landing import Landing


class Communicator(ChangingMembers):
    """Moves expert weights between the ranks of an expert-parallel group.

    Built on every rank, at any time; connects at the first rearrangement. One thread at a time; commits from another.

    Parameters
    ----------
    config : EPLBConfig
        Backend, limits, staging.
    weights : sequence of sequence of torch.Tensor, or of sequence of torch.Tensor
        ``[num_moe_layers][num_tensors]``, first axis the local physical expert, or a list with a tensor per expert; see
        `eplb_core.weights.layout.build_layout`. Their memory is held until `close`.
    control : ControlPlane
        The store, and the number of this rank.
    device_group : torch.distributed.ProcessGroup or None
        The host's group of the weights' device, for backends that use one.
    stream : torch.Stream or None
        Device stream for the backend's copies; None is one of the core's own.
    options : Mapping or pydantic.BaseModel or None
        Options of the backend.
    observers : sequence of object
        Wrapper implementations of the backend's hooks, and of ``observe``, for this communicator alone.
    landing : sequence of sequence of torch.Tensor, or ("if possible", such a sequence), or None
        The host's own landing rows, at most ``[staging_layers][num_tensors]``, shaped like one layer's weights; the
        core adds the slots that are missing. Only for backends with "rows" landing: others refuse them, or, with "if
        possible", use memory of the core's own and say so in the log.
    tensor_names : sequence or None
        ``[num_tensors]`` or ``[num_moe_layers][num_tensors]``, for messages and metadata keys.
    name : str
        Tells communicators of one control plane apart; equal on all ranks.
    sources : sequence of SourceProvider
        Where experts come from that no live rank holds: see `eplb_core.sources`. Asked in this order.

    Raises
    ------
    ConfigError, DiscoveryError, MetadataError
        Arguments do not fit; the other ranks are told when they meet.
    """

    def __init__(  # noqa: PLR0913 - a host's choices, most of them by name
        self,
        config: EPLBConfig,
        weights: Sequence[Sequence[torch.Tensor | Sequence[torch.Tensor]]],
        control: ControlPlane,
        device_group: Any = None,
        stream: Any = None,
        options: Mapping[str, Any] | BaseModel | None = None,
        observers: Sequence[object] = (),
        landing: Landing | None = None,
        tensor_names: Sequence[str] | Sequence[Sequence[str]] | None = None,
        name: str = "default",
        sources: Sequence[SourceProvider] = (),
    ) -> None:
        check_arguments(config, control, observers, name)
        given = checked_sources(sources)
        self.name = name
        self.config = config
        self._lives = lives = Lives(control, name, float(config.timeout_s), device_group)
        with lives.telling_the_others():
            layout = build_layout(weights, tensor_names)
            setup = set_up(
                config, layout, stream=stream, options=options, observers=observers, name=name, sources=given
            )
            lives.host_landing = setup.take_landing(landing)
            num_local, num_experts = layout.num_local_physical_experts, layout.shared.num_experts
            held = HeldPlacement(layout.num_layers, control.world_size, num_local, num_experts)
            self._state = CommunicatorState(name, setup.info.name, held, setup.allocator)
            lives.begin(setup, self._state)
        lives.end_with(self)

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self._lives.epoch.setup.info.name

    @property
    def epoch(self) -> int:
        """Number of the epoch; it rises with every meeting, and is 0 before the first."""
        return self._state.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that take part, ascending."""
        return self._lives.epoch.asked

    @property
    def report(self) -> RearrangeReport:
        """The placement that holds now, and what the last rearrangement did."""
        return self._state.report()

    @property
    def poisoned(self) -> EplbError | None:
        """The failure after which every use is refused until `rebuild`, or None."""
        return self._state.poisoned

    @property
    def usable(self) -> bool:
        """Is the communicator usable: neither poisoned nor closed, nor suspended?"""
        return not (self._state.closed or self._state.poisoned or self._state.suspended)

    # --- rearranging -------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float | None = None) -> None:
        """Connect to every member now instead of at the first rearrangement; collective.

        Parameters
        ----------
        timeout_s : float or None
            Limit, seconds; the configuration's by default.

        Raises
        ------
        MetadataError, TransferError
            The members do not fit together; one did not come, or could not be reached.
        """
        limit_s = float(self.config.timeout_s) if timeout_s is None else timeout_s
        with self._state.calling():
            connect(self._lives, self._state, limit_s)

    def rearrange(
        self, old_map: npt.ArrayLike, new_map: npt.ArrayLike, *, missing: Literal["raise", "report"] = "raise"
    ) -> RearrangeReport:
        """Bring all layers from one placement to another; collective and synchronous.

        Parameters
        ----------
        old_map, new_map : array-like of int, [num_moe_layers, num_physical_experts]
            Logical expert of every physical slot; -1 is an empty slot. Equal on all ranks. Once a first rearrangement
            was agreed, `old_map` must equal ``report.physical_to_logical_map``.
        missing : {"raise", "report"}
            What becomes of experts that no live rank and no source has: an error on every rank before a byte moves
            (EPLB-P002), or their slots stay as they are and ``report.unmet`` lists them. Equal on all ranks.

        Raises
        ------
        PlanError, MetadataError
            Before a byte moves, on every rank.
        TransferError
            A layer was aborted on every rank; ``.report`` holds the placement.
        """
        self.begin(old_map, new_map, missing=missing).run()
        return self._state.report()

    def begin(
        self,
        old_map: npt.ArrayLike,
        new_map: npt.ArrayLike,
        *,
        layer: int | None = None,
        layers: Sequence[int] | None = None,
        missing: Literal["raise", "report"] = "raise",
    ) -> Rearrangement:
        """Agree on a rearrangement that the host then runs layer by layer; collective.

        Parameters
        ----------
        old_map, new_map, missing
            See `rearrange`; with `layer` one row, [num_physical_experts], with `layers` a row for each, or all rows.
        layer, layers : int, or sequence of int, or None
            The only layer that moves, at the cost of one row, or the only ones, ascending.

        Returns
        -------
        Rearrangement
            ``for layer in gen.layers: gen.stage(layer); gen.commit(layer)``, then ``gen.end()``.

        Raises
        ------
        PlanError, MetadataError, TransferError
            See `rearrange`.
        """
        asked = layers if layer is None else layer if layers is None else [layer, layers]  # both is refused, by all
        with self._state.calling():
            return begin(self._lives, self._state, old_map, new_map, asked, missing)

    def reloaded(self, physical_to_logical_map: npt.ArrayLike) -> None:
        """Declare what all rows hold after the host rewrote the weights. Local; compared at the next begin.

        Parameters
        ----------
        physical_to_logical_map : array-like of int, [num_moe_layers, num_physical_experts]
            Placement of all ranks, as in `rearrange`.

        Raises
        ------
        PlanError
            The map has another shape (EPLB-P001), or a rearrangement is open (EPLB-P004).
        """
        with self._state.calling():
            self._state.check_between("reloaded()")
            self._state.held.reloaded(physical_to_logical_map)

    def trim(self) -> None:
        """Give landing memory back until the next rearrangement, which connects anew; on every rank alike, and local.

        Raises
        ------
        PlanError
            A rearrangement is open (EPLB-P004).
        """
        with self._state.calling():
            self._state.check_usable()
            self._state.check_between("trim()")
            self._lives.trim()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, force: bool = False) -> None:
        """Release everything. Without `force`, the rank that hosts the store stays until all have said goodbye.

        Decided layers are committed first, as the other ranks commit them. A call of another thread gives up as if this
        rank had failed, and `close` waits for it.

        Parameters
        ----------
        force : bool
            Local and bounded (under 2 s): the others see this rank leave without a goodbye.

        Raises
        ------
        CommitError
            The commit of a decided layer failed; everything was released nevertheless.
        PlanError
            A call of another thread did not return in time, or this thread is inside one: EPLB-P004; nothing released.
        """
        if not (self._state.closed or self._state.forked):
            self._lives.end(force=force)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(force=error is not None)
