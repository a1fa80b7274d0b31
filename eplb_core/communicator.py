"""The communicator: what a host engine embeds. It chooses a backend, registers the weights, and rearranges them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from eplb_core.config import EPLBConfig
from eplb_core.control.plane import ControlPlane
from eplb_core.control.store import StoreGone
from eplb_core.errors import ConfigError, EplbError, PeerLostError, PlanError, StalledError, TransferError, error_for
from eplb_core.rearrange.agree import Proposal, agree, propose
from eplb_core.rearrange.epoch import Session, namespace
from eplb_core.rearrange.rearrangement import Generation
from eplb_core.rearrange.recovery import settle
from eplb_core.rearrange.setup import assemble
from eplb_core.rearrange.state import Ledger
from eplb_core.report import RearrangeReport
from eplb_core.voting.members import refuse
from eplb_core.voting.vote import Vote
from eplb_core.weights.host_landing import check_landing
from eplb_core.weights.layout import build_layout

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

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
        ``[num_moe_layers][num_tensors]``, first axis the local physical expert; see
        `eplb_core.weights.layout.build_layout`. Their memory is held until `close`.
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
        _check_arguments(config, control, observers, name)
        self.name = name
        self.config = config
        self._control = control
        self._device_group = device_group
        self._quarantine: list[Session] = []
        self._retired: list[Session] = []
        epoch = control.next_epoch(name)
        members = tuple(range(control.world_size))
        with _telling_the_others(control, name, epoch, members, float(config.timeout_s)):
            layout = build_layout(weights, tensor_names)
            self._assembly = assemble(config, layout, stream=stream, options=options, observers=observers, name=name)
            if landing is not None and self._assembly.backend_class.landing_layout != "rows":
                problem = f"landing= was given, and {self._assembly.info.name} packs its landing memory"
                raise ConfigError("EPLB-C010", problem=problem)
            self._host_landing = (
                None if landing is None else check_landing(landing, layout, staging_layers=config.staging_layers)
            )
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
            with self._poisoning("connect"):
                self._session.connection.compare(limit_s)
                self._session.connection.link(pairs, others, limit_s)

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
            # What the caller has enqueued (loading weights, the last commits' copies) is done before anyone reads.
            self._assembly.streams.settle([self._assembly.streams.mark(), *self._ledger.take_slot_events()])
            with self._poisoning("connect"):
                session.connection.compare(session.timeout_s)
            session.council.generation += 1
            self._ledger.entered(session.epoch, session.council.generation)
            with self._ledger.phase("agree"):
                proposal = self._agree(old_map, new_map)
            generation = Generation(session, proposal.plan, self._ledger)
            self._ledger.agreed(generation, proposal.old, proposal.new)
            with self._ledger.phase("connect"), self._poisoning("connect"):
                session.connection.link(proposal.plan.pairs, proposal.plan.peers(session.rank), session.timeout_s)
            return generation

    def _agree(self, old_map: npt.ArrayLike, new_map: npt.ArrayLike) -> Proposal:
        session = self._session
        try:
            proposal = propose(session, old_map, new_map)
            if isinstance(proposal, Proposal):
                self._ledger.assume(proposal.old)
            return agree(session, proposal)
        except StoreGone as gone:
            self._lost(gone, "agree")
        except (PeerLostError, StalledError) as error:  # the same on all: one that comes back finds this outcome
            self._ledger.poison(error, f"generation {session.council.generation}, phase agree")
            raise

    @contextmanager
    def _poisoning(self, where: str) -> Iterator[None]:
        """Refuse further use after a failure to connect: its outcome will not change."""
        try:
            yield
        except StoreGone as gone:
            self._lost(gone, where)
        except EplbError as error:
            self._ledger.poison(error, where)
            raise

    def _lost(self, gone: StoreGone, where: str) -> NoReturn:
        dead = ", ".join(f"rank {rank}" for rank in self._session.council.dead)
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
            self._ledger.check_open()
            if self._ledger.invalid is not None:
                problem = "the weights of this rank are invalid since a commit failed on it"
                raise TransferError("EPLB-T009", problem=problem) from self._ledger.invalid
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
                self._host_landing = check_landing(
                    landing, self._assembly.layout, staging_layers=self.config.staging_layers
                )
            epoch = self._control.next_epoch(self.name)
            if self._ledger.open is not None:
                self._ledger.open.finish_decided()
            try:
                client = self._control.client(namespace(self.name, epoch), float(self.config.timeout_s))
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
            with self._poisoning("rebuild"):
                self._session.connection.compare(timeout_s)
        return self._ledger.report()

    def _retire(self, session: Session, *, new_landing: bool) -> None:
        """Close an epoch's backend; keep it, and its landing memory, for ever when it may still be written."""
        if session in self._retired:  # an earlier rebuild came this far
            return
        safe = session.close_backend(force=True) or not self._ledger.undrained
        session.council.goodbye()
        if safe and self._give_landing_back(session):
            self._retired = [session]
            return
        if len(self._quarantine) >= self.config.staging_layers:
            problem = f"{len(self._quarantine)} sets of landing memory are quarantined, as many as the limit allows"
            raise TransferError("EPLB-T009", problem=problem, detail="Restart this process.")
        if self._host_landing is not None and not new_landing:
            raise TransferError("EPLB-T009", problem="the host's landing= may still be written; give a new one")
        self._quarantine.append(session)
        self._retired = [session]
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

        Layers that were decided and are not committed yet are committed first, for the other ranks commit them.

        Parameters
        ----------
        force : bool
            Local and bounded (under 2 s): the others see this rank leave without a goodbye.

        Raises
        ------
        CommitError
            Such a commit failed; everything is released all the same.
        """
        if self._ledger.closed or self._ledger.forked:
            return
        unclean = force or self._ledger.poisoned or self._ledger.open is not None
        try:
            if self._ledger.open is not None:
                self._ledger.open.finish_decided()  # the others commit what was voted, so this rank does
        finally:
            self._ledger.close()
            self._leave(unclean=unclean, wait=not force)

    def _leave(self, *, unclean: bool, wait: bool) -> None:
        """Close the backend, tell the others, give the landing memory back; each whatever becomes of the others."""
        session = self._session
        try:
            safe = session.close_backend(force=unclean) or not self._ledger.undrained
        except Exception as error:
            logger.warning("%s: %s failed to close: %r", self.name, self.backend, error)
            safe = False
        try:
            hosts = self._control.hosts_store and wait
            if unclean:
                session.council.vanish()
            else:
                session.council.goodbye(tidy=not hosts)
            if hosts:
                session.council.await_goodbyes(_CLOSE_FORCED_S if unclean else float(self.config.timeout_s))
                if not unclean:
                    session.council.tidy()  # the last of all: the others' goodbyes are keys as well
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


def _check_arguments(config: object, control: object, observers: object, name: object) -> None:
    for what, value, kind in (("config", config, EPLBConfig), ("control", control, ControlPlane), ("name", name, str)):
        if not isinstance(value, kind):
            problem = f"{what}= should be {kind.__name__}, got {type(value).__name__}"
            raise ConfigError("EPLB-C010", problem=problem)
    if isinstance(observers, (str, bytes)) or not isinstance(observers, Sequence):
        problem = f"observers= should be a sequence of observers, got {type(observers).__name__}"
        raise ConfigError("EPLB-C010", problem=problem)


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
            client = control.client(namespace(name, epoch), timeout_s)
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
