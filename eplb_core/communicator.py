"""The communicator: what a host engine embeds. It chooses a backend, registers the weights, and rearranges them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ValidationError

from eplb_core.allocation import build_allocator
from eplb_core.backend import BackendInfo
from eplb_core.config import EPLBConfig
from eplb_core.control import ControlPlane, StoreGone
from eplb_core.discovery import discover, load_target
from eplb_core.errors import ConfigError, DiscoveryError, EplbError, PlanError, TransferError, error_for
from eplb_core.generation import Generation
from eplb_core.layout import Layout, build_layout, check_landing
from eplb_core.ledger import Ledger
from eplb_core.metadata import map_digest
from eplb_core.plan import PlacementPlan, check_maps, plan_moves
from eplb_core.report import RearrangeReport
from eplb_core.selection import select
from eplb_core.session import Assembly, Session, landing_device, refuse
from eplb_core.settle import settle
from eplb_core.streams import Streams
from eplb_core.vote import Ballot, Vote

logger = logging.getLogger("eplb_core")

_CLOSE_FORCED_S = 1.0


class Communicator:
    """Moves expert weights between the ranks of an expert-parallel group.

    Built on every rank, at any time; it connects at the first rearrangement. One thread uses it at a time.

    Parameters
    ----------
    config : EPLBConfig
        Which backend, limits, staging.
    weights : sequence of sequence of torch.Tensor
        ``[num_moe_layers][num_tensors]``, first axis the local physical expert; see `eplb_core.layout.build_layout`.
        Their memory is held until `close`.
    control : ControlPlane
        This rank, and the store.
    device_group : torch.distributed.ProcessGroup or None
        The host's group of the weights' device, for backends that use one.
    stream : torch.Stream or None
        Device stream for the backend's copies; None is one of the core's own.
    options : Mapping or pydantic.BaseModel or None
        Options of the backend.
    observers : sequence of object
        Wrapper implementations of the backend's hooks, and of ``observe``, for this communicator alone.
    landing : sequence of sequence of torch.Tensor or None
        The host's own landing rows, ``[staging_layers][num_tensors]``, shaped like one layer's weights; only for
        backends with "rows" landing.
    tensor_names : sequence or None
        ``[num_tensors]`` or ``[num_moe_layers][num_tensors]``, for messages and metadata keys.
    name : str
        Tells communicators of one control plane apart; equal on all ranks.

    Raises
    ------
    ConfigError, DiscoveryError, MetadataError
        Nothing fits; the other ranks learn the reason when they connect.
    """

    def __init__(
        self,
        config: EPLBConfig,
        weights: Sequence[Sequence[torch.Tensor]],
        control: ControlPlane,
        device_group: Any = None,
        stream: Any = None,
        options: Mapping[str, Any] | BaseModel | None = None,
        observers: Sequence[object] = (),
        landing: Sequence[Sequence[torch.Tensor]] | None = None,
        tensor_names: Sequence[str] | Sequence[Sequence[str]] | None = None,
        name: str = "default",
    ) -> None:
        self.name = name
        self.config = config
        self._control = control
        self._device_group = device_group
        self._quarantine: list[Session] = []
        epoch = control.next_epoch(name)
        members = tuple(range(control.world_size))
        with _telling_the_others(control, name, epoch, members, float(config.timeout_s)):
            layout = build_layout(weights, tensor_names)
            self._assembly = _assemble(config, layout, stream, options, observers, name)
            if landing is not None and self._assembly.backend_class.landing_layout != "rows":
                problem = f"landing= was given, and {self._assembly.info.name} packs its landing memory"
                raise ConfigError("EPLB-C010", problem=problem)
            self._host_landing = None if landing is None else check_landing(landing, layout)
        self._ledger = Ledger(name, self._assembly.info.name, layout, self._assembly.allocator)
        self._ledger.epoch = epoch
        self._session = Session(self._assembly, control, epoch, members, device_group, self._host_landing)

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self._assembly.info.name

    @property
    def epoch(self) -> int:
        """Rises at connect and rebuild."""
        return self._ledger.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that take part, ascending."""
        return self._session.members

    @property
    def report(self) -> RearrangeReport:
        """What holds now, and what the last rearrangement did."""
        return self._ledger.report()

    # --- rearranging -------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float | None = None) -> None:
        """Connect to every member now instead of at the first rearrangement; collective.

        Parameters
        ----------
        timeout_s : float or None
            Limit, seconds; the configuration's by default.

        Raises
        ------
        MetadataError
            The members do not fit together.
        TransferError
            One did not come, or could not be reached.
        """
        limit_s = float(self.config.timeout_s) if timeout_s is None else timeout_s
        with self._ledger.reporting():
            self._ledger.check_usable()
            members = np.array(self._session.members, dtype=np.int64)
            low, high = np.triu_indices(len(members), k=1)
            pairs = np.stack([members[low], members[high]], axis=1)
            others = [rank for rank in self._session.members if rank != self._session.rank]
            self._connect(limit_s)
            self._link(pairs, others, limit_s)

    def rearrange(self, old_map: npt.ArrayLike, new_map: npt.ArrayLike) -> RearrangeReport:
        """Bring all layers from one placement to another; collective and synchronous.

        Parameters
        ----------
        old_map, new_map : array-like of int, [num_moe_layers, num_physical_experts]
            Logical expert of every physical slot; -1 is an empty slot. Equal on all ranks.

        Returns
        -------
        RearrangeReport

        Raises
        ------
        PlanError, MetadataError
            Before a byte moves, on every rank.
        TransferError
            A layer was aborted on every rank; ``.report`` says what holds.
        """
        self.begin(old_map, new_map).run()
        return self._ledger.report()

    def begin(self, old_map: npt.ArrayLike, new_map: npt.ArrayLike) -> Generation:
        """Agree on a rearrangement, to be done layer by layer; collective.

        Parameters
        ----------
        old_map, new_map
            See `rearrange`.

        Returns
        -------
        Generation
            ``for layer in gen.layers: gen.stage(layer); gen.commit(layer)``, then ``gen.end()``.

        Raises
        ------
        PlanError, MetadataError, TransferError
            See `rearrange`.
        """
        with self._ledger.reporting():
            self._ledger.check_usable()
            if self._ledger.open is not None:
                raise PlanError("EPLB-P004", problem="begin() while a generation is open")
            session = self._session
            # What the caller has enqueued (loading weights, the last commit's copies) is done before anyone reads.
            self._assembly.streams.synchronise(self._assembly.streams.mark())
            self._connect(self.config.timeout_s)
            session.generation += 1
            self._ledger.entered(session.epoch, session.generation)
            with self._ledger.phase("agree"):
                old, new, plan, refusal = self._plan(old_map, new_map)
                self._agree(old, new, refusal)
            if plan is None or old is None or new is None:
                raise refusal or error_for("EPLB-P001", problem="no plan")
            generation = Generation(session, plan, self._ledger)
            self._ledger.agreed(generation, old, new)
            with self._ledger.phase("connect"):
                self._link(plan.pairs, plan.peers(session.rank), float(self.config.timeout_s))
            return generation

    def _connect(self, timeout_s: float) -> None:
        try:
            self._session.connect(timeout_s)
        except StoreGone as gone:
            self._lost(gone, "connect")
        except EplbError as error:
            self._ledger.poison(error, "connect")
            raise

    def _link(self, pairs: npt.NDArray[np.int64], peers: Sequence[int], timeout_s: float) -> None:
        try:
            self._session.link(pairs, peers, timeout_s)
        except StoreGone as gone:
            self._lost(gone, "connect")
        except EplbError as error:
            self._ledger.poison(error, "connect")
            raise

    def _plan(
        self, old_map: npt.ArrayLike, new_map: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64] | None, PlacementPlan | None, EplbError | None]:
        """Make the plan, or the error that this rank's ballot carries: bad arguments must hang nobody."""
        layout, session = self._assembly.layout, self._session
        world_size = self._control.world_size
        old = new = None
        try:
            old, new = check_maps(
                old_map,
                new_map,
                num_layers=layout.num_layers,
                world_size=world_size,
                num_local_physical_experts=layout.num_local_physical_experts,
            )
            members = session.members if len(session.members) < world_size else None
            plan = plan_moves(old, new, world_size=world_size, members=members, nodes=session.nodes)
        except EplbError as error:
            return old, new, None, error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return old, new, None, error_for("EPLB-P001", problem=f"planning failed ({reason})")
        return old, new, plan, None

    def _agree(
        self, old: npt.NDArray[np.int64] | None, new: npt.NDArray[np.int64] | None, refusal: EplbError | None
    ) -> None:
        session = self._session
        where = f"generation {session.generation}, phase agree"
        vote = session.vote("agree", where)
        session.attend(vote)
        try:
            if refusal is None:
                refusal = self._compare_maps(vote, old, new)
            if refusal is None and session.hooks.observed:
                refusal = self._observe_agree(where)
            if refusal is not None:
                decision = vote.abort(refusal)
            else:
                vote.cast(Ballot(True), session.tally)
                decision = session.decide(vote)
            if decision.commit:
                session.forget()
            session.forget_later([vote], extra=[session.first_maps_key])
            if decision.commit:
                return
        except StoreGone as gone:
            self._lost(gone, where)
        error = decision.error or error_for("EPLB-T007", rank=decision.by, where=where, reason="no reason given")
        if error.code == "EPLB-T003":  # a stalled rank may come back and find the outcome; a dead one will not
            self._ledger.poison(error, where)
        raise error from (refusal if refusal is not error else None)

    def _compare_maps(
        self, vote: Vote, old: npt.NDArray[np.int64] | None, new: npt.NDArray[np.int64] | None
    ) -> EplbError | None:
        """Compare this rank's maps with the first ones stored."""
        session = self._session
        if old is None or new is None:
            return error_for("EPLB-P001", problem="no maps")
        mine = {"old maps": map_digest(old).hex(), "new maps": map_digest(new).hex()}
        rank, theirs = session.first_maps(mine)
        differing = [what for what, digest in mine.items() if theirs.get(what) != digest]
        if not differing:
            return None
        detail = f"Rank {session.rank} and rank {rank} differ ({vote.where}); nothing was moved."
        return PlanError("EPLB-P003", what=" and ".join(differing), detail=detail)

    def _observe_agree(self, where: str) -> EplbError | None:
        from eplb_core.backend import Event

        session = self._session
        try:
            session.hooks.observe(Event("agree", self.name, session.epoch, session.generation, None, True))
        except EplbError as error:
            return error
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return error_for("EPLB-T007", rank=session.rank, where=where, reason=reason)
        return None

    def _lost(self, gone: StoreGone, where: str) -> NoReturn:
        dead = ", ".join(f"rank {rank}" for rank in self._session.dead)
        error = error_for(
            "EPLB-T005", where=where, problem=str(gone), layers="none", detail=f"Gone: {dead}." if dead else ""
        )
        self._ledger.poison(error, where)
        raise error from gone

    # --- after a failure ---------------------------------------------------------------------------------------------

    def rebuild(
        self,
        timeout_s: float,
        control: ControlPlane | None = None,
        ranks: Sequence[int] | None = None,
        device_group: Any = None,
        landing: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> RearrangeReport:
        """Make the communicator usable again after a failure; collective over the ranks named.

        Layers in doubt are settled first, so that every member holds the same placement; then a new epoch begins with
        new connections.

        Parameters
        ----------
        timeout_s : float
            Limit, seconds.
        control : ControlPlane or None
            A new one when the store was lost; ranks keep their numbers.
        ranks : sequence of int or None
            Members from now on, this rank among them; None keeps the members. Map columns keep their numbers.
        device_group : ProcessGroup or None
            A new one, for backends that use one.
        landing : sequence of sequence of torch.Tensor or None
            New landing rows of the host's, needed when it gave some and they are quarantined.

        Returns
        -------
        RearrangeReport
            The placement that holds on all members.

        Raises
        ------
        TransferError
            Too much landing memory is quarantined (EPLB-T009), or a member did not come (EPLB-T002).
        """
        with self._ledger.reporting():
            if self._ledger.closed:
                raise TransferError("EPLB-T008", name=self.name)
            before = self._session
            members = before.members if ranks is None else tuple(sorted({int(rank) for rank in ranks}))
            if self._control.rank not in members or not set(members) <= set(range(self._control.world_size)):
                problem = f"ranks={list(members)} must be ranks of the group, {self._control.rank} among them"
                raise TransferError("EPLB-T009", problem=problem)
            if control is not None:
                if (control.rank, control.world_size) != (self._control.rank, self._control.world_size):
                    raise TransferError("EPLB-T009", problem="the new control plane gives this rank another number")
                control.start_epochs_at(self.name, before.epoch)
                self._control = control
            if landing is not None:
                self._host_landing = check_landing(landing, self._assembly.layout)
            epoch = self._control.next_epoch(self.name)
            try:
                client = self._control.client(f"eplb/{self.name}/{epoch}", self.config.timeout_s)
                settle(
                    client,
                    self._ledger,
                    name=self.name,
                    rank=self._control.rank,
                    epoch=epoch,
                    members=members,
                    timeout_s=timeout_s,
                )
            except StoreGone as gone:
                self._lost(gone, "rebuild")
            self._retire(before, new_landing=landing is not None)
            self._device_group = device_group if device_group is not None else self._device_group
            self._session = Session(
                self._assembly, self._control, epoch, members, self._device_group, self._host_landing
            )
            self._ledger.new_epoch(epoch)
            self._connect(timeout_s)
        return self._ledger.report()

    def _retire(self, session: Session, *, new_landing: bool) -> None:
        """Close an epoch's backend; keep it, and its landing memory, for ever when it may still be written."""
        safe = session.close_backend(force=True) or not self._ledger.undrained
        session.goodbye()
        if safe and self._give_landing_back(session):
            return
        if len(self._quarantine) >= self.config.staging_layers:
            problem = f"{len(self._quarantine)} sets of landing memory are quarantined, as many as the limit allows"
            raise TransferError("EPLB-T009", problem=problem, detail="Restart this process.")
        if self._host_landing is not None and not new_landing:
            raise TransferError("EPLB-T009", problem="the host's landing= may still be written; give a new one")
        self._quarantine.append(session)
        self._ledger.quarantined_nbytes += session.landing.nbytes

    def _give_landing_back(self, session: Session) -> bool:
        """Release the slots, each guarded by what may still read it; False when the device cannot tell."""
        try:
            # A commit may have run on another stream than the caller's; one that failed, or was settled, left no event.
            rest = self._assembly.streams.mark()
        except RuntimeError as error:
            logger.warning("%s: the landing memory is kept, for the device failed: %s", self.name, error)
            return False
        session.landing.release(self._ledger.slot_events, rest)
        return True

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, force: bool = False) -> None:
        """Release everything. Without `force`, the rank that hosts the store stays until all have said goodbye.

        Parameters
        ----------
        force : bool
            Local and bounded (under 2 s): the others see this rank leave without a goodbye.
        """
        if self._ledger.closed:
            return
        unclean = force or self._ledger.poisoned or self._ledger.open is not None
        self._ledger.close()
        session = self._session
        safe = session.close_backend(force=unclean) or not self._ledger.undrained
        try:
            if unclean:
                session.vanish()
            else:
                session.goodbye()
            if self._control.hosts_store and not force:
                limit_s = _CLOSE_FORCED_S if unclean else float(self.config.timeout_s)
                session.await_goodbyes(limit_s)
        except StoreGone as gone:
            logger.warning("%s: the store was gone at close: %s", self.name, gone)
        if not (safe and self._give_landing_back(session)):
            _NEVER_FREED.append(session)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(force=error is not None)


