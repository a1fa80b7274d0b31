"""What the ranks of a test do; see `rank`. Each is run on every rank, in a process of its own."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rank import Rank, count_fds, count_threads, say, value_of

from eplb_core.backend import Cancelled, PeerMetadata
from eplb_core.errors import EplbError
from eplb_core.weights.layout import build_layout
from eplb_nixl.metadata import SourceRecord


def shifted(world: int, experts: int, layers: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Every rank needs all experts of the next lower rank."""
    old = np.tile(np.arange(world * experts), (layers, 1))
    return old, np.roll(old, experts, axis=1)


def move(rank: int, world: int, port: int, *, rounds: int = 2, seed: int = 0, redundant: int = 0, **shape: Any) -> None:
    """Rearrange and count rows that are wrong."""
    me = Rank(rank, world, port, **shape)
    me.build()
    me.connect()
    wrong = 0
    for number in range(rounds):
        old, new = me.maps(seed + number, redundant)
        me.fill(old)
        me.barrier()
        me.rearrange(old, new)
        wrong += me.wrong_rows(new)
        me.barrier()
    exposure = me.backend.exposure
    say(wrong=wrong, mode=exposure.mode, reason=exposure.reason)
    me.barrier()
    say(closed=me.backend.close())


def mixed_modes(rank: int, world: int, port: int, **shape: Any) -> None:
    """Rank 0 is staged, the others are zero-copy: the mode is each source's own."""
    move(rank, world, port, options={"mode": "staged" if rank == 0 else "zero_copy"}, **shape)


def uneven_layers(rank: int, world: int, port: int, *, options: dict[str, Any] | None = None) -> None:
    """Layers of different tensors, an alias, a tensor without bytes, views of one storage."""
    me = Rank(rank, world, port, experts=4, options=options or {})
    first = torch.zeros(4, 96, dtype=torch.uint8)
    flat = torch.zeros(4 * 1000, dtype=torch.uint8)
    me.weights = [
        [first, first, torch.zeros(4, 0, dtype=torch.uint8), torch.zeros(4, 7, dtype=torch.uint8)],
        [flat[:2000].view(4, 500), flat[2400:2800].view(4, 100)],
        [torch.zeros(4, 300, dtype=torch.uint8)],
    ]
    me.num_layers = 3
    me.build(me.weights)
    me.connect()
    old, new = me.maps(3)
    for layer, tensors in enumerate(me.weights):
        for number, tensor in enumerate(tensors):
            for row in range(4):
                tensor[row] = int(old[layer, rank * 4 + row]) * 5 + layer + (0 if tensor is first else number)
    me.barrier()
    me.rearrange(old, new)
    wrong = 0
    for layer, tensors in enumerate(me.weights):
        for number, tensor in enumerate(tensors):
            for row in range(4):
                value = int(new[layer, rank * 4 + row]) * 5 + layer + (0 if tensor is first else number)
                wrong += not bool((tensor[row] == value).all())
    say(wrong=wrong)
    me.barrier()
    me.backend.close()


def source_stops(rank: int, world: int, port: int, *, signal_name: str, limit_s: float, told: bool = False) -> None:
    """Rank 0 stops or dies while rank 1 reads from it; `told` is the core that saw the death."""
    me = Rank(rank, world, port, layers=1, experts=1, nbytes=[32 << 20])
    me.build()
    me.connect()
    old, new = shifted(world, 1)
    me.fill(old)
    if rank == 0:
        me.store.set("pid", str(os.getpid()))
    me.barrier()
    _, plans = me.start(old, new)
    if rank == 0:
        # Announces and posts nothing more: rank 1 reads against a source that makes no progress any longer.
        say(pid=os.getpid())
        me.store.set("silent", "1")
        os.kill(os.getpid(), getattr(signal, signal_name))
        time.sleep(600)
    pid = int(me.store.get("pid"))
    handle = me.backend.transfer(plans[0])
    me.store.get("silent")
    if told:
        me.called_off = Cancelled("its process ended", peer_lost=True)
    start = time.monotonic()
    try:
        me.backend.wait(handle, limit_s)
        say(outcome="complete")
    except EplbError as error:
        say(outcome=type(error).__name__, code=error.code, text=str(error), seconds=time.monotonic() - start)
    start = time.monotonic()
    drained = me.backend.abort(handle, "the test says so")
    say(drained=drained, seconds=time.monotonic() - start)
    landing = me.landing.slots[plans[0].slot]
    start = time.monotonic()
    closed = me.backend.close(force=True)
    say(closed=closed, seconds=time.monotonic() - start, pid=pid)
    # Quarantined memory outlives everything that refers to it here.
    address, nbytes = landing.data_ptr(), landing.numel()
    del landing, handle, plans, me
    gc.collect()
    with open("/proc/self/maps") as maps:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    say(mapped=any(start <= address and address + nbytes <= end for start, end in spans))


