"""What members tell each other before they connect: their place in the device group, and a nonce."""

from __future__ import annotations

import struct

from eplb_core.backend import PeerMetadata
from eplb_core.errors import error_for
from eplb_nccl.hooks import NAME

NONCE_NBYTES = 16

_PAYLOAD = struct.Struct(f"!8sII{NONCE_NBYTES}s")  # magic, rank and size of the device group, nonce
_MAGIC = b"eplbtnc1"


def pack(place: int, size: int, nonce: bytes) -> bytes:
    """Return this rank's payload."""
    return _PAYLOAD.pack(_MAGIC, place, size, nonce)


def nonce_of(peer: PeerMetadata, *, place: int, size: int) -> bytes:
    """Return the nonce that a peer drew, after checking that its group is ours.

    Parameters
    ----------
    peer : PeerMetadata
        A member.
    place, size : int
        The rank that it must have in its device group, and the size that the group must have.

    Raises
    ------
    MetadataError
        EPLB-M005, it is not what `pack` wrote; EPLB-M004, it has another place, or a group of another size.
    """
    if len(peer.payload) != _PAYLOAD.size or not peer.payload.startswith(_MAGIC):
        raise error_for("EPLB-M005", peer=peer.rank, problem=f"its metadata was not written by this {NAME}")
    _, its_place, its_size, nonce = _PAYLOAD.unpack(peer.payload)
    for what, expected, theirs in (("device_group rank", place, its_place), ("device_group size", size, its_size)):
        if expected != theirs:
            raise error_for("EPLB-M004", label=NAME, field=what, peer=peer.rank, local=expected, remote=theirs)
    return bytes(nonce)
