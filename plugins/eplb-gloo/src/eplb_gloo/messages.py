"""One side of a layer's plan as gloo messages: which rows, how long, from or to whom, under which tag."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from eplb_core.backend import MoveColumns

IntArray = npt.NDArray[np.int64]

TAG_BITS = 30
"""Tags of messages stay below 2**30; gloo takes 31 bits, and the group keeps the upper half for itself."""

_MASK64 = (1 << 64) - 1
_OF_SEQUENCE, _OF_MESSAGE, _OF_NBYTES, _MIX = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0xD6E8FEB86659FD93,
)


@dataclass(frozen=True, eq=False)
class Registered:
    """What a plan is checked against: sizes that all members agreed upon at connect.

    Parameters
    ----------
    row_nbytes : list of IntArray
        ``[num_layers]`` of ``[num_tensors]``, bytes of one expert's row.
    num_rows : int
        Rows of every tensor.
    slot_nbytes : int
        Bytes of a landing slot, the same on every member.
    group_rank : IntArray
        ``[world_size]``, place among the members, -1 for ranks that are none.
    own : int
        This rank's place.
    """

    row_nbytes: list[IntArray]
    num_rows: int
    slot_nbytes: int
    group_rank: IntArray
    own: int

    @cached_property
    def num_members(self) -> int:
        """Members of the group."""
        return int(np.count_nonzero(self.group_rank >= 0))


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages in the order in which they are posted.

    Parameters
    ----------
    peers, group_ranks, tags, offsets, nbytes : list of int
        ``[num_messages]``: the other rank, its place among the members, gloo's tag, where the message lands in the
        receiver's slot, its length.
    starts : list of int
        ``[num_messages + 1]``: message i holds rows ``starts[i]`` to ``starts[i + 1] - 1``.
    tensors : list of int
        ``[num_rows]``, ascending within a message.
    rows : IntArray
        ``[num_rows]``, writable.
    """

    peers: list[int]
    group_ranks: list[int]
    tags: list[int]
    offsets: list[int]
    nbytes: list[int]
    starts: list[int]
    tensors: list[int]
    rows: IntArray

    def __len__(self) -> int:
        return len(self.tags)


NO_MESSAGES = Messages([], [], [], [], [], [0], [], np.zeros(0, np.int64))


class MisfitError(Exception):
    """Says how a plan does not fit what was registered; the backend says whose plan."""


def cut_messages(columns: MoveColumns, layer: int, sequence: int, registered: Registered) -> Messages:
    """Cut a layer's sends or receives into messages, after checking that every byte of them lies where it may.

    A message that does not fit the receiver's buffer ends its process inside gloo, so nothing is left to trust here.
    The tag carries the length as well: where two ranks were given different plans after all, their messages do not
    meet, and both run into the limit of their wait instead.

    Parameters
    ----------
    columns : MoveColumns
        In canonical order.
    layer, sequence : int
        Of the plan.
    registered : Registered
        What the plan must fit.

    Returns
    -------
    Messages
        By peer, beginning with the next higher member so that the members do not all start with the same one, then by
        number. Messages of one tag between one pair are matched in this order, so equal tags do no harm.

    Raises
    ------
    MisfitError
        A peer, tensor, row, size or landing range is not among what was registered.
    """
    if not len(columns):
        return NO_MESSAGES
    group_rank = _group_ranks(columns, layer, registered)
    order = np.lexsort((columns.message, (group_rank - registered.own) % registered.num_members))
    group_rank, message = group_rank[order], columns.message[order]
    nbytes, offset = columns.nbytes[order], columns.landing_offset[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (group_rank[1:] != group_rank[:-1]) | (message[1:] != message[:-1])
    starts = np.flatnonzero(begins)
    length, landing = np.add.reduceat(nbytes, starts), offset[starts]
    if np.any((offset[1:] - offset[:-1] != nbytes[:-1]) & ~begins[1:]):
        raise MisfitError("rows of one message do not follow one another in landing memory")
    if landing.min() < 0 or (landing + length).max() > registered.slot_nbytes:
        raise MisfitError(f"a message lies outside the landing slot of {registered.slot_nbytes} bytes")
    return Messages(
        peers=columns.peer[order[starts]].tolist(),
        group_ranks=group_rank[starts].tolist(),
        tags=_tags(sequence, message[starts], length),
        offsets=landing.tolist(),
        nbytes=length.tolist(),
        starts=[*starts.tolist(), len(order)],
        tensors=columns.tensor[order].tolist(),
        rows=columns.row[order],
    )


def _group_ranks(columns: MoveColumns, layer: int, registered: Registered) -> IntArray:
    if not 0 <= layer < len(registered.row_nbytes):
        raise MisfitError(f"layer {layer} is not registered")
    of_layer = registered.row_nbytes[layer]
    for name, column, limit in (
        ("rank", columns.peer, len(registered.group_rank)),
        ("tensor", columns.tensor, len(of_layer)),
        ("row", columns.row, registered.num_rows),
    ):
        if column.view(np.uint64).max() >= limit:  # negative numbers are the largest of all
            raise MisfitError(f"there is no {name} {column.max() if column.max() >= limit else column.min()}")
    group_rank = registered.group_rank[columns.peer]
    strangers = (group_rank < 0) | (group_rank == registered.own)
    if strangers.any():
        raise MisfitError(f"rank {columns.peer[strangers][0]} is not another member")
    if (columns.nbytes != of_layer[columns.tensor]).any():
        raise MisfitError("the rows have other sizes")
    return group_rank


def _tags(sequence: int, message: IntArray, length: IntArray) -> list[int]:
    mixed = message.astype(np.uint64) * np.uint64(_OF_MESSAGE) ^ length.astype(np.uint64) * np.uint64(_OF_NBYTES)
    mixed ^= np.uint64(sequence * _OF_SEQUENCE & _MASK64)
    tags: list[int] = (mixed * np.uint64(_MIX) >> np.uint64(64 - TAG_BITS)).tolist()
    return tags
