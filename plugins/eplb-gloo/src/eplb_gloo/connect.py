"""How a group comes to be: every member is there before gloo starts, and none is connected to another attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any

import torch.distributed as dist

from eplb_core.backend import BackendContext, Cancelled
from eplb_core.backend.toolkit import Deadline
from eplb_core.errors import error_for
from eplb_gloo.group import GlooGroup, brief, name_ranks
from eplb_gloo.hooks import NAME
from eplb_gloo.waiter import Waiter, ended

CONNECT = f"phase connect ({NAME})"

_LOOK_EVERY_S = 0.02


def connect_members(context: BackendContext, nonce: bytes, threads: int) -> GlooGroup:
    """Connect this rank to all other members.

    Parameters
    ----------
    context : BackendContext
        Its ``store`` is reached by all members, in a namespace of this epoch's own; ``host`` is an address of this rank
        that the others reach; ``timeout_s`` is the limit.
    nonce : bytes
        Drawn by this rank for this epoch.
    threads : int
        Threads that move bytes; gloo makes one, and one connection per peer, for every device it is given.

    Raises
    ------
    StalledError
        Members did not come within the limit; the message names them.
    TransferError
        gloo could not connect, or the connect was cancelled.
    StoreLostError
        The store does not answer.
    """
    store, members = context.store, context.members
    deadline = Deadline(context.timeout_s)
    try:
        nonces = _gather(store, members, context.rank, nonce, deadline, context.cancelled)
    except RuntimeError as error:  # DistError and its kin; older torch raises it plain
        raise error_for("EPLB-T005", where=CONNECT, problem=brief(error), layers="none") from error
    # Of all nonces: a member left over from another attempt has another prefix and meets nobody.
    prefix = blake2b(b"".join(nonces[member] for member in members), digest_size=16).hexdigest()
    own, size = members.index(context.rank), len(members)
    namespace = dist.PrefixStore(prefix, store)
    waiter = Waiter()
    try:
        made = waiter.submit(partial(_make_group, namespace, own, size, context.host, threads, deadline.left_s))
        while not ended(made, _LOOK_EVERY_S):
            _refuse_if_cancelled(context.cancelled)
        group = made.result()
        _forget(store, members, [f"{prefix}/{device}" for device in range(threads)])
    except BaseException as error:
        waiter.close(_LOOK_EVERY_S)
        if not isinstance(error, RuntimeError):
            raise
        others = name_ranks([member for member in members if member != context.rank])
        detail = f"(rank {context.rank} at {context.host} connecting to {others}, {CONNECT})."
        raise error_for("EPLB-T001", label=NAME, state=brief(error), detail=detail) from error
    return GlooGroup(group, waiter, own=own, size=size, threads=threads, nonces=nonces)


def _gather(
    store: Any,
    members: Sequence[int],
    rank: int,
    nonce: bytes,
    deadline: Deadline,
    cancelled: Callable[[], Cancelled | None],
) -> dict[int, bytes]:
    """Wait for every member before gloo does: its own wait names nobody."""
    keys = {member: f"member/{member}" for member in members}
    store.set(keys[rank], nonce)
    pause_s = 0.0005
    arrived = store.add("arrived", 1)
    while arrived < len(members):
        _refuse_if_cancelled(cancelled)
        if deadline.over:
            missing = name_ranks([member for member, key in keys.items() if not store.check([key])])
            raise error_for("EPLB-T002", seconds=deadline.elapsed_s, where=CONNECT, waiting_for=missing)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
        arrived = store.add("arrived", 0)
    return {member: store.get(key) for member, key in keys.items()}


def _make_group(store: Any, own: int, size: int, host: str, threads: int, limit_s: float) -> Any:
    """Have gloo connect; blocks until every pair is connected, or for `limit_s` where a member died meanwhile."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
    options._timeout = timedelta(seconds=max(limit_s, 0.001))
    options._threads = 1  # serves collectives, of which there are none
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host) for _ in range(threads)]
    return dist.ProcessGroupGloo(store, own, size, options)


def _refuse_if_cancelled(cancelled: Callable[[], Cancelled | None]) -> None:
    look = cancelled()
    if look is not None:
        raise error_for("EPLB-T001", label=NAME, state="cancelled", detail=f"{look.reason} ({CONNECT}).")


def _forget(store: Any, members: Sequence[int], prefixes: Sequence[str]) -> None:
    """Delete the keys that connecting took, once every member is connected, so that a store can serve for ever."""
    if store.add("connected", 1) < len(members):
        return
    keys = [f"{prefix}/{place}" for prefix in prefixes for place in range(len(members))]
    for key in (*keys, *(f"member/{member}" for member in members), "arrived", "connected"):
        store.delete_key(key)
