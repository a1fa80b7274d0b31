"""The load of all ranks, added up over the store by one of them, which places experts by it and tells the others."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eplb_core.arrays import IntArray
from eplb_core.balancing.arguments import FloatArray
from eplb_core.balancing.policy import NewPlacement
from eplb_core.errors import EplbError, MetadataError, error_for
from eplb_core.wire.ballots import decode_error, encode_error

if TYPE_CHECKING:
    from eplb_core.control.store import StoreClient
    from eplb_core.voting.members import Members

ONE_LEVEL = 64
"""Up to this many ranks one adds all posts; beyond it groups of about the square root add theirs first."""

_LONGEST_PAUSE_S = 20e-3
_TEXT_NBYTES = 64 << 10
_HEAD = struct.Struct("<q")  # version
_COUNTS, _TOKENS, _ERROR = b"I", b"d", b"E"

Pause = Callable[[str, Callable[[], list[int]]], None]
"""``pause(what, missing)`` is called while a rank waits; it raises when the wait is to end. ``missing()`` asks the
store for whom it waits."""


@dataclass(frozen=True, eq=False)
class Round:
    """What all ranks know after an exchange.

    Parameters
    ----------
    step : int
        The forward step at which the placing rank's window ended: rearrangements are counted from it.
    placement : NewPlacement or None
        What is to hold, on every rank the same.
    refusal : EplbError or None
        Why there is none.
    """

    step: int
    placement: NewPlacement | None
    refusal: EplbError | None = None


class LoadExchange:
    """One rank's part in the exchanges of an epoch; used by one thread, with a store client of its own.

    Parameters
    ----------
    client : StoreClient
        In the namespace of the communicator.
    members : Members
        The ranks that take part, and the epoch that messages are bound to.
    key : callable
        From a name to a key of this load balancer's.
    num_layers, num_logical_experts, num_physical_experts : int
        Shapes of loads and maps.
    """

    def __init__(
        self,
        client: StoreClient,
        members: Members,
        key: Callable[[str], str],
        *,
        num_layers: int,
        num_logical_experts: int,
        num_physical_experts: int,
    ) -> None:
        self._client = client
        self._members = members
        self._key_of = key
        self._load_shape = (num_layers, num_logical_experts)
        self._map_shape = (num_layers, num_physical_experts)
        self._number = 0
        self._version = 0
        self._groups = groups_of(members.members)

    def run(
        self,
        step: int,
        version: int,
        load: FloatArray | EplbError,
        place: Callable[[FloatArray], NewPlacement],
        pause: Pause,
    ) -> Round:
        """Post this rank's load and return what is placed by that of all; collective.

        Parameters
        ----------
        step : int
            At which this rank's window ended.
        version : int
            How often this rank's map was replaced by the host. Ranks that have not all replaced it call this exchange
            off (EPLB-T021).
        load : FloatArray or EplbError
            float64 [num_layers, num_logical_experts], or why there is none: every rank is then told that.
        place : callable
            From the load of all ranks to a placement; called on the lowest member alone.
        pause : callable
            See `Pause`.

        Returns
        -------
        Round

        Raises
        ------
        EplbError
            What `pause` raises; or a message is damaged.
        StoreGone
            The store did not answer.
        """
        self._number += 1
        self._version = version
        rank, root = self._members.rank, self._members.members[0]
        group = next(group for group in self._groups if rank in group)
        self._post("load", self._encoded(load))
        if rank == group[0]:
            added = self._added("load", group, pause)
            if len(self._groups) > 1:
                self._post("sum", self._encoded(added))
            if rank == root:
                if len(self._groups) > 1:
                    added = self._added("sum", [others[0] for others in self._groups], pause)
                # Everybody who posted a load of this round has read the placement of the one before.
                self._delete(self._key("placement", root, self._number - 1))
                self._post("placement", self._placed(step, added, place))
        self._await("the placement", "placement", [root], pause)
        found = self._read("placement", root, _TEXT_NBYTES + 4 * math.prod(self._map_shape))
        self._delete(*(self._key(kind, rank) for kind in ("load", "sum")))
        return self._round(root, found)

    # --- the load -----------------------------------------------------------------------------------------------------

    def _added(self, kind: str, ranks: Sequence[int], pause: Pause) -> FloatArray | EplbError:
        """Add up what ranks posted; what is wrong with one is returned, for all ranks to raise."""
        self._await(f"the {kind} of", kind, ranks, pause)
        total = np.zeros(self._load_shape)
        try:
            for rank in ranks:
                total += self._decoded(rank, self._read(kind, rank, _TEXT_NBYTES + 8 * total.size))
        except EplbError as error:
            return error
        return total

    def _encoded(self, load: FloatArray | EplbError) -> bytes:
        return _HEAD.pack(self._version) + self._encoded_load(load)

    @staticmethod
    def _encoded_load(load: FloatArray | EplbError) -> bytes:
        if isinstance(load, EplbError):
            return _ERROR + json.dumps(encode_error(load)).encode()
        whole = load.astype("<u4") if load.max(initial=0) < 2**32 else None
        if whole is not None and (whole == load).all():  # tokens: half the bytes
            return _COUNTS + whole.tobytes()
        return _TOKENS + load.astype("<f8").tobytes()

    def _decoded(self, rank: int, body: bytes) -> FloatArray:
        kind, rest = body[_HEAD.size : _HEAD.size + 1], body[_HEAD.size + 1 :]
        if len(body) < _HEAD.size or _HEAD.unpack_from(body)[0] != self._version:
            raise error_for("EPLB-T021", reason="not every rank's map has been replaced yet")
        if kind == _ERROR:
            raise _decoded_error(rank, rest)
        width = {_COUNTS: 4, _TOKENS: 8}.get(kind, 0)
        if len(rest) != width * math.prod(self._load_shape):
            raise MetadataError("EPLB-M005", peer=rank, problem=f"its load has {len(rest)} bytes")
        load = np.frombuffer(rest, "<u4" if width == 4 else "<f8").astype(np.float64)
        return load.reshape(self._load_shape)

    # --- the placement ------------------------------------------------------------------------------------------------

    def _placed(self, step: int, load: FloatArray | EplbError, place: Callable[[FloatArray], NewPlacement]) -> bytes:
        try:
            if isinstance(load, EplbError):
                raise load
            new = place(load)
        except EplbError as error:
            return json.dumps({"step": step, "refused": encode_error(error)}).encode() + b"\n"
        head = {
            "step": step,
            "before": new.balancedness_before,
            "after": new.balancedness_after,
            "moved": new.num_moved_layers,
            "rows": new.num_rows,
            "unaligned": new.num_rows_unaligned,
        }
        return json.dumps(head).encode() + b"\n" + new.physical_to_logical_map.astype("<i4").tobytes()

    def _round(self, root: int, body: bytes) -> Round:
        raw, _, placed = body.partition(b"\n")
        try:
            head = json.loads(raw)
            if "refused" in head:
                return Round(int(head["step"]), None, decode_error(head["refused"]))
            mapping: IntArray = np.frombuffer(placed, "<i4").astype(np.int64).reshape(self._map_shape)
            placement = NewPlacement(
                mapping,
                float(head["before"]),
                float(head["after"]),
                int(head["moved"]),
                int(head["rows"]),
                int(head["unaligned"]),
            )
            return Round(int(head["step"]), placement)
        except (ValueError, KeyError, TypeError) as error:
            raise MetadataError("EPLB-M005", peer=root, problem=f"malformed placement: {error!r}") from error

    # --- the store ----------------------------------------------------------------------------------------------------

    def _key(self, kind: str, rank: int, number: int | None = None) -> str:
        return self._key_of(f"{self._number if number is None else number}/{kind}/{rank}")

    def _post(self, kind: str, body: bytes) -> None:
        key = self._key(kind, self._members.rank)
        self._client.set(key, self._members.seal(kind, body, generation=self._number))
        # What is left over goes with the epoch's other keys; a placement when the last member leaves.
        (self._members.client.shared if kind == "placement" else self._members.client.own).add(key)

    def _delete(self, *keys: str) -> None:
        self._client.delete(*keys)
        self._members.client.shared.difference_update(keys)
        self._members.client.own.difference_update(keys)

    def _read(self, kind: str, rank: int, limit_nbytes: int) -> bytes:
        value = self._client.read(self._key(kind, rank))
        if value is None:
            raise MetadataError("EPLB-M005", peer=rank, problem=f"its {kind} is gone")
        body = self._members.open(value, kind, rank=rank, generation=self._number)
        if len(body) > limit_nbytes:
            raise MetadataError("EPLB-M005", peer=rank, problem=f"its {kind} has {len(body)} bytes")
        return body

    def _await(self, what: str, kind: str, ranks: Sequence[int], pause: Pause) -> None:
        keys = {rank: self._key(kind, rank) for rank in ranks}

        def missing() -> list[int]:
            return [rank for rank, key in keys.items() if not self._client.exists(key)]

        pause_s = 0.5e-3
        while not self._client.exists(*keys.values()):
            pause(what, missing)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def groups_of(members: Sequence[int]) -> list[Sequence[int]]:
    """Cut the members into groups whose first adds up the others' posts; one group where they are few."""
    size = len(members) if len(members) <= ONE_LEVEL else math.isqrt(len(members) - 1) + 1
    return [members[start : start + size] for start in range(0, len(members), size)]


def _decoded_error(rank: int, body: bytes) -> EplbError:
    try:
        return decode_error(json.loads(body))
    except (ValueError, KeyError, TypeError) as error:
        return MetadataError("EPLB-M005", peer=rank, problem=f"malformed refusal: {error!r}")
