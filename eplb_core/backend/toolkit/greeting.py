"""The first bytes of every pair: nonces, which prove which process is behind a rank of the host's group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from eplb_core.backend.toolkit.pairs import rounds_of_pairs
from eplb_core.backend.toolkit.rows import RowMove
from eplb_core.errors import error_for

if TYPE_CHECKING:  # the contract is read without torch
    from eplb_core.backend.protocol import BackendContext


def greet(
    context: BackendContext,
    own_nonce: bytes,
    nonces: Mapping[int, bytes],
    exchange: Callable[[list[list[RowMove]]], None],
    *,
    on_stream: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Exchange nonces with new peers; this also connects each pair.

    Two groups of the right size can hold each other's processes; metadata alone would not show it.

    Parameters
    ----------
    context : BackendContext
        Members, device, and how many operations a batch takes.
    own_nonce : bytes
        Drawn by this rank for this epoch; part of its metadata.
    nonces : mapping of int to bytes
        Nonce of each peer, from its metadata; all of one length.
    exchange : callable
        Carries out batches in order and returns when all are complete, or raises.
    on_stream : callable
        Returns a context manager in which torch queues on the backend's stream.

    Raises
    ------
    MetadataError
        EPLB-M005: another process is behind a peer's rank.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import torch
    >>> context = SimpleNamespace(rank=0, members=(0, 1), device=torch.device("cpu"), max_ops_per_batch=32)
    >>> def exchange(batches):  # as if rank 1 had sent other bytes
    ...     for move in batches[0]:
    ...         if not move.is_send:
    ...             move.buffer.fill_(7)
    >>> greet(context, b"mine", {1: b"hers"}, exchange)
    Traceback (most recent call last):
        ...
    eplb_core.errors.classes.MetadataError: Refused a message from rank 1: rank 1 of the group is not the process \
that is rank 1 here. [EPLB-M005]
    """
    import torch

    with on_stream():
        mine = torch.frombuffer(bytearray(own_nonce), dtype=torch.uint8).to(context.device)
        heard = {peer: torch.zeros_like(mine) for peer in nonces}
    rounds = rounds_of_pairs(
        context.members, context.rank, nonces, peers_per_round=max(1, context.max_ops_per_batch // 2)
    )
    exchange(
        [
            [*(RowMove(peer, False, heard[peer]) for peer in peers), *(RowMove(peer, True, mine) for peer in peers)]
            for peers in rounds
        ]
    )
    for peer, nonce in nonces.items():
        if bytes(heard[peer].cpu().numpy()) != nonce:
            place = list(context.members).index(peer)
            problem = f"rank {place} of the group is not the process that is rank {peer} here"
            raise error_for("EPLB-M005", peer=peer, problem=problem)
