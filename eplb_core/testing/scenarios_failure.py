"""Scenarios in which a peer does not come, raises, dies or sends wrong data."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from eplb_core.backend import PeerMetadata
from eplb_core.errors import EplbError
from eplb_core.testing.exchange import Exchange, communicator
from eplb_core.testing.expectation import UnheardError, expect, expecting, reach
from eplb_core.testing.faults import FaultInjector
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.pool import Stage, Subject

LIMIT_S = 0.6
LIMIT_BESIDE_A_DEATH_S = 3.0


def waits_for_nobody(stage: Stage, subject: Subject, limit_is_judged: bool = False) -> dict[str, Any]:
    """After a complete exchange, wait for a peer that never starts; return how the wait ended on rank 0."""
    with Exchange(stage, subject) as exchange:
        exchange.complete()
        exchange.renew()
        if stage.rank == 0:
            return _wait_for_a_peer_that_does_not_come(exchange, LIMIT_S, limit_is_judged)
        return _stay_away(exchange, LIMIT_S, 8.0)


def waits_beside_a_death(stage: Stage, subject: Subject) -> dict[str, Any]:
    """Wait for a peer that never starts while a third rank dies; return how the wait ended on rank 0.

    Notes
    -----
    All other ballots may be in by then, so the result of rank 0's `wait` decides.
    """
    old = np.arange(12)[None].repeat(2, 0)
    new = old[:, [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11]]
    with Exchange(stage, subject, maps=[old, new]) as exchange:
        exchange.complete()
        exchange.renew()
        if stage.rank == 0:
            stage.say("rank 0 waits")
            return _wait_for_a_peer_that_does_not_come(exchange, LIMIT_BESIDE_A_DEATH_S)
        if stage.rank == 1:
            return _stay_away(exchange, LIMIT_BESIDE_A_DEATH_S, 10.0)
        stage.hear("rank 0 waits")
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _wait_for_a_peer_that_does_not_come(exchange: Exchange, limit_s: float, judged: bool = False) -> dict[str, Any]:
    plan = exchange.plan(generation=2)
    handle = exchange.hooks.transfer(plan)
    started = time.monotonic()
    try:
        with exchange.stage.inside(f"wait(timeout_s={limit_s:g})", judged=judged):
            exchange.hooks.wait(handle, limit_s)
    except Exception as error:
        story = {"error": type(error).__name__, "typed": isinstance(error, EplbError), "text": str(error)}
    else:
        # A backend that reads live rows needs nothing from its peer; then the rows are there, as last written.
        story = {"error": "", "missing": exchange.missing(plan)}
    exchange.stage.say("rank 0 is done")
    return story | {"seconds": time.monotonic() - started}


def _stay_away(exchange: Exchange, limit_s: float, patience_s: float) -> dict[str, Any]:
    """Start nothing until rank 0's wait has ended or has clearly outlasted its limit."""
    try:
        exchange.stage.hear("rank 0 is done", patience_s)
    except UnheardError:
        return {"outlasted": f"rank 0 is still in wait(timeout_s={limit_s:g}) after {patience_s:.0f} s"}
    return {}


def hears_that_a_peer_gave_up(stage: Stage, subject: Subject) -> None:
    """One rank raises before its transfer; the rank that waits for it must not wait until its own limit."""
    maps = shuffles(2, 1, stage.world_size, 4, seed=9)
    model = Model(stage.rank, 4, [[64, 24]], subject.device_type)
    model.fill(maps[0])
    observers = [FaultInjector("transfer", "raise", generation=2)] if stage.rank == 1 else []
    comm = communicator(stage, subject, model.weights, observers=observers, timeout_s=10)
    comm.rearrange(*maps)
    started = time.monotonic()
    try:
        with stage.inside("a rearrangement that rank 1 gave up", judged=True):
            comm.rearrange(maps[1], maps[0])
        text = ""
    except EplbError as error:
        text = str(error)
    seconds = time.monotonic() - started
    wrong = model.wrong_rows(maps[1])
    comm.close(force=True)
    expect("injected in transfer" in text, f"the reason of the rank that gave up did not arrive: {text!r}")
    expect(seconds < 7, f"it took {seconds:.1f} s to learn that rank 1 gave up; wait must consult context.cancelled()")
    expect(not wrong, f"rank 1 gave up, and (layer, tensor, row) {wrong[:8]} changed")


