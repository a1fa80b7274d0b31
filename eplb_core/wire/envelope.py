"""The envelope of every message in the store: what it is, whose it is, of which generation, and whether it is whole."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache

from eplb_core.errors import MetadataError

MAGIC = b"EPLB"
FORMAT_VERSION = 1
"""Rises whenever the envelope or anything inside one changes."""

_HEADER = struct.Struct("<4sB15s16siqqI")  # magic, version, kind, communicator, rank, epoch, generation, body length
_CHECKSUM_NBYTES = 16
OVERHEAD_NBYTES = _HEADER.size + _CHECKSUM_NBYTES
"""Bytes that `MessageScope.seal` adds to a body."""


@dataclass(frozen=True)
class MessageScope:
    """What a message is bound to; only the same scope opens it again.

    Parameters
    ----------
    name : str
        Communicator.
    rank : int
        Who writes; 0 for keys that anyone may write.
    epoch, generation : int
        The rearrangement it belongs to.
    """

    name: str
    rank: int
    epoch: int
    generation: int

    def of(self, *, rank: int | None = None, generation: int | None = None) -> MessageScope:
        """Return the scope of another rank or generation."""
        return MessageScope(
            self.name,
            self.rank if rank is None else rank,
            self.epoch,
            self.generation if generation is None else generation,
        )

    def seal(self, kind: str, body: bytes) -> bytes:
        """Wrap a body, of at most 4 GiB, so that only `unseal` of the same scope and kind accepts it.

        Notes
        -----
        A kind is 1 to 15 printable ASCII characters, else ValueError. `OVERHEAD_NBYTES` are added.
        """
        bound = _name_field(self.name), self.rank, self.epoch, self.generation
        head = _HEADER.pack(MAGIC, FORMAT_VERSION, _kind_field(kind), *bound, len(body))
        return b"".join((head, _checksum(head, body), body))

    def unseal(self, blob: bytes, kind: str, limit: int) -> bytes:
        """Return the body of a sealed message of at most ``limit`` bytes; anything else is refused (EPLB-M005).

        Notes
        -----
        Nothing of the message is believed before all of it is checked: magic, version, length, checksum, then kind and
        scope.
        """
        problem = _damage(blob, limit) or _foreign(blob, kind, self)
        if problem:
            raise MetadataError("EPLB-M005", peer=self.rank, problem=problem)
        return blob[OVERHEAD_NBYTES:]


def _damage(blob: bytes, limit: int) -> str | None:
    """Say why some bytes are no whole message of this format, or None."""
    if len(blob) < OVERHEAD_NBYTES:
        return f"it is truncated, {len(blob)} bytes where the envelope alone takes {OVERHEAD_NBYTES}"
    magic, version, *_, nbytes = _HEADER.unpack_from(blob)
    if magic != MAGIC:
        return f"it starts with {magic!r} where {MAGIC!r} was expected"
    if version != FORMAT_VERSION:
        return f"it has format version {version} where this release reads {FORMAT_VERSION}"
    if nbytes > limit:
        return f"its body claims {nbytes} bytes where at most {limit} are accepted"
    spare = len(blob) - OVERHEAD_NBYTES - nbytes
    if spare < 0:
        return f"it is truncated, {nbytes + spare} bytes of a body of {nbytes}"
    if spare > 0:
        return f"{spare} bytes follow its end"
    if blob[_HEADER.size : OVERHEAD_NBYTES] != _checksum(blob[: _HEADER.size], blob[OVERHEAD_NBYTES:]):
        return "its checksum does not match, so it was damaged on the way"
    return None


def _foreign(blob: bytes, kind: str, scope: MessageScope) -> str | None:
    """Say why a whole message is not the one that is expected, or None."""
    _, _, its_kind, its_name, its_rank, its_epoch, its_generation, _ = _HEADER.unpack_from(blob)
    if its_kind != _kind_field(kind):
        return f"it is a {its_kind.rstrip(bytes(1)).decode('ascii', 'replace')!r} where a {kind!r} was expected"
    if its_name != _name_field(scope.name):
        return f"it belongs to a communicator of another name than {scope.name!r}"
    if its_rank != scope.rank:
        return f"it was written by rank {its_rank}"
    if its_epoch != scope.epoch:
        return f"it is {_age(its_epoch, scope.epoch)}, of epoch {its_epoch} where {scope.epoch} was expected"
    if its_generation != scope.generation:
        age = _age(its_generation, scope.generation)
        return f"it is {age}, of generation {its_generation} where {scope.generation} was expected"
    return None


def _age(its: int, expected: int) -> str:
    return "stale" if its < expected else "ahead"


def _checksum(head: bytes, body: bytes) -> bytes:
    digest = hashlib.blake2b(head, digest_size=_CHECKSUM_NBYTES)
    digest.update(body)
    return digest.digest()


@lru_cache(maxsize=64)
def _kind_field(kind: str) -> bytes:
    if not (kind.isascii() and kind.isprintable() and 1 <= len(kind) <= 15):
        raise ValueError(f"kind {kind!r} is not 1 to 15 printable ASCII characters")
    return kind.encode("ascii").ljust(15, b"\0")


@lru_cache(maxsize=64)
def _name_field(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
