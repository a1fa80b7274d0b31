"""The record that each rank publishes at a meeting, and the error when two differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eplb_core._version import __version__
from eplb_core.backend import PeerMetadata
from eplb_core.errors import EplbError, MetadataError, error_for
from eplb_core.rearrange.epoch import Epoch
from eplb_core.voting.members import Members
from eplb_core.wire.ballots import Ballot, Decision
from eplb_core.wire.compare import difference
from eplb_core.wire.record import RankRecord


def record_of(epoch: Epoch) -> RankRecord:
    """Make this rank's record."""
    made = epoch.setup
    config = made.config
    shared: dict[str, str | int | float | bool] = {
        "staging_layers": config.staging_layers,
        "max_ops_per_batch": config.max_ops_per_batch,
        "enable_migration_batching": config.enable_migration_batching,
        "landing_layout": str(epoch.backend.landing_layout),
        "coalesce_nbytes": epoch.coalesce_nbytes,
    }
    shared.update({f"{made.info.name}.{key}": value for key, value in epoch.shared_options.items()})
    return RankRecord(
        rank=epoch.rank,
        backend=made.info.name,
        backend_version=made.backend_version,
        core_version=__version__,
        api_version=made.info.api_version,
        label=made.label,
        options=shared,
        members=epoch.asked,
        boot_id=epoch.control.boot_id,
        host=epoch.control.host,
        layout=made.layout.record(),
        payload=epoch.local.payload,
    )


def publish(members: Members, record: RankRecord) -> None:
    """Publish this rank's record."""
    members.client.set(_key(members, members.rank), members.seal("record", record.to_bytes()))


def peer_record(members: Members, peer: int) -> RankRecord:
    """Read another rank's record.

    Raises
    ------
    MetadataError
        There is none, it is damaged, or another rank wrote it (EPLB-M005).
    """
    value = members.client.read(_key(members, peer))
    if value is None:
        raise MetadataError("EPLB-M005", peer=peer, problem="it left no record")
    return RankRecord.from_bytes(members.open(value, "record", rank=peer), rank=peer)


def first_difference(members: Members, ballots: Mapping[int, Ballot]) -> Decision | None:
    """Return an abort when digests differ; it names the lowest member and the first that differs from it."""
    lowest, *others = sorted(ballots)
    for rank in others:
        if ballots[rank].content["digest"] != ballots[lowest].content["digest"]:
            pair = [lowest, rank]
            try:
                error: EplbError = _difference(members, lowest, rank)
            except MetadataError as unreadable:
                error = unreadable
            return Decision(False, members.rank, error, content={"differs": pair})
    return None


def told_here(members: Members, record: RankRecord, decision: Decision) -> EplbError:
    """Word a difference from this rank's side; the peer's text has local and remote exchanged."""
    error = decision.error or error_for("EPLB-M006", rank=decision.by, reason="no reason given")
    for peer in (int(rank) for rank in decision.content.get("differs", ())):
        if peer != record.rank and error.code != "EPLB-M005":
            found = difference(record, peer_record(members, peer))
            if found is not None:
                return found
    return error


def metadata_of(members: Members, own: RankRecord, peers: Sequence[int]) -> list[PeerMetadata]:
    """Read the backend metadata of some peers; it must not have changed since the records were compared."""
    digest = own.shared_digest()
    metadata = []
    for peer in peers:
        record = peer_record(members, peer)
        if record.shared_digest() != digest:
            raise MetadataError("EPLB-M005", peer=peer, problem="its record changed after it was compared")
        metadata.append(PeerMetadata(peer, record.payload))
    return metadata


def _difference(members: Members, local: int, peer: int) -> EplbError:
    found = difference(peer_record(members, local), peer_record(members, peer))
    if found is None:
        raise MetadataError("EPLB-M005", peer=peer, problem="its record and the digest of it do not agree")
    return found


def _key(members: Members, rank: int) -> str:
    return members.key(f"record/{rank}")
