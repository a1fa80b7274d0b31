"""One epoch of a communicator: its backend, its connections to the members, and the votes they take."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_core import __version__
from eplb_core.backend import (
    BackendContext,
    BackendInfo,
    Buffers,
    LocalMetadata,
    PeerMetadata,
    StagingAllocator,
)
from eplb_core.control import ControlPlane, Deadline, StoreGone
from eplb_core.errors import DiscoveryError, EplbError, MetadataError, TransferError, error_for
from eplb_core.facade import BackendHooks
from eplb_core.landing import LandingMemory
from eplb_core.layout import Layout
from eplb_core.liveness import Ring
from eplb_core.metadata import RankRecord, difference, node_ids, seal, unseal
from eplb_core.streams import Streams
from eplb_core.vote import Ballot, Decision, Vote, await_decision

if TYPE_CHECKING:
    import torch

    from eplb_core.config import EPLBConfig

logger = logging.getLogger("eplb_core")

_LOOK_EVERY_S = 2e-3
_RECORD_LIMIT = 4 << 20


@dataclass(frozen=True, eq=False)
class Assembly:
    """What every epoch of a communicator is made of; fixed when it is built.

    Parameters
    ----------
    name : str
        Of the communicator.
    config : EPLBConfig
        The host's.
    info : BackendInfo
        The chosen backend's.
    backend_class : type
        Loaded from ``info.target``.
    backend_version : str
        Version of the distribution that offers it.
    options : object
        The backend's options model, checked.
    layout : Layout
        Registered tensors.
    streams : Streams
        Of the weights' device.
    allocator : StagingAllocator
        For landing memory and send staging.
    observers : sequence of object
        Of this communicator.
    """

    name: str
    config: EPLBConfig
    info: BackendInfo
    backend_class: Any
    backend_version: str
    options: Any
    layout: Layout
    streams: Streams
    allocator: StagingAllocator
    observers: Sequence[object]

    @property
    def label(self) -> str:
        """Leading word of the backend's errors."""
        return self.info.label or self.info.name


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
        self.members = tuple(members)
        self.timeout_s = float(assembly.config.timeout_s)
        self.generation = 0
        self.nodes: tuple[int, ...] | None = None
        self.connected = False
        self._at_hand: Vote | None = None
        self._linked = np.zeros((control.world_size, control.world_size), dtype=bool)
        self._exchanged = False
        self._looked_at_s = 0.0
        self._cancel_reason: str | None = None
        self._ring: Ring | None = None
        self._old_keys: list[str] = []
        self._last_vote: Vote | None = None
        self._prefix = f"eplb/{assembly.name}/{epoch}"
        self.client = control.client(self._prefix, self.timeout_s)
        with self._refusing_when_it_fails():
            self._build(device_group, host_landing)

    def _build(self, device_group: Any, host_landing: list[list[torch.Tensor]] | None) -> None:
        made = self.assembly
        config, layout, cls = made.config, made.layout, made.backend_class
        self.landing = LandingMemory(
            layout,
            staging_layers=config.staging_layers,
            landing_layout=cls.landing_layout,
            landing_device=landing_device(cls, layout.device),
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
            cancelled=self.cancelled,
            max_ops_per_batch=config.max_ops_per_batch,
        )
        self.backend: Any = cls(made.options, context)
        self.hooks = BackendHooks(made.info.name, self.backend, made.observers)
        self.needs_progress = bool(getattr(self.backend, "needs_progress", True))
        self._is_connected: Callable[[], bool] = getattr(self.backend, "connected", lambda: True)
        buffers = Buffers(
            rows=layout.rows,
            landing=self.landing.slots,
            landing_rows=host_landing,
            send_nbytes=max(geometry.nbytes_rows for geometry in layout.geometries),
        )
        self.local: LocalMetadata = self.hooks.register_buffers(buffers)

    # --- votes -------------------------------------------------------------------------------------------------------

    def vote(self, topic: str, where: str, generation: int | None = None) -> Vote:
        """Make the vote on a topic of a generation (the current one by default)."""
        return Vote(
            self.client,
            name=self.assembly.name,
            rank=self.rank,
            epoch=self.epoch,
            members=self.members,
            generation=self.generation if generation is None else generation,
            topic=topic,
            where=where,
        )

    def attend(self, vote: Vote) -> None:
        """Make a vote the one whose abort cancels the backend's loops."""
        self._at_hand = vote
        self._cancel_reason = None
        self._looked_at_s = 0.0

    def decide(self, vote: Vote, *, pump: bool | None = None, timeout_s: float | None = None) -> Decision:
        """Wait for a vote's decision, at most `timeout_s`, watching the neighbours and moving the backend on."""
        progress = self.backend.progress if (self.needs_progress if pump is None else pump) else None
        decision = await_decision(
            vote,
            Deadline(self.timeout_s if timeout_s is None else timeout_s),
            pump=progress,
            look=self._look,
            half_way=self._say_whom_it_waits_for,
            on_timeout=self._stalled,
        )
        self._last_vote = vote
        return decision

    def diagnose(self, error: Exception, vote: Vote, where: str) -> tuple[EplbError, bool]:
        """Find what is behind a local failure: a decision that stands, a dead neighbour, else the failure itself.

        When a peer dies, those who talk to it see a broken transfer, its neighbours in the ring an end of file; so a
        failed transfer waits a moment for the better explanation.

        Returns
        -------
        error : EplbError
            To be put into the decision.
        fatal : bool
            Peers are involved that will not answer again.
        """
        grace = Deadline(0.5 if isinstance(error, TransferError) else 0.0)
        while True:
            dead = self._ring.poll() if self._ring else None
            if dead is not None:
                return error_for("EPLB-T003", rank=dead, where=where), True
            if vote.poll() is not None or grace.over:
                break
            time.sleep(1e-3)
        if not isinstance(error, EplbError):
            reason = f"{type(error).__name__}: {error}"
            return error_for("EPLB-T007", rank=self.rank, where=where, reason=reason), False
        detail = f"{error.detail} Seen by rank {self.rank} in {where}.".strip()
        named = error_for(error.code, *error.values, detail=detail, **error.fields)
        return named, error.code == "EPLB-T002"

    def cancelled(self) -> str | None:
        """Tell a backend's loop why it should give up, if so; looks at most every 2 ms."""
        now = time.monotonic()
        if now - self._looked_at_s < _LOOK_EVERY_S:
            return self._cancel_reason
        self._looked_at_s = now
        try:
            dead = self._ring.poll() if self._ring else None
            if dead is not None:
                self._cancel_reason = f"rank {dead} is gone"
            elif self._at_hand is not None:
                decision = self._at_hand.poll()
                if decision is not None and not decision.commit:
                    self._cancel_reason = f"rank {decision.by} aborted {self._at_hand.where}: {decision.error}"
        except StoreGone as gone:
            self._cancel_reason = f"the store is lost: {gone}"
        return self._cancel_reason

    def _look(self, vote: Vote) -> Decision | None:
        if self._ring is None:
            return None
        dead = self._ring.poll()
        if dead is not None:
            return vote.abort(error_for("EPLB-T003", rank=dead, where=vote.where), fatal=True)
        if self._ring.departed:
            silent = sorted(self._ring.departed.intersection(vote.missing()))
            if silent and vote.poll() is None:
                reason = "it closed its communicator"
                return vote.abort(error_for("EPLB-T007", rank=silent[0], where=vote.where, reason=reason), fatal=True)
        return None

    def _stalled(self, vote: Vote, seconds: float) -> Decision:
        waiting_for = self._whom_it_waits_for(vote)
        error = error_for("EPLB-T002", seconds=seconds, where=vote.where, waiting_for=waiting_for)
        return vote.abort(error, fatal=True)

    def _say_whom_it_waits_for(self, vote: Vote, seconds: float) -> None:
        logger.warning(
            "%s: rank %d has waited %.1f s in %s for %s",
            self.assembly.name,
            self.rank,
            seconds,
            vote.where,
            self._whom_it_waits_for(vote),
        )

    def _whom_it_waits_for(self, vote: Vote) -> str:
        missing = vote.missing()
        if not missing:
            return "the decision, although every ballot is there"
        seen = self._last_vote.ballots() if self._last_vote is not None else {}
        texts = []
        for rank in missing[:8]:
            text = f"rank {rank}"
            if rank in seen and self._last_vote is not None:
                ago_s = max(0.0, time.time() - seen[rank].cast_at_s)
                text += f" (last seen in {self._last_vote.where}, {ago_s:.1f} s ago)"
            texts.append(text)
        return ", ".join(texts) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")

    # --- connect -----------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> None:
        """Compare the records of all members and close the ring; collective.

        Raises
        ------
        MetadataError
            The members do not fit together, or one could not take part.
        StalledError, PeerLostError
            A member did not come, or died.
        """
        if self.connected:
            return
        record = self._record()
        self.client.set(f"record/{self.rank}", self._seal("record", record.to_bytes()))
        self._ring = Ring(
            self.control.host, name=self.assembly.name, rank=self.rank, epoch=self.epoch, members=self.members
        )
        address = json.dumps([self.control.host, self._ring.port]).encode()
        self.client.set(f"ring/{self.rank}", self._seal("address", address))
        vote = self.vote("records", "connect, phase records")
        mine = json.dumps([self.rank, record.shared_digest().hex()]).encode()
        first = self.client.put_first("records/first", self._seal("first", mine, rank=0))
        first_rank, digest = json.loads(self._open(first, "first", rank=0))
        ballot = Ballot(True, content={"boot": self.control.boot_id, "host": self.control.host_given})
        if digest != record.shared_digest().hex():
            error = self._difference(record, int(first_rank))
            vote.abort(error, content={"differs": [self.rank, int(first_rank)]})
        else:
            vote.cast(ballot, self._tally_records)
        decision = self.decide(vote, pump=False, timeout_s=timeout_s)
        if not decision.commit:
            raise self._record_error(record, decision)
        boots = [str(decision.content["boots"].get(str(rank), "")) for rank in range(self.control.world_size)]
        nodes = node_ids(boots)
        self.nodes = nodes if len({nodes[rank] for rank in self.members}) > 1 else None
        self._close_ring(timeout_s)
        self.connected = True

    def _record(self) -> RankRecord:
        made = self.assembly
        config = made.config
        shared: dict[str, str | int | float | bool] = {
            "staging_layers": config.staging_layers,
            "max_ops_per_batch": config.max_ops_per_batch,
            "enable_migration_batching": config.enable_migration_batching,
            "landing_layout": str(self.backend.landing_layout),
            "coalesce_nbytes": int(getattr(self.backend, "coalesce_nbytes", 0)),
        }
        shared.update({f"{made.info.name}.{key}": value for key, value in self.backend.shared_options.items()})
        return RankRecord(
            rank=self.rank,
            backend=made.info.name,
            backend_version=made.backend_version,
            core_version=__version__,
            api_version=made.info.api_version,
            label=made.label,
            options=shared,
            members=self.members,
            boot_id=self.control.boot_id,
            host=self.control.host,
            layout=made.layout.record(),
            payload=self.local.payload,
        )

    def _tally_records(self, ballots: Mapping[int, Ballot]) -> Decision:
        for ballot in ballots.values():
            if not ballot.ok:
                return Decision(False, self.rank, ballot.error)
        boots = {str(rank): ballot.content.get("boot") for rank, ballot in ballots.items()}
        silent = [rank for rank, ballot in ballots.items() if not ballot.content.get("host")]
        if len(set(boots.values())) > 1 and silent:
            problem = f"the ranks are on {len(set(boots.values()))} hosts, and rank(s) {silent} gave no host="
            return Decision(False, self.rank, error_for("EPLB-C009", problem=problem))
        return Decision(True, self.rank, content={"boots": boots})

    def _record_error(self, record: RankRecord, decision: Decision) -> EplbError:
        error = decision.error or error_for("EPLB-M006", rank=decision.by, reason="no reason given")
        if "differs" in decision.content and decision.by != self.rank:
            stranger, first = (int(rank) for rank in decision.content["differs"])
            for peer in (stranger, first):
                if peer != self.rank:
                    found = self._difference_or_none(record, peer)
                    if found is not None:
                        return found
        return error

    def _difference(self, record: RankRecord, peer: int) -> EplbError:
        found = self._difference_or_none(record, peer)
        if found is None:
            raise MetadataError("EPLB-M005", peer=peer, problem="its record and the digest of it do not agree")
        return found

    def _difference_or_none(self, record: RankRecord, peer: int) -> EplbError | None:
        return difference(record, self._peer_record(peer))

    def _peer_record(self, peer: int) -> RankRecord:
        value = self.client.read(f"record/{peer}")
        if value is None:
            raise MetadataError("EPLB-M005", peer=peer, problem="it left no record")
        return RankRecord.from_bytes(self._open(value, "record", rank=peer), rank=peer)

    def _close_ring(self, timeout_s: float) -> None:
        ring = self._ring
        if ring is None or len(self.members) == 1:
            return
        vote = self.vote("ring", "connect, phase ring")
        try:
            value = self.client.read(f"ring/{ring.right}")
            if value is None:
                raise MetadataError("EPLB-M005", peer=ring.right, problem="it left no address")
            host, port = json.loads(self._open(value, "address", rank=ring.right))
            ring.connect((str(host), int(port)), timeout_s, give_up=lambda: _error_of(vote.poll()))
        except (EplbError, OSError) as error:
            named = self.diagnose(error, vote, vote.where)[0]
            decision = vote.abort(named, fatal=True)
        else:
            vote.cast(Ballot(True), self.tally)
            decision = self.decide(vote, pump=False, timeout_s=timeout_s)
        if not decision.commit:
            raise _error_of(decision) or error_for("EPLB-M006", rank=decision.by, reason="no reason given")

    def link(self, pairs: np.ndarray, peers: Sequence[int], timeout_s: float) -> None:
        """Connect the backends of pairs that a plan names for the first time; collective when there is one.

        The first call of an epoch exchanges in any case, so that no backend sees a transfer before its
        ``exchange_metadata``.

        Parameters
        ----------
        pairs : ndarray, int64, [num_pairs, 2]
            Every pair of ranks that exchanges rows, from the whole plan, so that all members come to the same answer.
        peers : sequence of int
            Those of this rank.
        timeout_s : float
            Limit, seconds.
        """
        if self._exchanged and bool(self._linked[pairs[:, 0], pairs[:, 1]].all()):
            return
        vote = self.vote("link", f"generation {self.generation}, phase connect")
        self.attend(vote)
        new = [peer for peer in peers if not self._linked[min(peer, self.rank), max(peer, self.rank)]]
        deadline = Deadline(timeout_s)
        try:
            own_digest = self._record().shared_digest()
            metadata = []
            for peer in new:
                record = self._peer_record(peer)
                if record.shared_digest() != own_digest:
                    raise MetadataError("EPLB-M005", peer=peer, problem="its record changed after it was compared")
                metadata.append(PeerMetadata(peer, record.payload))
            receipt = self.hooks.exchange_metadata(self.local, metadata)
            left_out = sorted(set(new) - set(receipt.peers))
            if left_out:
                raise DiscoveryError(
                    "EPLB-D003",
                    backend=self.assembly.info.name,
                    reason=f"its exchange_metadata left out rank(s) {left_out}",
                )
            self._pump_until_connected(deadline, vote, new)
        except StoreGone:
            raise
        except Exception as error:
            named = self.diagnose(error, vote, vote.where)[0]
            decision = vote.abort(named, fatal=True)
        else:
            vote.cast(Ballot(True), self.tally)
            decision = self.decide(vote, pump=True, timeout_s=max(1.0, deadline.left_s))
        if not decision.commit:
            raise _error_of(decision) or error_for("EPLB-T007", rank=decision.by, where=vote.where, reason="unknown")
        self._linked[pairs[:, 0], pairs[:, 1]] = True
        self._exchanged = True

    def _pump_until_connected(self, deadline: Deadline, vote: Vote, peers: Sequence[int]) -> None:
        while not self._is_connected():
            self.backend.progress()
            reason = self.cancelled()
            if reason is not None:
                raise TransferError("EPLB-T007", rank=self.rank, where=vote.where, reason=reason)
            if deadline.over:
                raise error_for(
                    "EPLB-T002",
                    seconds=deadline.elapsed_s,
                    where=vote.where,
                    waiting_for=f"the connections to ranks {list(peers)}",
                )
            time.sleep(50e-6)

    def tally(self, ballots: Mapping[int, Ballot]) -> Decision:
        """Commit when every ballot says so, else abort with the reason of the lowest rank that refuses."""
        for rank in sorted(ballots):
            if not ballots[rank].ok:
                return Decision(False, rank, ballots[rank].error)
        return Decision(True, self.rank)

    @property
    def first_maps_key(self) -> str:
        """Where the first maps of the current generation are stored."""
        return f"{self.generation}/agree/first"

    def first_maps(self, mine: Mapping[str, str]) -> tuple[int, Mapping[str, str]]:
        """Store digests of this rank's maps unless another rank was first; return whose stand there, and what."""

        def bound(body: bytes) -> bytes:
            name, epoch = self.assembly.name, self.epoch
            return seal("maps", body, name=name, rank=0, epoch=epoch, generation=self.generation)

        value = self.client.put_first(self.first_maps_key, bound(json.dumps([self.rank, mine]).encode()))
        body = unseal(
            value,
            "maps",
            name=self.assembly.name,
            rank=0,
            epoch=self.epoch,
            generation=self.generation,
            limit=_RECORD_LIMIT,
        )
        rank, theirs = json.loads(body)
        return int(rank), dict(theirs)

    # --- keys and the end --------------------------------------------------------------------------------------------

    def forget_later(self, votes: Sequence[Vote], extra: Sequence[str] = ()) -> None:
        """Note the keys of a generation's votes; `forget` deletes them once nobody can read them any more."""
        shared = self.rank == self.members[0]
        for vote in votes:
            self._old_keys.extend(vote.keys_of(self.rank, shared=shared))
        if shared:
            self._old_keys.extend(extra)

    def forget(self) -> None:
        """Delete what was noted before this generation was agreed: all have entered it, so all knew the outcomes."""
        keys, self._old_keys = self._old_keys, []
        self.client.delete(*keys)

    @property
    def dead(self) -> tuple[int, ...]:
        """Neighbours found dead."""
        return self._ring.dead if self._ring else ()

    def goodbye(self) -> None:
        """Tell the ring and the store, if it is still there, that this rank leaves in peace."""
        if self._ring is not None:
            self._ring.poll()
        with suppress(StoreGone):
            for rank in self.dead:
                self.client.set(f"dead/{rank}", b"1")
            self.client.set(f"bye/{self.rank}", b"1")
        if self._ring is not None:
            self._ring.close(goodbye=True)

    def await_goodbyes(self, timeout_s: float) -> None:
        """Stay until every other member said goodbye or is known dead, at most `timeout_s`: the store lives here."""
        deadline, pause_s = Deadline(timeout_s), 1e-3
        waiting = {rank for rank in self.members if rank != self.rank} - set(self.dead)
        while waiting and not deadline.over:
            waiting = {
                rank
                for rank in waiting
                if not (self.client.exists(f"bye/{rank}") or self.client.exists(f"dead/{rank}"))
            }
            if waiting:
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, 0.05)
        if waiting:
            logger.warning(
                "%s: rank %d hosts the store and closes it although rank(s) %s said no goodbye within %.0f s",
                self.assembly.name,
                self.rank,
                sorted(waiting),
                timeout_s,
            )

    def close_backend(self, *, force: bool) -> bool:
        """Close the backend; True when landing memory is certainly not written any more."""
        return self.backend.close(force) is True

    def vanish(self) -> None:
        """Leave the ring without a goodbye, so that the neighbours count this rank out at once."""
        with suppress(StoreGone):
            self.client.set(f"bye/{self.rank}", b"1")  # the store's host need not wait for it
        if self._ring is not None:
            self._ring.close(goodbye=False)

    def _refusing_when_it_fails(self) -> _Refusal:
        return _Refusal(self)

    def _seal(self, kind: str, body: bytes, rank: int | None = None) -> bytes:
        sender = self.rank if rank is None else rank
        return seal(kind, body, name=self.assembly.name, rank=sender, epoch=self.epoch, generation=0)

    def _open(self, value: bytes, kind: str, rank: int) -> bytes:
        return unseal(
            value, kind, name=self.assembly.name, rank=rank, epoch=self.epoch, generation=0, limit=_RECORD_LIMIT
        )


class _Refusal:
    """Writes a local failure into the decision on the records, so that the members do not wait for this rank."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            refuse(self._session.vote("records", "connect, phase records"), self._session.rank, error)


def landing_device(backend_class: Any, weights: torch.device) -> torch.device:
    """Return where a backend wants its landing memory."""
    import torch

    return weights if backend_class.landing_device == "weights" else torch.device("cpu")


def refuse(vote: Vote, rank: int, error: Exception) -> None:
    """Put an abort that tells the members why this rank cannot take part."""
    reason = str(error) if isinstance(error, EplbError) else f"{type(error).__name__}: {error}"
    try:
        vote.abort(error_for("EPLB-M006", rank=rank, reason=reason), fatal=True)
    except StoreGone:
        logger.warning("rank %d could not tell the others why it failed: the store is lost", rank)


def _error_of(decision: Decision | None) -> EplbError | None:
    return None if decision is None else decision.error