def reader_dies(rank: int, world: int, port: int, *, both: bool) -> None:
    """Rank 1 dies with READs that rank 0 has not served yet; the core tells rank 0, which may have READs of its own."""
    me = Rank(rank, world, port, layers=1, experts=32, nbytes=[1 << 20])
    me.build()
    me.connect()
    old, new = shifted(world, 32)
    if not both:
        new[0, :32] = old[0, :32]
    me.fill(old)
    if rank == 0:
        me.store.set("pid", str(os.getpid()))
    me.barrier()
    _, plans = me.start(old, new)
    if rank == 1:
        me.store.get("napping")
        me.backend.transfer(plans[0])
        os.kill(os.getpid(), signal.SIGKILL)
    handle = me.backend.transfer(plans[0])
    me.store.set("napping", "1")
    time.sleep(1.0)
    me.called_off = Cancelled("its process ended", peer_lost=True)
    for _ in range(200):
        me.backend.progress()
        time.sleep(1e-3)
    drained = me.backend.abort(handle, "rank 1 is gone")
    say(drained=drained, closed=me.backend.close(force=True))


def cancelled(rank: int, world: int, port: int) -> None:
    """Rank 1 is told, while it waits for a source that never announces, that a third party aborted."""
    me = Rank(rank, world, port, layers=1, options={"mode": "staged"})
    me.build()
    me.connect()
    old, new = shifted(world, me.num_experts)
    _, plans = me.start(old, new)
    if rank == 1:
        handle = me.backend.transfer(plans[0])
        for _ in range(200):
            me.backend.progress()
            time.sleep(1e-3)
        say(posted=[read.state for read in handle.reads])
        me.called_off = Cancelled("rank 2 aborted layer 0: for reasons of its own")
        try:
            me.backend.wait(handle, 30.0)
        except EplbError as error:
            say(code=error.code, text=str(error))
        me.called_off = None
        say(drained=me.backend.abort(handle, "cancelled"))
    me.barrier()
    say(closed=me.backend.close())


def lease(rank: int, world: int, port: int) -> None:
    """Rank 1 starts its next transfer 0.3 s late: until then nothing of the source's next layer reaches it."""
    me = Rank(rank, world, port, layers=3, options={"mode": "staged"})
    me.build()
    me.connect()
    old, new = shifted(world, me.num_experts, 3)
    me.fill(old)
    me.barrier()
    _, plans = me.start(old, new)
    handles = [me.backend.transfer(plans[0])]
    me.backend.wait(handles[0], 30.0)
    landed = me.landing.slots[plans[0].slot].clone()
    handles.append(me.backend.transfer(plans[1]))
    me.backend.wait(handles[1], 30.0)
    unchanged = bool(torch.equal(landed, me.landing.slots[plans[0].slot]))
    me.barrier()
    me.backend.wait(me.backend.transfer(plans[2]), 30.0)  # same slot as layer 0: now it may change
    changed = not torch.equal(landed, me.landing.slots[plans[0].slot])
    say(unchanged=unchanged, changed=changed)
    me.barrier()
    me.backend.close()


