"""After a failure, the members that meet again settle layers in doubt, so that all know what every row holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from eplb_core.arrays import IntArray
from eplb_core.errors import MetadataError
from eplb_core.rearrange.held import HeldPlacement
from eplb_core.voting.members import Members
from eplb_core.wire.ballots import Ballot


def known_of(held: HeldPlacement) -> dict[str, Any]:
    """Return what this rank knows: layers that it saw committed, and layers in doubt."""
    doubtful: dict[str, list[int]] = {}
    for doubt in held.doubts:
        doubtful.setdefault(doubt.rearrangement, []).append(doubt.layer)
    return {"committed": held.history, "doubtful": doubtful}


def to_roll_forward(ballots: Mapping[int, Ballot]) -> dict[str, list[int]]:
    """Return the doubtful layers that any member saw committed.

    Notes
    -----
    A layer is in doubt on a rank that cast its ballot and could not read the decision. Commit implies that every
    landing was complete, so if any member saw commit, the others copy their landing rows too; if none did, a rank
    that is gone may have, but it is gone, and all stay old.
    """
    forward: dict[str, set[int]] = {}
    for doubter in ballots.values():
        for rearrangement, layers in doubter.content["known"]["doubtful"].items():
            for witness in ballots.values():
                seen = witness.content["known"]["committed"].get(rearrangement, ())
                forward.setdefault(rearrangement, set()).update(set(layers).intersection(seen))
    return {rearrangement: sorted(layers) for rearrangement, layers in forward.items() if layers}


def publish_held(members: Members, held: HeldPlacement) -> None:
    """Publish what this rank's rows hold, in case members disagree."""
    if held.known:
        body = json.dumps(held.own_columns(members.rank).tolist()).encode()
        members.client.set(_key(members, members.rank), members.seal("held", body))


def settle_held(members: Members, held: HeldPlacement, digests: Mapping[int, str]) -> None:
    """Settle on one placement: the common one, or where members disagree, what each says of its own rows."""
    if not any(digests.values()):
        held.keep_only(members.members)
        return
    if len(set(digests.values())) == 1:
        held.keep_only(members.members)
        return
    held.merge({rank: _columns(members, held, rank) if digests[rank] else None for rank in members.members})


def _columns(members: Members, held: HeldPlacement, rank: int) -> IntArray:
    value = members.client.read(_key(members, rank))
    if value is None:
        raise MetadataError("EPLB-M005", peer=rank, problem="it did not tell what its rows hold")
    try:
        columns = np.array(json.loads(members.open(value, "held", rank=rank)), dtype=np.int64)
    except ValueError as error:
        raise MetadataError("EPLB-M005", peer=rank, problem=f"malformed placement: {error}") from error
    if columns.shape != (held.num_layers, held.num_local):
        raise MetadataError("EPLB-M005", peer=rank, problem=f"its placement has shape {columns.shape}")
    return columns


def _key(members: Members, rank: int) -> str:
    return members.key(f"held/{rank}")
