"""Connecting: records are compared, the liveness ring is closed, and backends meet the peers that plans name."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eplb_core._version import __version__
from eplb_core.backend import PeerMetadata
from eplb_core.backend.toolkit import Deadline
from eplb_core.control.hosts import node_ids
from eplb_core.control.store import StoreGone
from eplb_core.errors import DiscoveryError, EplbError, MetadataError, TransferError, error_for
from eplb_core.voting.liveness import Ring
from eplb_core.voting.vote import Vote
from eplb_core.wire.ballots import Ballot, Decision
from eplb_core.wire.compare import difference
from eplb_core.wire.record import RankRecord

if TYPE_CHECKING:
    from eplb_core.rearrange.epoch import Session


class Connection:
    """How far a session is connected.

    Parameters
    ----------
    session : Session
        Built and registered.

    Attributes
    ----------
    nodes : tuple of int or None
        Host number of every rank, when the members are on more than one host.
    """

    def __init__(self, session: Session) -> None:
        world_size = session.control.world_size
        self.nodes: tuple[int, ...] | None = None
        self._session = session
        self._council = session.council
        self._compared = False
        self._exchanged = False
        self._linked = np.zeros((world_size, world_size), dtype=bool)

    def compare(self, timeout_s: float) -> None:
        """Compare the records of all members and close the ring; collective, once.

        Raises
        ------
        MetadataError
            The members do not fit together, or one could not take part.
        StalledError, PeerLostError
            A member did not come, or died.
        """
        if self._compared:
            return
        session, council = self._session, self._council
        record = self._record()
        council.client.set(f"record/{council.rank}", council.seal("record", record.to_bytes()))
        ring = Ring(
            session.control.host, name=council.name, rank=council.rank, epoch=council.epoch, members=council.members
        )
        council.ring = ring
        address = json.dumps([session.control.host, ring.port]).encode()
        council.client.set(f"ring/{council.rank}", council.seal("address", address))
        vote = council.vote("records", "connect, phase records")
        digest = record.shared_digest().hex()
        first_rank, first_digest = self._first_record(digest)
        if first_digest != digest:
            vote.abort(self._difference(record, first_rank), content={"differs": [council.rank, first_rank]})
        else:
            ballot = Ballot(True, content={"boot": session.control.boot_id, "host": session.control.host_given})
            vote.cast(ballot, self._tally_records)
        decision = council.decide(vote, timeout_s=timeout_s)
        if not decision.commit:
            raise self._record_error(record, decision)
        boots = [str(decision.content["boots"].get(str(rank), "")) for rank in range(session.control.world_size)]
        nodes = node_ids(boots)
        self.nodes = nodes if len({nodes[rank] for rank in council.members}) > 1 else None
        if len(council.members) > 1:
            self._close_ring(ring, timeout_s)
        self._compared = True

    def link(self, pairs: npt.NDArray[np.int64], peers: Sequence[int], timeout_s: float) -> None:
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
        session, council = self._session, self._council
        vote = council.vote("link", f"generation {council.generation}, phase connect")
        council.attend(vote)
        new = [peer for peer in peers if not self._linked[min(peer, council.rank), max(peer, council.rank)]]
        deadline = Deadline(timeout_s)
        try:
            receipt = session.hooks.exchange_metadata(session.local, self._metadata_of(new))
            left_out = sorted(set(new) - set(receipt.peers))
            if left_out:
                reason = f"its exchange_metadata left out rank(s) {left_out}"
                raise DiscoveryError("EPLB-D003", backend=session.assembly.info.name, reason=reason)
            self._pump_until_connected(deadline, vote, new)
        except StoreGone:
            raise
        except Exception as error:
            named = council.diagnose(error, vote, vote.where)[0]
            decision = vote.abort(named, fatal=True)
        else:
            vote.cast(Ballot(True), council.tally)
            # Whoever is connected goes on pumping, so that the others become connected too.
            decision = council.decide(vote, timeout_s=max(1.0, deadline.left_s), pump=session.backend.progress)
        if not decision.commit:
            raise _error_of(decision)
        self._linked[pairs[:, 0], pairs[:, 1]] = True
        self._exchanged = True

    # --- records -----------------------------------------------------------------------------------------------------

    def _record(self) -> RankRecord:
        session = self._session
        made = session.assembly
        config = made.config
        shared: dict[str, str | int | float | bool] = {
            "staging_layers": config.staging_layers,
            "max_ops_per_batch": config.max_ops_per_batch,
            "enable_migration_batching": config.enable_migration_batching,
            "landing_layout": str(session.backend.landing_layout),
            "coalesce_nbytes": session.coalesce_nbytes,
        }
        shared.update({f"{made.info.name}.{key}": value for key, value in session.shared_options.items()})
        return RankRecord(
            rank=session.rank,
            backend=made.info.name,
            backend_version=made.backend_version,
            core_version=__version__,
            api_version=made.info.api_version,
            label=made.label,
            options=shared,
            members=self._council.members,
            boot_id=session.control.boot_id,
            host=session.control.host,
            layout=made.layout.record(),
            payload=session.local.payload,
        )

    def _first_record(self, digest: str) -> tuple[int, str]:
        """Store the digest of this rank's record unless another was first; return whose stands there, and which."""
        council = self._council
        mine = council.seal("first", json.dumps([council.rank, digest]).encode(), rank=0)
        rank, first = json.loads(council.open(council.client.put_first("records/first", mine), "first", rank=0))
        return int(rank), str(first)

    def _tally_records(self, ballots: Mapping[int, Ballot]) -> Decision:
        decision = self._council.tally(ballots)
        if not decision.commit:
            return decision
        boots = {str(rank): ballot.content.get("boot") for rank, ballot in ballots.items()}
        silent = [rank for rank, ballot in ballots.items() if not ballot.content.get("host")]
        if len(set(boots.values())) > 1 and silent:
            problem = f"the ranks are on {len(set(boots.values()))} hosts, and rank(s) {silent} gave no host="
            return Decision(False, self._council.rank, error_for("EPLB-C009", problem=problem))
        return Decision(True, self._council.rank, content={"boots": boots})

    def _record_error(self, record: RankRecord, decision: Decision) -> EplbError:
        """Tell the difference as this rank sees it: it and its peer are named the other way round over there."""
        if "differs" in decision.content and decision.by != record.rank:
            for peer in (int(rank) for rank in decision.content["differs"]):
                found = None if peer == record.rank else difference(record, self._peer_record(peer))
                if found is not None:
                    return found
        return _error_of(decision)

    def _difference(self, record: RankRecord, peer: int) -> EplbError:
        found = difference(record, self._peer_record(peer))
        if found is None:
            raise MetadataError("EPLB-M005", peer=peer, problem="its record and the digest of it do not agree")
        return found

    def _peer_record(self, peer: int) -> RankRecord:
        value = self._council.client.read(f"record/{peer}")
        if value is None:
            raise MetadataError("EPLB-M005", peer=peer, problem="it left no record")
        return RankRecord.from_bytes(self._council.open(value, "record", rank=peer), rank=peer)

    def _metadata_of(self, peers: Sequence[int]) -> list[PeerMetadata]:
        own = self._record().shared_digest()
        metadata = []
        for peer in peers:
            record = self._peer_record(peer)
            if record.shared_digest() != own:
                raise MetadataError("EPLB-M005", peer=peer, problem="its record changed after it was compared")
            metadata.append(PeerMetadata(peer, record.payload))
        return metadata

    # --- ring and backend --------------------------------------------------------------------------------------------

    def _close_ring(self, ring: Ring, timeout_s: float) -> None:
        council = self._council
        vote = council.vote("ring", "connect, phase ring")
        try:
            value = council.client.read(f"ring/{ring.right}")
            if value is None:
                raise MetadataError("EPLB-M005", peer=ring.right, problem="it left no address")
            host, port = json.loads(council.open(value, "address", rank=ring.right))
            ring.connect((str(host), int(port)), timeout_s, give_up=lambda: _refusal(vote))
        except (EplbError, OSError) as error:
            decision = vote.abort(council.diagnose(error, vote, vote.where)[0], fatal=True)
        else:
            vote.cast(Ballot(True), council.tally)
            decision = council.decide(vote, timeout_s=timeout_s)
        if not decision.commit:
            raise _error_of(decision)

    def _pump_until_connected(self, deadline: Deadline, vote: Vote, peers: Sequence[int]) -> None:
        session = self._session
        while not session.backend_connected():
            session.backend.progress()
            reason = self._council.cancelled()
            if reason is not None:
                raise TransferError("EPLB-T007", rank=session.rank, where=vote.where, reason=reason)
            if deadline.over:
                waiting_for = f"the connections to ranks {list(peers)}"
                raise error_for("EPLB-T002", seconds=deadline.elapsed_s, where=vote.where, waiting_for=waiting_for)
            time.sleep(50e-6)


def _refusal(vote: Vote) -> EplbError | None:
    decision = vote.poll()
    return None if decision is None or decision.commit else _error_of(decision)


def _error_of(decision: Decision) -> EplbError:
    return decision.error or error_for("EPLB-M006", rank=decision.by, reason="no reason given")