def metadata_refused(rank: int, world: int, port: int) -> None:
    """Payloads that are damaged, swapped, stale, or of somebody else are refused, and the right ones still work."""
    me = Rank(rank, world, port)
    me.build()
    me.barrier()
    payloads = {peer: me.payload(peer) for peer in range(world)}
    peer, other = (peer for peer in range(world) if peer != rank)
    right = payloads[peer]
    flipped = bytearray(right)
    flipped[len(right) // 2] ^= 1
    older = Rank(rank, world, port, name="older", epoch=7)
    older.build()
    wrong = {
        "truncated": right[:-1],
        "flipped": bytes(flipped),
        "swapped": payloads[other],
        "own": payloads[rank],
        "empty": b"",
        "foreign": b"\x80\x04N." * 64,
        "stale": older.local.payload,
    }
    texts = {}
    for name, payload in wrong.items():
        try:
            me.backend.exchange_metadata(me.local, [PeerMetadata(peer, payload)])
            texts[name] = "accepted"
        except EplbError as error:
            texts[name] = f"{error.code} {error}"
    older.backend.close()
    say(texts=texts)
    me.barrier()
    me.connect()
    old, new = me.maps(1)
    me.fill(old)
    me.barrier()
    me.rearrange(old, new)
    say(wrong=me.wrong_rows(new))
    me.barrier()
    me.backend.close()


def metadata_crafted(rank: int, world: int, port: int, *, craft: str) -> None:
    """Payloads that are whole and of the right rank, and still not what that rank's NIXL says."""
    me = Rank(rank, world, port)
    me.build()
    me.barrier()
    peer, other = (peer for peer in range(world) if peer != rank)
    record = SourceRecord.from_bytes(me.payload(peer))
    theirs = SourceRecord.from_bytes(me.payload(other))
    crafted = {
        "metadata": replace(record, agent_metadata=theirs.agent_metadata),
        "address": replace(record, warm_address=int(record.bases[0, 0])),
        "version": replace(record, library_version="0.0.1"),
        "name": replace(record, agent_name=theirs.agent_name),
        "tensors": replace(record, bases=record.bases[:, 1:]),
        "slots": replace(record, mode="staged"),
    }[craft]
    me.barrier()
    try:
        me.backend.exchange_metadata(me.local, [PeerMetadata(peer, crafted.to_bytes())])
        limit = time.monotonic() + 10
        while not me.backend.connected() and time.monotonic() < limit:
            me.backend.progress()
        say(code="none")
    except EplbError as error:
        say(code=error.code, text=str(error))
    me.barrier()
    me.backend.close()


def metadata_size(rank: int, world: int, port: int, *, layers: int, experts: int, tensors: int) -> None:
    """How much goes on the wire for a large model, and how long registering and connecting it take."""
    me = Rank(rank, world, port, layers=layers, experts=experts, nbytes=[64] * tensors)
    start = time.monotonic()
    me.build()
    registered_s = time.monotonic() - start
    me.barrier()
    start = time.monotonic()
    me.connect()
    say(nbytes=len(me.local.payload), registered_s=registered_s, connected_s=time.monotonic() - start)
    me.backend.close()


def joins_later(rank: int, world: int, port: int) -> None:
    """Ranks 0 and 1 connect and move; rank 2 is built only then, and all three move."""
    me = Rank(rank, world, port)
    if rank == 2:
        me.store.get("joined")
    me.build()
    if rank < 2:
        me.connect_to([1 - rank])
        me.barrier(2)
        me.store.set("joined", "1")
        me.connect_to([2])
    else:
        me.steps = 1
        me.connect_to([0, 1])
    me.barrier()
    old, new = me.maps(5)
    me.fill(old)
    me.barrier()
    me.rearrange(old, new)
    say(wrong=me.wrong_rows(new))
    me.barrier()
    me.backend.close()


def cycles(rank: int, world: int, port: int, *, count: int) -> None:
    """Create, move, close, again and again."""
    seen = []
    for number in range(count):
        me = Rank(rank, world, port, name=f"cycle{number}")
        me.build()
        me.connect()
        old, new = me.maps(number)
        me.fill(old)
        me.barrier()
        me.rearrange(old, new)
        wrong = me.wrong_rows(new)
        me.barrier()
        me.backend.close()
        store = me.store
        store.add("closed", 1)
        while store.add("closed", 0) < world:
            time.sleep(1e-3)
        del me, store
        gc.collect()
        seen.append({"fds": count_fds(), "threads": count_threads(), "wrong": wrong})
    say(seen=seen)


def two_in_one_process(rank: int, world: int, port: int) -> None:
    """Two communicators over the same weights' process, used in turn; closing one leaves the other working."""
    both = [Rank(rank, world, port, name=name) for name in ("target", "draft")]
    for each in both:
        each.build()
    for each in both:
        each.connect()
    wrong = []
    for seed, each in enumerate([*both, *both]):
        old, new = each.maps(seed)
        each.fill(old)
        each.barrier()
        each.rearrange(old, new)
        wrong.append(each.wrong_rows(new))
        each.barrier()
    both[0].backend.close()
    old, new = both[1].maps(9)
    both[1].fill(old)
    both[1].barrier()
    both[1].rearrange(old, new)
    wrong.append(both[1].wrong_rows(new))
    both[1].barrier()
    both[1].backend.close()
    say(wrong=wrong)


def many_rounds(rank: int, world: int, port: int, *, rounds: int, options: dict[str, Any] | None = None) -> None:
    """Many rearrangements with one backend: nothing grows."""
    me = Rank(rank, world, port, layers=1, nbytes=[4096, 64], options=options or {})
    me.build()
    me.connect()
    seen = []
    for number in range(rounds):
        old, new = me.maps(number)
        me.fill(old)
        me.barrier()
        me.rearrange(old, new)
        if me.wrong_rows(new):
            say(wrong_round=number)
        me.barrier()
        if number in {rounds // 10, rounds - 1}:
            gc.collect()
            agent: Any = me.backend._agent
            seen.append(
                {
                    "fds": count_fds(),
                    "threads": count_threads(),
                    "requests": len(agent._reads),
                    "lists": len(agent._lists),
                    "in_flight": len(me.backend._life.in_flight),
                }
            )
    say(seen=seen)
    me.barrier()
    me.backend.close()


def weights_deleted(rank: int, world: int, port: int) -> None:
    """The host drops its weights after registration; peers still read what they were."""
    me = Rank(rank, world, port, layers=1, experts=2, nbytes=[1 << 20])
    old, new = shifted(world, 2)
    me.fill(old)
    me.build()
    me.connect()
    layout_rows = me.buffers.rows
    me.weights = []
    me.layout = None
    me.buffers = None
    gc.collect()
    del layout_rows
    clutter = [torch.full((2, 1 << 20), 255, dtype=torch.uint8) for _ in range(8)]
    me.barrier()
    me.layout = build_layout([[torch.zeros(2, 1 << 20, dtype=torch.uint8)]])
    _, plans = me.start(old, new)
    me.backend.wait(me.backend.transfer(plans[0]), 30.0)
    source = (rank - 1) % world
    landed = me.landing.slots[plans[0].slot].view(2, -1)
    right = all(bool((landed[row] == value_of(source * 2 + row, 0, 0)).all()) for row in range(2))
    say(right=right, clutter=len(clutter))
    me.barrier()
    me.backend.close()


def given_up_on_one_rank(rank: int, world: int, port: int, *, options: dict[str, Any] | None = None) -> None:
    """A generation that rank 0 has begun further than rank 1 is given up; the next one is exact, at once."""
    me = Rank(rank, world, port, layers=3, options=options or {})
    me.build()
    me.connect()
    old, new = shifted(world, me.num_experts, 3)
    me.fill(old)
    me.barrier()
    _, plans = me.start(old, new)
    handles = [me.backend.transfer(plan) for plan in plans[: 2 if rank == 0 else 1]]
    me.barrier()
    drained = [me.backend.abort(handle, "rank 1 gave up") for handle in handles]
    me.barrier()
    start = time.monotonic()
    me.rearrange(old, new)
    say(drained=drained, wrong=me.wrong_rows(new), seconds=time.monotonic() - start)
    me.barrier()
    me.backend.close()


def counted_differently(rank: int, world: int, port: int) -> None:
    """Rank 1 numbers its transfers, and so its slots, otherwise than rank 0: nothing is read from the wrong buffer."""
    me = Rank(rank, world, port, layers=1, options={"mode": "staged"})
    me.build()
    me.connect()
    old, new = shifted(world, me.num_experts)
    me.fill(old)
    _, plans = me.start(old, new, first=rank)
    me.landing.slots[plans[0].slot].fill_(0xA5)
    me.barrier()
    handle = me.backend.transfer(plans[0])
    start = time.monotonic()
    try:
        me.backend.wait(handle, 20.0)
        say(code="none")
    except EplbError as error:
        say(code=error.code, text=str(error), seconds=time.monotonic() - start)
    untouched = bool((me.landing.slots[plans[0].slot] == 0xA5).all())
    say(untouched=untouched, drained=me.backend.abort(handle, "they do not agree"))
    me.barrier()
    say(closed=me.backend.close())


def forked(rank: int, world: int, port: int, *, closes: bool) -> None:
    """Rank 0 forks a child that ends as a program does; the parent goes on as if nothing had been."""
    me = Rank(rank, world, port)
    me.build()
    me.connect()
    old, new = me.maps(1)
    me.fill(old)
    me.barrier()
    me.rearrange(old, new)
    me.barrier()
    if rank == 0:
        child = os.fork()
        if child == 0:
            if closes:
                try:
                    me.backend.progress()
                except EplbError as error:
                    if "from which this one was forked" in str(error) and me.backend.close():
                        sys.exit(7)
            sys.exit(0)
        say(child=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    me.barrier()
    newer = me.maps(2)[1]
    start = time.monotonic()
    me.rearrange(new, newer)
    say(wrong=me.wrong_rows(newer), seconds=time.monotonic() - start)
    me.barrier()
    say(closed=me.backend.close())


def memory_taken_away(rank: int, world: int, port: int, *, options: dict[str, Any] | None = None) -> None:
    """Rank 0's host frees a registered storage; rank 1 reads from it while rank 0 makes progress, as in a vote."""
    me = Rank(rank, world, port, layers=1, experts=1, nbytes=[32 << 20], options=options or {})
    me.build()
    me.connect()
    old, new = shifted(world, 1)
    me.fill(old)
    me.barrier()
    _, plans = me.start(old, new)
    if rank == 0:
        me.weights[0][0].untyped_storage().resize_(0)
        me.store.set("freed", "1")
        me.store.get("posted")
        for _ in range(300):
            me.backend.progress()
            time.sleep(1e-3)
    else:
        me.store.get("freed")
        handle = me.backend.transfer(plans[0])
        me.store.set("posted", "1")
    try:
        if rank == 0:
            handle = None
            handle = me.backend.transfer(plans[0])
        me.backend.wait(handle, 1.0)
        say(code="none")
    except EplbError as error:
        say(code=error.code, text=str(error))
    if handle is not None:
        me.backend.abort(handle, "there is nothing to read")
    me.backend.close(force=True)
    me.store.add("over", 1)
    limit = time.monotonic() + 20
    while me.store.add("over", 0) < world and time.monotonic() < limit:
        time.sleep(1e-2)
    say(lives=True)


def closed_while_connecting(rank: int, world: int, port: int) -> None:
    """Rank 1 closes while its first READ is under way, toward a rank that makes no progress."""
    me = Rank(rank, world, port)
    me.build()
    if rank == 1:
        me.backend.exchange_metadata(me.local, [PeerMetadata(0, me.payload(0))])
        waiting = me.backend.exposure.warm_up.waiting_for
        start = time.monotonic()
        say(closed=me.backend.close(force=True), waiting=waiting, seconds=time.monotonic() - start)
        me.store.set("closed", "1")
    else:
        me.store.get("closed")
        for _ in range(100):
            me.backend.progress()
            time.sleep(1e-3)
        say(closed=me.backend.close())
