"""Settling what a failure left in doubt: survivors tell what they know of each layer, and all come to one answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from eplb_core.backend.toolkit import Deadline
from eplb_core.control.store import StoreClient
from eplb_core.errors import MetadataError, TransferError, error_for
from eplb_core.plan.maps import map_digest
from eplb_core.wire.envelope import seal, unseal

if TYPE_CHECKING:
    from eplb_core.rearrange.state import Ledger

_LIMIT_NBYTES = 1 << 20


def settle(
    client: StoreClient, ledger: Ledger, *, name: str, rank: int, epoch: int, members: Sequence[int], timeout_s: float
) -> None:
    """Bring every member to the same placement; collective over the members of a rebuild.

    A layer is in doubt on a rank that cast its ballot and could not read the decision. Commit implies that every
    landing was complete, so if any member saw commit, the others copy their landing rows too; if none did, a rank
    that is gone may have, but it is gone, and all stay old.

    Parameters
    ----------
    client : StoreClient
        In the namespace of the new epoch.
    ledger : Ledger
        This rank's books; doubtful layers are committed or dropped.
    name, rank, epoch, members
        What the messages are bound to, and who writes one.
    timeout_s : float
        Limit for the slowest member to come, seconds.

    Raises
    ------
    StalledError
        A member did not come in time (EPLB-T002).
    TransferError
        The placements differ even so (EPLB-T009).
    """
    deadline = Deadline(timeout_s)
    doubtful = {ledger.generation: [staged.number for staged in ledger.doubtful]}
    mine = json.dumps({"committed": ledger.history, "doubtful": doubtful}).encode()
    client.set(f"settle/{rank}", seal("settle", mine, name=name, rank=rank, epoch=epoch, generation=0))
    told = _gather(client, "settle", name=name, epoch=epoch, members=members, deadline=deadline)
    for staged in ledger.doubtful:
        if any(staged.number in _layers(record, ledger.generation) for record in told.values()):
            staged.copies.run()
            ledger.decided(staged.number)
    ledger.doubtful = []
    digest = map_digest(ledger.map) if ledger.map.size else b""  # a rank that joins holds no placement yet
    client.set(f"settled/{rank}", seal("settled", digest, name=name, rank=rank, epoch=epoch, generation=0))
    keys = [f"settled/{member}" for member in members]
    _await(client, keys, members, deadline)
    for member, value in zip(members, client.read_many(keys), strict=True):
        other = unseal(value, "settled", name=name, rank=member, epoch=epoch, generation=0, limit=_LIMIT_NBYTES)
        if other and digest and other != digest:
            problem = f"after settling, rank {member} holds another placement than rank {rank}"
            raise TransferError("EPLB-T009", problem=problem)


def _gather(
    client: StoreClient, kind: str, *, name: str, epoch: int, members: Sequence[int], deadline: Deadline
) -> dict[int, Mapping[str, Mapping[str, list[int]]]]:
    keys = [f"{kind}/{member}" for member in members]
    _await(client, keys, members, deadline)
    told = {}
    for member, value in zip(members, client.read_many(keys), strict=True):
        body = unseal(value, kind, name=name, rank=member, epoch=epoch, generation=0, limit=_LIMIT_NBYTES)
        try:
            told[member] = json.loads(body)
        except ValueError as error:
            raise MetadataError("EPLB-M005", peer=member, problem=f"malformed {kind}: {error}") from error
    return told


def _await(client: StoreClient, keys: list[str], members: Sequence[int], deadline: Deadline) -> None:
    pause_s = 1e-3
    while not client.exists(*keys):
        if deadline.over:
            missing = [member for member, key in zip(members, keys, strict=True) if not client.exists(key)]
            raise error_for(
                "EPLB-T002",
                seconds=deadline.elapsed_s,
                where="rebuild, phase settle",
                waiting_for=f"rank(s) {missing}",
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)


def _layers(record: Mapping[str, Mapping[str, list[int]]], generation: int) -> list[int]:
    return list(record["committed"].get(str(generation), ()))
