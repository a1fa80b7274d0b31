"""What this rank tells its peers: agent metadata and one base address per tensor, in a binary form of our own."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

AddressArray = npt.NDArray[np.uint64]

MAGIC = b"EPNX"
FORMAT = 2
_MODES: tuple[Literal["zero_copy", "staged"], ...] = ("zero_copy", "staged")
_MEMORY = ("DRAM", "VRAM")

# magic, format, mode, memory type, rank, device, slots, addresses of each, by row, warm-up address, lengths of agent
# name, NIXL version, agent metadata and packed addresses.
_HEADER = struct.Struct("<4sHBBIIIIBQHHII")
_MOST_ADDRESSES = 1 << 24
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, eq=False)
class SourceRecord:
    """How a rank's rows can be read.

    Parameters
    ----------
    rank : int
        Rank that the record describes.
    agent_name : str
        The name under which NIXL knows it; a random part of it is of this life alone.
    library_version : str
        NIXL's; its metadata is read by the same version only.
    mode : {"zero_copy", "staged"}
        staged: wait for this rank's announcement before each READ.
    memory_type : str
        NIXL's name of the memory that is read, "DRAM" or "VRAM".
    device_index : int
        Device of that memory; 0 for DRAM.
    bases : AddressArray
        ``[num_slots, num_tensors]``: where each tensor's grid of rows starts. Tensors are counted over all layers, in
        order. Zero-copy has one slot, live memory; staged has one per landing slot. Strides are the layout's.
        With `by_row`, ``[1, num_rows]``: where each row is, tensors without bytes left out.
    warm_address : int
        What the first READ between two agents reads, in the same kind of memory; see `eplb_nixl.warmup`.
    agent_metadata : bytes
        NIXL's own metadata of the agent.
    by_row : bool
        Do rows lie apart, each with an address of its own?
    """

    rank: int
    agent_name: str
    library_version: str
    mode: Literal["zero_copy", "staged"]
    memory_type: str
    device_index: int
    bases: AddressArray
    warm_address: int
    agent_metadata: bytes
    by_row: bool = False

    def to_bytes(self) -> bytes:
        """Return the wire form: header, name, version, metadata, addresses, checksum of all that."""
        name, version = self.agent_name.encode(), self.library_version.encode()
        num_slots, num_addresses = self.bases.shape
        # Addresses differ by little and regularly: thousands of them take a few KiB.
        steps = np.diff(np.ascontiguousarray(self.bases, dtype="<u8").reshape(-1), prepend=np.uint64(0))
        addresses = zlib.compress(steps.astype("<u8").tobytes(), 9)
        header = _HEADER.pack(
            MAGIC,
            FORMAT,
            _MODES.index(self.mode),
            _MEMORY.index(self.memory_type),
            self.rank,
            self.device_index,
            num_slots,
            num_addresses,
            self.by_row,
            self.warm_address,
            len(name),
            len(version),
            len(self.agent_metadata),
            len(addresses),
        )
        body = b"".join((header, name, version, self.agent_metadata, addresses))
        return body + _CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def from_bytes(cls, payload: bytes) -> SourceRecord:
        """Read the wire form.

        Parameters
        ----------
        payload : bytes
            Result of `to_bytes`, or anything at all.

        Returns
        -------
        SourceRecord
            Every field within its bounds; whose it is, the caller checks.

        Raises
        ------
        ValueError
            It is no such record; the message says why.
        """
        if len(payload) < _HEADER.size + _CHECKSUM.size:
            raise ValueError(f"its NIXL metadata has {len(payload)} bytes, too few")
        fields = _HEADER.unpack_from(payload)
        magic, form, mode, memory, rank, device, num_slots, num_addresses, by_row, warm_address, *lengths = fields
        if magic != MAGIC:
            raise ValueError("its NIXL metadata does not start as such metadata does")
        if form != FORMAT:
            raise ValueError(f"its NIXL metadata has format {form}, this rank reads format {FORMAT}")
        expected = _HEADER.size + sum(lengths) + _CHECKSUM.size
        if len(payload) != expected:
            raise ValueError(f"its NIXL metadata has {len(payload)} bytes where its header promises {expected}")
        body, (checksum,) = payload[: -_CHECKSUM.size], _CHECKSUM.unpack(payload[-_CHECKSUM.size :])
        if zlib.crc32(body) != checksum:
            raise ValueError("the checksum of its NIXL metadata is wrong")
        if mode >= len(_MODES) or memory >= len(_MEMORY) or by_row > 1 or not num_slots:
            raise ValueError("its NIXL metadata names a mode or memory that does not exist")
        ends = np.cumsum([_HEADER.size, *lengths]).tolist()
        name, version, metadata, packed = (body[start:end] for start, end in pairwise(ends))
        bases = _unpacked(packed, num_slots, num_addresses)
        try:
            agent_name, library_version = name.decode(), version.decode()
        except UnicodeDecodeError:
            raise ValueError("the agent name in its NIXL metadata is no text") from None
        return cls(
            rank=rank,
            agent_name=agent_name,
            library_version=library_version,
            mode=_MODES[mode],
            memory_type=_MEMORY[memory],
            device_index=device,
            bases=bases,
            warm_address=warm_address,
            agent_metadata=metadata,
            by_row=bool(by_row),
        )


def _unpacked(packed: bytes, num_slots: int, num_addresses: int) -> AddressArray:
    nbytes = 8 * num_slots * num_addresses
    if nbytes > 8 * _MOST_ADDRESSES:
        raise ValueError(f"its NIXL metadata names {num_slots * num_addresses} addresses")
    unpacker = zlib.decompressobj()
    try:
        steps = unpacker.decompress(packed, nbytes + 1)
    except zlib.error as error:
        raise ValueError(f"the addresses in its NIXL metadata cannot be unpacked: {error}") from None
    if len(steps) != nbytes or not unpacker.eof:
        raise ValueError("the addresses in its NIXL metadata are not as many as its header promises")
    return np.cumsum(np.frombuffer(steps, "<u8"), dtype=np.uint64).reshape(num_slots, num_addresses)
