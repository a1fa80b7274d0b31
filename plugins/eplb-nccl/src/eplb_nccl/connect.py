"""Connecting: all members of the group once, then each new pair, which proves who is behind a rank of the group."""

from __future__ import annotations

from collections.abc import Mapping

from eplb_core.backend import BackendContext
from eplb_core.backend.toolkit import Deadline, RowMove, greet
from eplb_core.errors import error_for
from eplb_nccl.group import Failure, Posted
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


def meet(
    group: WatchedGroup, context: BackendContext, own_nonce: bytes, nonces: Mapping[int, bytes], deadline: Deadline
) -> None:
    """Exchange nonces with peers that are new.

    Raises
    ------
    StalledError, TransferError
        A peer did not come, or the group failed; it is severed.
    MetadataError
        EPLB-M005: another process is behind a peer's rank of the group.
    """

    def exchange(batches: list[list[RowMove]]) -> None:
        posted: list[Posted] = []
        failure = group.post(batches, tag_of(context, "greeting"), deadline, posted) or group.finish(posted, deadline)
        if failure is not None:
            raise _severed(group, failure, deadline)

    greet(context, own_nonce, nonces, exchange, on_stream=group.stream)


def _severed(group: WatchedGroup, failure: Failure, deadline: Deadline) -> Exception:
    group.sever(f"{WHERE} over {NAME}", failure.reason)
    return group.explain(failure, WHERE, deadline.elapsed_s)
