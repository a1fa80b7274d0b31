"""Scenarios about what must not outlive a failure: counters, a transfer after a close, a lost peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from eplb_core.backend import Cancelled, TransferPlan
from eplb_core.errors import EplbError
from eplb_core.errors.texts import describe
from eplb_core.observers.base import Observer, Step, StepName
from eplb_core.testing.early import building
from eplb_core.testing.exchange import Exchange, communicator
from eplb_core.testing.expectation import UnheardError, expect, expecting, reach
from eplb_core.testing.faults import InjectedFault
from eplb_core.testing.model import Map, Model, shuffles
from eplb_core.testing.pool import Stage, Subject

CALLED_OFF_S = 0.3
PROMPT_S = 2.0
_LIMIT_S = 12.0
_WATCHED_S = 0.6
_ONE_MORE_S = 3.0
_NUM_LAYERS, _NUM_ROWS = 4, 4


class _StartsOneLess(Observer):
    """Fails on rank 1 in its wait for layer 1 of generation 2, as soon as rank 0 has started layer 2 as well."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage
        self.pump: Callable[[], object] | None = None
        self._has_acted = False  # generations begin anew after a rebuild

    def starts(self, name: StepName, plan: TransferPlan) -> None:
        here = self._stage.rank == 1 and (name, plan.generation, plan.layer) == ("wait", 2, 1)
        if here and not self._has_acted:
            self._has_acted = True
            with suppress(UnheardError):  # if a wait needs its peer's wait, no rank can be a transfer ahead
                self._stage.hear("one more is started", _ONE_MORE_S, self.pump)
            raise InjectedFault("injected in wait of layer 1")

    def ends(self, step: Step) -> None:
        if self._stage.rank == 0 and (step.name, step.plan.generation, step.plan.layer) == ("transfer", 2, 2):
            self._stage.say("one more is started")


def counts_what_the_plan_counts(stage: Stage, subject: Subject, across: bool) -> None:
    """Abort a layer when one rank has started the next one and the other has not; later layers must be exact.

    Notes
    -----
    With `across`, rows of that next layer move between ranks; else they stay on their ranks, and every backend has
    drained it. The following rearrangements leave out layers that move nothing, so that the plans' sequences jump too.
    """
    maps = shuffles(4, _NUM_LAYERS, stage.world_size, _NUM_ROWS, seed=18)
    if not across:
        maps[2][2] = maps[1][2].reshape(stage.world_size, _NUM_ROWS)[:, ::-1].ravel()
    model = Model(stage.rank, _NUM_ROWS, [[64, 24]] * _NUM_LAYERS, subject.device_type)
    model.fill(maps[0])
    observer = _StartsOneLess(stage)
    with communicator(stage, subject, model.weights, observers=[observer], timeout_s=6) as comm:
        comm.rearrange(maps[0], maps[1])
        wrong = model.wrong_rows(maps[1])
        reach(not wrong, f"wrong bytes in (layer, tensor, row) {wrong[:8]} before anything was aborted")
        backend = comm._lives.epoch.backend
        observer.pump = backend.progress if getattr(backend, "needs_progress", True) else lambda: None
        failed = ""
        try:
            comm.rearrange(maps[1], maps[2])
        except EplbError as error:
            failed = str(error)
        reach("injected in wait" in failed, f"rank 1 raised in its wait, and this one heard {failed!r}")
        held = comm.report.physical_to_logical_map.copy()
        after = "a layer was aborted, rank 0 had started the next one and rank 1 had not"
        if not comm.usable:
            after += ", all rebuilt"
            with expecting(f"{after}, and that raised"):
                comm.rebuild(15, device_group=stage.device_group(subject))
        for number, following in enumerate(_skipping_layers(held, maps[3]), 1):
            with expecting(f"{after}, and rearrangement {number} from then on raised"):
                held = comm.rearrange(held, following).physical_to_logical_map.copy()
            wrong = model.wrong_rows(held)
            expect(not wrong, f"{after}; rearrangement {number} from then on: (layer, tensor, row) {wrong[:8]} wrong")


