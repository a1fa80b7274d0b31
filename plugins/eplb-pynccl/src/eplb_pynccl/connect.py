"""Connecting: one NCCL communicator of all members, then each new pair, which proves who is behind a rank of it."""

from __future__ import annotations

from collections.abc import Mapping

from eplb_core.backend import BackendContext
from eplb_core.backend.toolkit import RowMove, Wait, greet
from eplb_core.errors import error_for
from eplb_pynccl.binding import Binding
from eplb_pynccl.connection import Batch, Connection
from eplb_pynccl.metadata import Member, await_unique_id, withdraw
from eplb_pynccl.streams import OperationStream

WHERE = "phase connect"


def join(
    binding: Binding,
    stream: OperationStream,
    context: BackendContext,
    unique_id: bytes | None,
    members: Mapping[int, Member],
    wait: Wait,
) -> Connection:
    """Make the communicator, with every member.

    Parameters
    ----------
    binding, stream : Binding, OperationStream
        NCCL, and what its operations are queued on.
    context : BackendContext
        This rank's context; it names the members.
    unique_id : bytes or None
        Made by this rank, if it is the lowest member; None waits for what that one published.
    members : mapping of int to Member
        What the peers' metadata says; the lowest member need not be among them.
    wait : Wait
        Limit of the whole.

    Raises
    ------
    NcclError
        NCCL refused.
    MetadataError, StalledError, StoreLostError, TransferError
        The unique id is not the one that was announced or cannot be had; a member does not come.
    """
    shares = unique_id is not None
    lowest = context.members[0]
    if unique_id is None:
        unique_id = await_unique_id(context.store, lowest, wait)
        announced = members.get(lowest)
        if announced is not None and announced.unique_id != unique_id:
            problem = "the unique id in its metadata is not the one it published"
            raise error_for("EPLB-M005", peer=lowest, problem=problem)
    with stream.copy_order():
        connection = Connection(binding, stream, context, unique_id=unique_id, expected=members, wait=wait)
    if shares:
        withdraw(context.store)
    return connection


def meet(
    connection: Connection,
    stream: OperationStream,
    context: BackendContext,
    own_nonce: bytes,
    members: Mapping[int, Member],
    wait: Wait,
) -> None:
    """Exchange nonces with peers that are new.

    Raises
    ------
    NcclError
        NCCL failed.
    StalledError, TransferError
        A peer does not come.
    MetadataError
        EPLB-M005: another process is behind a peer's rank of the communicator.
    """

    def exchange(batches: list[list[RowMove]]) -> None:
        queued = [Batch(batch) for batch in batches]
        connection.enqueue(queued)
        connection.finish(queued, wait)

    nonces = {rank: member.nonce for rank, member in members.items()}
    greet(context, own_nonce, nonces, exchange, on_stream=stream.copy_order)