def stays_usable_after_an_abort(stage: Stage, subject: Subject) -> None:
    """Abort one rearrangement on all ranks; the next one (after rebuild, if needed) must be exact."""
    maps = shuffles(3, 3, stage.world_size, 4, seed=10)
    model = Model(stage.rank, 4, [[64, 24]] * 3, subject.device_type)
    model.fill(maps[0])
    observers = [FaultInjector("wait", "raise", generation=2, layer=1)] if stage.rank == 1 else []
    with communicator(stage, subject, model.weights, observers=observers) as comm:
        comm.rearrange(maps[0], maps[1])
        wrong = model.wrong_rows(maps[1])
        reach(not wrong, f"wrong bytes in (layer, tensor, row) {wrong[:8]} before anything was aborted")
        held, failed = maps[1], ""
        try:
            comm.rearrange(maps[1], maps[2])
        except EplbError as error:
            failed = str(error)
            if error.report is not None:
                held = error.report.physical_to_logical_map
        reach("injected in wait" in failed, f"a rank raised, and this one heard {failed!r}")
        wrong = model.wrong_rows(held)
        expect(not wrong, f"after the abort (layer, tensor, row) {wrong[:8]} are on neither placement")
        try:
            comm.rearrange(held, maps[2])
        except EplbError as error:
            expect(error.code == "EPLB-T004", f"after the abort: {error}")
            with expecting("after the abort, a rebuild and the next rearrangement raised"):
                comm.rebuild(15, device_group=stage.device_group(subject))
                comm.rearrange(held, maps[2])
        wrong = model.wrong_rows(maps[2])
        expect(not wrong, f"in the rearrangement after the abort: wrong bytes in (layer, tensor, row) {wrong[:8]}")


def drains_what_it_says_it_drained(stage: Stage, subject: Subject) -> None:
    """Abort a transfer whose peer has not started; if `abort` returns drained, landing memory must stay unwritten."""
    with Exchange(stage, subject) as exchange:
        exchange.complete()
        if stage.rank == 0:
            handle = exchange.hooks.transfer(exchange.plan(generation=2))
            started = time.monotonic()
            with stage.inside("abort", judged=True), expecting("abort raised"):
                drained = exchange.backend.abort(handle, "the kit aborts")
            seconds = time.monotonic() - started
            exchange.paint(0)
            stage.say("aborted")
            stage.hear("started late", 20.0)
            exchange.pump(0.4)
            painted = exchange.painted(0)
            stage.say("looked")
            expect(isinstance(drained, bool), f"abort returned {drained!r} instead of True or False")
            expect(seconds < 2.0, f"abort took {seconds:.1f} s; a second is its limit")
            expect(painted or not drained, "abort said drained, and landing memory was written after it")
        else:
            stage.hear("aborted", 20.0)
            with suppress(EplbError):  # its peer is gone, which is not this rank's failure
                exchange.hooks.wait(exchange.hooks.transfer(exchange.plan(generation=2)), LIMIT_S)
            stage.say("started late")
            stage.hear("looked", 20.0)


def closes_at_once(stage: Stage, subject: Subject) -> None:
    """Close by force with a transfer in flight whose peer has not started."""
    exchange = Exchange(stage, subject)
    exchange.complete()
    if stage.rank == 0:
        exchange.hooks.transfer(exchange.plan(generation=2))
    started = time.monotonic()
    with stage.inside("close(force=True)", judged=True), expecting("close(force=True) raised"):
        exchange.comm.close(force=True)
    seconds = time.monotonic() - started
    stage.meet()
    expect(seconds < 2.0, f"close(force=True) took {seconds:.1f} s; under 2 s is its limit")


def loses_a_rank(stage: Stage, subject: Subject) -> dict[str, Any]:
    """Kill the last rank in the middle of a layer; the others must notice, rebuild without it and go on."""
    world, dead = stage.world_size, stage.world_size - 1
    maps = shuffles(2, 2, world, 4, seed=11)
    model = Model(stage.rank, 4, [[64, 24]] * 2, subject.device_type)
    model.fill(maps[0])
    observers = [FaultInjector("transfer", "kill", generation=2, layer=1)] if stage.rank == dead else []
    comm = communicator(stage, subject, model.weights, observers=observers, timeout_s=15)
    comm.rearrange(*maps)
    wrong = model.wrong_rows(maps[1])
    reach(not wrong, f"wrong bytes in (layer, tensor, row) {wrong[:8]} before anyone died")
    story: dict[str, Any] = {"error": "", "text": ""}
    started = time.monotonic()
    try:
        with stage.inside(f"a rearrangement in which rank {dead} died", judged=True):
            comm.rearrange(maps[1], maps[0])
    except EplbError as error:
        story |= {"error": type(error).__name__, "text": str(error)}
    story["seconds"] = time.monotonic() - started
    held = comm.report.physical_to_logical_map
    story["mixed"] = model.wrong_rows(held)
    group = stage.device_group(subject, range(dead))
    with stage.inside("rebuild", judged=True), expecting(f"rank {dead} died, and rebuild without it raised"):
        held = comm.rebuild(8, ranks=range(dead), device_group=group).physical_to_logical_map.copy()
    held[:, dead * 4 :] = -1
    wanted = held.copy()
    wanted[:, : dead * 4] = held[:, : dead * 4][:, ::-1]
    with expecting("after the rebuild, rearrange raised"):
        comm.rearrange(held, wanted)
    story["after"] = model.wrong_rows(wanted)
    comm.close()
    return story


