"""Checksums: before a layer commits, every row that crossed ranks is compared as sent and as landed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eplb_core.backend import Event
from eplb_core.errors import MetadataError, TransferError
from eplb_core.observers.base import Observer, StepName

if TYPE_CHECKING:
    import torch

    from eplb_core.backend import Buffers, MoveColumns, TransferPlan

MAX_EVIDENCE_NBYTES = 48 << 10
"""Bytes; a ballot has room for 64 KiB of all observers together."""

_MAGIC = b"EPLBsum1"
_ENTRY = np.dtype([("sent", "<u1"), ("peer", "<u4"), ("tensor", "<i4"), ("row", "<i4"), ("digest", "<u4")])
_ALL = -1  # in place of a tensor or a row: one digest stands for all of them

Entries = npt.NDArray[np.void]


class Checksums(Observer):
    """Verifies the rows that a backend delivers. All ranks of the communicator need one.

    Each rank takes a digest of every live row that it sends and of every row that landed. They travel in its ballot;
    the rank that decides compares them. A row that differs is an error of every rank, and no rank commits the layer.

    Where a layer has more rows than a ballot has room for, there is one digest for each tensor of each pair of ranks,
    and if need be one for each pair; the error then names no single row. Nothing goes unverified.

    Parameters
    ----------
    tensor_names : sequence of str
        ``[num_tensors]``, for messages; indices where it is too short.

    Notes
    -----
    A digest is the CRC-32 of a row (ISO 3309, `zlib.crc32`): it finds every change within 32 consecutive bits, and
    misses others once in 2**32. It is meant for faults, not for forgers. It costs about a second per GiB and core, and
    a copy to the host where weights are on a device: a mode for finding faults, not for every day.
    """

    name = "checksums"

    def __init__(self, tensor_names: Sequence[str] = ()) -> None:
        super().__init__()
        self._tensor_names = tuple(tensor_names)
        self._sent: dict[int, Entries] = {}
        self._received: dict[int, Entries] = {}

    def registered(self, buffers: Buffers) -> None:
        """Start with nothing in flight."""
        self._sent.clear()
        self._received.clear()

    def starts(self, name: StepName, plan: TransferPlan) -> None:
        """Take the digests of the rows that are sent, while they are on their way."""
        if name == "wait":
            moves = plan.sends
            of_row: dict[tuple[int, int], int] = {}  # a row that goes to several ranks is read once
            digests = []
            for tensor, row in zip(moves.tensor.tolist(), moves.row.tolist(), strict=True):
                if (tensor, row) not in of_row:
                    of_row[tensor, row] = digest(self.live(plan.layer, tensor, row))
                digests.append(of_row[tensor, row])
            self._sent[plan.layer] = _entries(True, moves, moves.peer_row, digests)

    def told(self, event: Event) -> bytes | None:
        """Put the digests of a layer into the ballot; compare those of all ranks on the one that decides."""
        layer = event.layer
        if event.kind == "agree":
            self._sent.clear()
        if layer is None:
            return None
        if event.kind == "vote":
            plan = self.landed_plan(layer)
            digests = [digest(self.landed(plan, number)) for number in range(len(plan.receives))]
            received = _entries(False, plan.receives, plan.receives.row, digests)
            return _encode(np.concatenate([self._sent.pop(layer), received]))
        if event.kind == "tally":
            compare(layer, event.evidence.get(self.name, {}), self._tensor_names)
        return None


def digest(row: torch.Tensor) -> int:
    """Return the digest of a row, uint8 ``[nbytes]``, on any device."""
    return zlib.crc32(row.cpu().numpy().data)


def compare(layer: int, evidence: Mapping[int, bytes], tensor_names: Sequence[str] = ()) -> None:
    """Compare the digests of sent rows with those of landed rows; ``evidence`` is by rank.

    Notes
    -----
    EPLB-T011 names layer, tensor, ranks and row. EPLB-T012: a rank gave no digests, or other rows than its peer.
    EPLB-M005: evidence that cannot be read.
    """
    entries = {rank: _decode(rank, value) for rank, value in evidence.items()}
    pairs = {
        (rank, int(peer)) if sent else (int(peer), rank)
        for rank, found in entries.items()
        for sent, peer in np.unique(found[["sent", "peer"]]).tolist()
    }
    for src, dst in sorted(pairs):
        for rank in (src, dst):
            if rank not in entries:
                problem = f"rank {rank} gave none, and exchanges rows with rank {src + dst - rank}"
                raise TransferError("EPLB-T012", layer=layer, problem=problem, detail="Every rank needs its observer.")
        sent, landed = _of(entries[src], True, dst), _of(entries[dst], False, src)
        level = max(_level(sent), _level(landed))
        sent, landed = _coarse(sent, level), _coarse(landed, level)
        if not np.array_equal(sent[["tensor", "row"]], landed[["tensor", "row"]]):
            problem = f"rank {src} sent {len(sent)} of them to rank {dst}, which says {len(landed)} landed, or others"
            raise TransferError("EPLB-T012", layer=layer, problem=problem)
        wrong = np.flatnonzero(sent["digest"] != landed["digest"])
        if len(wrong):
            raise _mismatch(layer, src, dst, landed[wrong], tensor_names)


def _mismatch(layer: int, src: int, dst: int, wrong: Entries, tensor_names: Sequence[str]) -> TransferError:
    tensor, row = int(wrong["tensor"][0]), int(wrong["row"][0])
    name = repr(tensor_names[tensor]) if 0 <= tensor < len(tensor_names) else str(tensor)
    return TransferError(
        "EPLB-T011",
        layer=layer,
        what="some tensor" if tensor == _ALL else f"tensor {name}, " + ("some row" if row == _ALL else f"row {row}"),
        src=src,
        dst=dst,
        detail=f"{len(wrong)} of the digests of this pair differ." if len(wrong) > 1 else "",
    )


# --- what travels -----------------------------------------------------------------------------------------------------


def _entries(sent: bool, moves: MoveColumns, landed_in: npt.NDArray[np.int64], digests: Sequence[int]) -> Entries:
    """Return an entry for each row; rows are named after where they land, which both ends know."""
    entries = np.zeros(len(moves), _ENTRY)
    entries["sent"] = sent
    entries["peer"] = moves.peer
    entries["tensor"] = moves.tensor
    entries["row"] = landed_in
    entries["digest"] = digests
    return entries


def _encode(entries: Entries) -> bytes:
    for level in range(3):
        value = _MAGIC + _coarse(entries, level).tobytes()
        if len(value) <= MAX_EVIDENCE_NBYTES:
            return value
    problem = f"the digests of {len(entries)} rows take {len(value)} bytes even as one for each pair of ranks"
    raise MetadataError("EPLB-M005", peer="this rank", problem=problem)


def _decode(rank: int, value: bytes) -> Entries:
    body = value[len(_MAGIC) :]
    if not value.startswith(_MAGIC) or len(body) % _ENTRY.itemsize:
        raise MetadataError("EPLB-M005", peer=rank, problem=f"{len(value)} bytes that are not checksums")
    return np.frombuffer(body, _ENTRY)


def _of(entries: Entries, sent: bool, peer: int) -> Entries:
    chosen: Entries = entries[(entries["sent"] == sent) & (entries["peer"] == peer)]
    return chosen


def _level(entries: Entries) -> int:
    """Return 0 where each row has its digest, 1 where each (pair, tensor), 2 where each pair has one."""
    if not len(entries):
        return 0
    return int((entries["row"] == _ALL).any()) + int((entries["tensor"] == _ALL).any())


def _coarse(entries: Entries, level: int) -> Entries:
    """Return one digest, of the digests, for each (pair, tensor) at level 1 and each pair at level 2.

    Notes
    -----
    Both ends come to the same one: the rows of a pair are in one order at both, by tensor, then by source row.
    """
    for at in range(_level(entries), level if len(entries) else 0):
        keys = entries[["sent", "peer"] if at else ["sent", "peer", "tensor"]]
        begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        coarse = entries[begins].copy()
        coarse["row"] = _ALL
        if at:
            coarse["tensor"] = _ALL
        coarse["digest"] = [zlib.crc32(part.tobytes()) for part in np.split(entries["digest"], begins[1:])]
        entries = coarse
    return entries
