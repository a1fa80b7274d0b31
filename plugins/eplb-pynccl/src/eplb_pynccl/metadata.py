"""What members tell each other before NCCL connects them: the unique id, and who is who."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from eplb_core.backend import PeerMetadata
from eplb_core.backend.toolkit import Backoff, Wait
from eplb_core.errors import EplbError, error_for
from eplb_pynccl.binding import UNIQUE_ID_NBYTES
from eplb_pynccl.hooks import NAME

NONCE_NBYTES = 16

_PAYLOAD = struct.Struct(f"!8s{NONCE_NBYTES}s{UNIQUE_ID_NBYTES}s")
_MAGIC = b"eplbpnc1"
_KEY = "unique_id"
_NO_ID = bytes(UNIQUE_ID_NBYTES)


class Member(NamedTuple):
    """What a payload says of its rank."""

    nonce: bytes
    """Drawn for this epoch; the first bytes that a pair exchanges."""
    unique_id: bytes | None
    """Of the lowest member, which made it; None of the others."""


def pack(nonce: bytes, unique_id: bytes | None) -> bytes:
    """Return this rank's payload."""
    return _PAYLOAD.pack(_MAGIC, nonce, unique_id or _NO_ID)


def unpack(payload: bytes, peer: int) -> Member:
    """Read a peer's payload.

    Raises
    ------
    MetadataError
        EPLB-M005: it is not what `pack` wrote.
    """
    if len(payload) != _PAYLOAD.size or not payload.startswith(_MAGIC):
        raise error_for("EPLB-M005", peer=peer, problem=f"its metadata was not written by this {NAME}")
    _, nonce, unique_id = _PAYLOAD.unpack(payload)
    return Member(bytes(nonce), None if unique_id == _NO_ID else bytes(unique_id))


def member_of(peer: PeerMetadata, lowest: int) -> Member:
    """Read a peer's payload, of which the lowest member's alone has the unique id.

    Raises
    ------
    MetadataError
        EPLB-M005.
    """
    member = unpack(peer.payload, peer.rank)
    if (member.unique_id is not None) != (peer.rank == lowest):
        raise error_for("EPLB-M005", peer=peer.rank, problem=f"rank {lowest}, and no other, makes the unique id")
    return member


def publish(store: Any, payload: bytes) -> None:
    """Leave the lowest member's payload for those members that exchange nothing with it, and never see its metadata."""
    try:
        store.set(_KEY, payload)
    except RuntimeError as error:
        raise _lost(error) from error


def withdraw(store: Any) -> None:
    """Take it back, once every member has joined the communicator and so has read it."""
    try:
        store.delete_key(_KEY)
    except RuntimeError as error:
        raise _lost(error) from error


def await_unique_id(store: Any, lowest: int, wait: Wait) -> bytes:
    """Wait for what the lowest member published.

    Parameters
    ----------
    store : torch.distributed.Store
        Store in the namespace of this epoch.
    lowest : int
        Rank that sets the id.
    wait : Wait
        Limit of the wait.

    Raises
    ------
    MetadataError, StalledError, StoreLostError, TransferError
        It is damaged, does not come, cannot be read, or the connect was cancelled.
    """
    backoff = Backoff(first_s=5e-4, longest_s=0.02, factor=2.0)  # each look is an operation of the store
    while True:
        try:
            if store.check([_KEY]):
                unique_id = unpack(bytes(store.get(_KEY)), lowest).unique_id
                break
        except RuntimeError as error:  # DistError and its kin
            raise _lost(error) from error
        wait.pause(f"the unique id of rank {lowest}", backoff)
    if unique_id is None:
        raise error_for("EPLB-M005", peer=lowest, problem="it published no unique id")
    return unique_id


def _lost(error: Exception) -> EplbError:
    return error_for("EPLB-T005", where=f"phase connect ({NAME})", problem=str(error), layers="none")