def refuses_foreign_metadata(stage: Stage, subject: Subject) -> list[str]:
    """Give the backend payloads that it did not write; return those accepted, or refused without a typed error."""
    with Exchange(stage, subject) as exchange:
        local = exchange.session.local
        stage.meet()
        problems: list[str] = []
        if stage.rank == 0:
            own = local.payload
            strangers = {
                "text of another program": b"not metadata of this backend",
                "its own, cut short": own[: len(own) // 2],
                "its own, with something behind it": own + b"\0" * 16,
                "random bytes": np.random.default_rng(0).bytes(64),
                "a pickle": b"\x80\x04K\x01.",
            }
            if not own:
                strangers = {name: payload for name, payload in strangers.items() if payload}
            for name, payload in strangers.items():
                try:
                    with stage.inside(f"exchange_metadata ({name})", judged=True):
                        exchange.hooks.exchange_metadata(local, [PeerMetadata(1, payload)])
                except EplbError:
                    continue
                except Exception as error:
                    problems.append(f"{name}: {type(error).__name__} instead of MetadataError ({error})")
                else:
                    problems.append(f"{name}: accepted")
            stage.say("rank 0 is done")
        else:
            stage.hear("rank 0 is done", 30.0)
        return problems


def joins_late(stage: Stage, subject: Subject) -> None:
    """Two ranks go on alone; a third joins them later, with a communicator of its own."""
    world, late = stage.world_size, stage.world_size - 1
    maps = shuffles(3, 2, world, 4, seed=12)
    model = Model(stage.rank, 4, [[64, 24]] * 2, subject.device_type)
    control, group = stage.control(), stage.device_group(subject)
    alone = maps[0].copy()
    alone[:, late * 4 :] = -1
    if stage.rank == late:
        stage.hear("the others are at work", 30.0)
        model.fill(maps[0])
        comm = communicator(stage, subject, model.weights, control=control, device_group=group)
    else:
        model.fill(alone)
        comm = communicator(stage, subject, model.weights, control=control, device_group=group)
        comm.rebuild(15, ranks=range(late), device_group=stage.device_group(subject, range(late)))
        other = alone.copy()
        other[:, : late * 4] = alone[:, : late * 4][:, ::-1]
        comm.rearrange(alone, other)
        comm.rearrange(other, alone)
        stage.say("the others are at work")
    with expecting("a rank came later, and what all then did together raised"):
        comm.rebuild(20, ranks=range(world), device_group=group)
        model.fill(maps[0])
        comm.reloaded(maps[0])
        stage.meet()
        comm.rearrange(maps[0], maps[1])
        comm.rearrange(maps[1], maps[2])
    wrong = model.wrong_rows(maps[2])
    comm.close()
    expect(not wrong, f"after a rank joined: wrong bytes in (layer, tensor, row) {wrong[:8]}")


def meets_peers_one_by_one(stage: Stage, subject: Subject) -> None:
    """Each plan names one more pair of ranks; earlier pairs must stay connected."""
    world = stage.world_size
    model = Model(stage.rank, 2, [[64, 24]], subject.device_type)
    held = np.arange(2 * world)[None]
    model.fill(held)
    with communicator(stage, subject, model.weights) as comm:
        for number, (first, second) in enumerate(((0, 1), (1, 2), (0, 2), (0, 1))):
            wanted = held.copy()
            wanted[0, [2 * first, 2 * second]] = held[0, [2 * second, 2 * first]]
            exchanged = f"ranks {first} and {second} exchanged, {number} other pairs before them"
            with expecting(f"{exchanged}, which raised") if number else nullcontext():
                held = comm.rearrange(held, wanted).physical_to_logical_map
            wrong = model.wrong_rows(held)
            (expect if number else reach)(not wrong, f"{exchanged}: wrong bytes in (layer, tensor, row) {wrong[:8]}")
