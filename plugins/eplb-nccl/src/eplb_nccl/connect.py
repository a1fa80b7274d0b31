"""Connecting: all members of the group once, then each new pair, which proves who is behind a rank of the group."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from eplb_core.backend import BackendContext
from eplb_core.backend.toolkit import Deadline, rounds_of_pairs
from eplb_core.errors import error_for
from eplb_nccl.group import Failure, Operation, Posted
from eplb_nccl.hooks import NAME
from eplb_nccl.transfer import tag_of
from eplb_nccl.watched import WatchedGroup

WHERE = "phase connect"


def meet_all(group: WatchedGroup, context: BackendContext, deadline: Deadline) -> None:
    """Call every member of the group once.

    Raises
    ------
    StalledError, TransferError
        Not all of them came, or the group failed; it is severed.
    ConfigError
        EPLB-C010: the members' groups are not one.
    """
    failure, count = group.count_members(deadline)
    if failure is not None:
        others = tuple(rank for rank in context.members if rank != context.rank)
        raise _severed(group, failure._replace(peers=others), deadline)
    if count != len(context.members):
        problem = f"the members' device groups are not one: it counted {count} of {len(context.members)}"
        raise error_for("EPLB-C010", problem=problem)


def greet(
    group: WatchedGroup,
    context: BackendContext,
    place: Mapping[int, int],
    own_nonce: bytes,
    nonces: Mapping[int, bytes],
    deadline: Deadline,
) -> None:
    """Exchange nonces with peers that are new.

    Parameters
    ----------
    group : WatchedGroup
        Over which.
    context : BackendContext
        Who the members are.
    place : mapping of int to int
        Their ranks within the group.
    own_nonce : bytes
        Drawn by this rank.
    nonces : mapping of int to bytes
        What each peer's metadata says that it drew.
    deadline : Deadline
        Limit.

    Raises
    ------
    StalledError, TransferError
        A peer did not come, or the group failed; it is severed.
    MetadataError
        EPLB-M005: another process is behind a peer's rank of the group.
    """
    with group.stream():
        mine = torch.frombuffer(bytearray(own_nonce), dtype=torch.uint8).to(context.device)
        heard = {rank: torch.zeros_like(mine) for rank in nonces}
    rounds = rounds_of_pairs(
        context.members, context.rank, nonces, peers_per_round=max(1, context.max_ops_per_batch // 2)
    )
    batches = [
        [
            *(Operation(rank, place[rank], False, heard[rank]) for rank in ranks),
            *(Operation(rank, place[rank], True, mine) for rank in ranks),
        ]
        for ranks in rounds
    ]
    posted: list[Posted] = []
    failure = group.post(batches, tag_of(context, "greeting"), deadline, posted) or group.finish(posted, deadline)
    if failure is not None:
        raise _severed(group, failure, deadline)
    for rank, nonce in nonces.items():
        if bytes(heard[rank].cpu().numpy()) != nonce:
            problem = f"rank {place[rank]} of the device_group is not the process that is rank {rank} here"
            raise error_for("EPLB-M005", peer=rank, problem=problem)


def _severed(group: WatchedGroup, failure: Failure, deadline: Deadline) -> Exception:
    group.sever(f"{WHERE} over {NAME}", failure.reason)
    return group.explain(failure, WHERE, deadline.elapsed_s)
