"""How a group comes to be: every member is there before gloo starts, and none is connected to another attempt."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any

import torch.distributed as dist

from eplb_core.backend import BackendContext
from eplb_core.backend.toolkit import Backoff, Wait, failed_error, first_line
from eplb_core.errors import error_for
from eplb_gloo.group import GlooGroup
from eplb_gloo.hooks import NAME
from eplb_gloo.waiter import Waiter, ended

WHERE = "phase connect"

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
    others = [member for member in members if member != context.rank]
    wait = Wait(context, context.timeout_s, label=NAME, where=WHERE, backoff=Backoff(5e-4, _LOOK_EVERY_S, 2.0))
    try:
        nonces = _gather(store, members, context.rank, nonce, wait)
    except RuntimeError as error:  # DistError and its kin; older torch raises it plain
        raise error_for("EPLB-T005", where=f"{WHERE} over {NAME}", problem=first_line(error), layers="none") from error
    # Of all nonces: a member left over from another attempt has another prefix and meets nobody.
    prefix = blake2b(b"".join(nonces[member] for member in members), digest_size=16).hexdigest()
    own, size = members.index(context.rank), len(members)
    namespace, limit_s = dist.PrefixStore(prefix, store), wait.deadline.left_s
    waiter = Waiter()
    try:
        made = waiter.submit(partial(_make_group, namespace, own, size, context.host, threads, limit_s))
        while not ended(made, _LOOK_EVERY_S):
            wait.check(others)
        group = made.result()
        _forget(store, members, [f"{prefix}/{device}" for device in range(threads)])
    except BaseException as error:
        waiter.close(_LOOK_EVERY_S)
        if not isinstance(error, RuntimeError):
            raise
        where = f"rank {context.rank} at {context.host}, {WHERE}"
        raise failed_error(NAME, first_line(error), where, others) from error
    return GlooGroup(group, waiter, own=own, size=size, threads=threads, nonces=nonces)


def _gather(store: Any, members: Sequence[int], rank: int, nonce: bytes, wait: Wait) -> dict[int, bytes]:
    """Wait for every member before gloo does: its own wait names nobody."""
    keys = {member: f"member/{member}" for member in members}
    store.set(keys[rank], nonce)
    arrived = store.add("arrived", 1)
    while arrived < len(members):
        late = [member for member in members if not store.check([keys[member]])] if wait.deadline.over else "the others"
        wait.pause(late)
        arrived = store.add("arrived", 0)
    return {member: store.get(key) for member, key in keys.items()}


def _make_group(store: Any, own: int, size: int, host: str, threads: int, limit_s: float) -> Any:
    """Have gloo connect; blocks until every pair is connected, or for `limit_s` where a member died meanwhile."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
    options._timeout = timedelta(seconds=max(limit_s, 0.001))
    options._threads = 1  # serves collectives, of which there are none
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host) for _ in range(threads)]
    return dist.ProcessGroupGloo(store, own, size, options)


def _forget(store: Any, members: Sequence[int], prefixes: Sequence[str]) -> None:
    """Delete the keys that connecting took, once every member is connected, so that a store can serve for ever."""
    if store.add("connected", 1) < len(members):
        return
    keys = [f"{prefix}/{place}" for prefix in prefixes for place in range(len(members))]
    for key in (*keys, *(f"member/{member}" for member in members), "arrived", "connected"):
        store.delete_key(key)