def _skipping_layers(held: Map, wanted: Map) -> list[Map]:
    """Change the placement of the even layers first, then that of the odd ones."""
    first = wanted.copy()
    first[1::2] = held[1::2]
    return [first, wanted]


def is_quiet_once_closed(stage: Stage, subject: Subject, aborted: bool) -> None:
    """Close by force with a transfer whose peer starts only later; memory that close calls safe must stay unwritten."""
    with Exchange(stage, subject) as exchange:
        exchange.complete()
        if stage.rank == 0:
            _close_and_watch(exchange, aborted=aborted)
        else:
            stage.hear("closed", 20.0)
            with suppress(EplbError):  # its peer is gone, which is not this rank's failure
                exchange.hooks.wait(exchange.hooks.transfer(exchange.plan(generation=2)), PROMPT_S)
            stage.say("started late")
            stage.hear("looked", 20.0)


def _close_and_watch(exchange: Exchange, *, aborted: bool) -> None:
    stage = exchange.stage
    handle = exchange.hooks.transfer(exchange.plan(generation=2))
    drained = exchange.backend.abort(handle, "the kit aborts") if aborted else False
    with stage.inside("close(force=True)", judged=True), expecting("close(force=True) raised"):
        safe = exchange.close_backend(undrained=not drained)
    exchange.paint(0)
    stage.say("closed")
    written = False
    until, heard = time.monotonic() + 20.0, False
    while not written and time.monotonic() < until:
        written = not exchange.painted(0)
        if not heard and stage.has_heard("started late"):
            heard, until = True, time.monotonic() + _WATCHED_S
        time.sleep(5e-3)
    stage.say("looked")
    reach(heard or written, "rank 1 did not start its transfer")
    before = f"abort had said {drained}" if aborted else "a transfer was in flight"
    expect(
        not (safe and written),
        f"{before}; close(force=True) then said that memory is safe, and landing memory was written after it",
    )


def gives_up_when_told(stage: Stage, subject: Subject, cancelled: Cancelled) -> dict[str, Any]:
    """Wait for a peer that never starts; ``context.cancelled()`` answers after a moment. Return how the wait ended."""
    with Exchange(stage, subject, timeout_s=_LIMIT_S) as exchange:
        exchange.complete()
        exchange.renew()
        if stage.rank != 0:
            try:
                stage.hear("rank 0 is done", _LIMIT_S + 5)
            except UnheardError:
                return {"outlasted": f"rank 0 is still in wait(timeout_s={_LIMIT_S:g})"}
            return {}
        plan = exchange.plan(generation=2)
        handle = exchange.hooks.transfer(plan)
        exchange.call_off(cancelled, after_s=CALLED_OFF_S)
        story: dict[str, Any] = {"error": "", "typed": True}
        started = time.monotonic()
        try:
            with stage.inside(f"wait(timeout_s={_LIMIT_S:g})", judged=True):
                exchange.hooks.wait(handle, _LIMIT_S)
        except Exception as error:
            story |= {"error": describe(error), "typed": isinstance(error, EplbError)}
        else:
            # A backend that reads live rows may be done by then; then the rows are there.
            story["missing"] = exchange.missing(plan)
        story["seconds"] = time.monotonic() - started - CALLED_OFF_S
        # The core then aborts the handle, and keeps calling progress() while it votes.
        try:
            exchange.backend.abort(handle, "the kit aborts")
            exchange.pump(0.1)
        except Exception as error:
            story |= {"afterwards": describe(error), "typed": isinstance(error, EplbError)}
        stage.say("rank 0 is done")
        return story


def waits_for_the_meeting(stage: Stage, subject: Subject) -> None:
    """Build a communicator, and check whether its backend reads what is known only after the meeting."""
    model = Model(stage.rank, _NUM_ROWS, [[64, 24]], subject.device_type)
    old = np.arange(stage.world_size * _NUM_ROWS)[None]
    model.fill(old)
    with building("it cannot be built") as reads:
        comm = communicator(stage, subject, model.weights)
    with comm:
        expect(not reads, "; ".join(reads))
        comm.connect()
        context = comm._lives.epoch.context
        reach(context.epoch > 0 and context.store is not None, "connected, and the core has given no epoch or no store")