_NEVER_FREED: list[Session] = []
"""Closed sessions whose landing memory an undrained transfer may still write (I11)."""


@contextmanager
def _telling_the_others(
    control: ControlPlane, name: str, epoch: int, members: Sequence[int], timeout_s: float
) -> Iterator[None]:
    """When building fails here, write why into the decision that the other ranks wait for at connect."""
    try:
        yield
    except Exception as error:
        try:
            client = control.client(f"eplb/{name}/{epoch}", timeout_s)
        except StoreGone:
            raise error from None
        vote = Vote(
            client,
            name=name,
            rank=control.rank,
            epoch=epoch,
            members=members,
            generation=0,
            topic="records",
            where="connect, phase records",
        )
        refuse(vote, control.rank, error)
        raise


def _assemble(
    config: EPLBConfig,
    layout: Layout,
    stream: Any,
    options: Mapping[str, Any] | BaseModel | None,
    observers: Sequence[object],
    name: str,
) -> Assembly:
    """Choose the backend, check its options, probe it, and load its class and the staging allocator."""
    catalog = discover()
    choice = select(config, device_type=layout.device.type, catalog=catalog)
    info = choice.info
    checked = _check_options(info, options)
    cls: Any = load_target(info.target)
    if getattr(cls, "landing_layout", None) not in ("rows", "packed_by_peer"):
        reason = f"{info.target} must declare landing_layout as 'rows' or 'packed_by_peer'"
        raise DiscoveryError("EPLB-D003", backend=info.name, reason=reason)
    if hasattr(cls, "probe"):
        try:
            cls.probe(checked)
        except EplbError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DiscoveryError("EPLB-D004", backend=info.name, reason=reason, detail=info.install_hint) from error
    return Assembly(
        name=name,
        config=config,
        info=info,
        backend_class=cls,
        backend_version=catalog.origins[("backend", info.name)].version,
        options=checked,
        layout=layout,
        streams=Streams(layout.device, stream),
        allocator=build_allocator(
            config,
            catalog,
            weights=layout.device,
            staged_on=landing_device(cls, layout.device),
            backend=info.name,
        ),
        observers=tuple(observers),
    )


def _check_options(info: BackendInfo, options: Mapping[str, Any] | BaseModel | None) -> BaseModel | None:
    model: Any = load_target(info.options) if isinstance(info.options, str) else info.options
    if model is None:
        if options:
            raise ConfigError("EPLB-C008", backend=info.name, problem="it takes no options")
        return None
    if isinstance(options, model):
        return cast("BaseModel", options)
    if isinstance(options, BaseModel):
        problem = f"expected {model.__name__}, got {type(options).__name__}"
        raise ConfigError("EPLB-C008", backend=info.name, problem=problem)
    try:
        return model(**(options or {}))  # type: ignore[no-any-return]
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError("EPLB-C008", backend=info.name, problem=problems) from error
