"""What a member tells the others of itself: its landing memory, and the nonce that it drew for this epoch."""

from __future__ import annotations

import struct

from eplb_core.backend import BackendContext, PeerMetadata
from eplb_core.backend.toolkit import check_member
from eplb_core.errors import error_for
from eplb_gloo.hooks import NAME

NONCE_NBYTES = 16

_PAYLOAD = struct.Struct(f"!8sBQ{NONCE_NBYTES}s")  # magic, landing slots, bytes of each, nonce
_MAGIC = b"eplbglo1"


def encode_payload(num_slots: int, slot_nbytes: int, nonce: bytes) -> bytes:
    """Return what the peers of this rank are told.

    Parameters
    ----------
    num_slots, slot_nbytes : int
        Landing slots, and bytes of each.
    nonce : bytes
        Drawn by this rank for this epoch.
    """
    return _PAYLOAD.pack(_MAGIC, num_slots, slot_nbytes, nonce)


def nonce_of(peer: PeerMetadata, context: BackendContext, slot_nbytes: int) -> bytes:
    """Return a peer's nonce, after comparing what gloo would not survive if it differed.

    Parameters
    ----------
    peer : PeerMetadata
        What it told.
    context : BackendContext
        This rank's context; it names the members.
    slot_nbytes : int
        Bytes of a landing slot of this rank.

    Raises
    ------
    MetadataError
        It is no other member, was written by something else, or has other landing memory.
    """
    check_member(peer.rank, context)
    if len(peer.payload) != _PAYLOAD.size or not peer.payload.startswith(_MAGIC):
        raise error_for("EPLB-M005", peer=peer.rank, problem=f"its metadata was not written by this {NAME}")
    _, slots, nbytes, nonce = _PAYLOAD.unpack(peer.payload)
    for field, local, remote in (
        ("landing slots", context.staging_layers, slots),
        ("landing slot nbytes", slot_nbytes, nbytes),
    ):
        if local != remote:
            raise error_for("EPLB-M004", label=NAME, field=field, peer=peer.rank, local=local, remote=remote)
    return bytes(nonce)
