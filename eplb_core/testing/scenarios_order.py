"""Scenarios about what is complete when a hook returns, and what a hook must not touch."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import torch

from eplb_core.errors import DiscoveryError
from eplb_core.errors.texts import describe
from eplb_core.testing.exchange import Exchange, communicator
from eplb_core.testing.expectation import Unmet, expect, expecting, reach, told
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.pool import Stage, Subject

_SOON_S = 0.25
_PROMPT_S = 1.5


def returns_from_transfer_at_once(stage: Stage, subject: Subject) -> None:
    """Start a transfer before its peers start theirs, after an ordinary one."""
    with Exchange(stage, subject) as exchange:
        try:
            handle = exchange.hooks.transfer(exchange.plan())
        except DiscoveryError as error:  # raised for None, which pluggy takes for no implementation
            raise Unmet(str(error)) from error
        exchange.hooks.wait(handle, 10.0)
        exchange.meet()
        if stage.rank:
            exchange.hear("rank 0 has started")
        started = time.monotonic()
        with stage.inside("transfer", judged=True), expecting("transfer, whose peer had not started, raised"):
            handle = exchange.hooks.transfer(exchange.plan(generation=2))
        seconds = time.monotonic() - started
        stage.say(f"rank {stage.rank} has started")
        exchange.hooks.wait(handle, 10.0)
        exchange.meet()
        expect(seconds < _PROMPT_S, f"transfer took {seconds:.1f} s while its peer had not started")


def waits_for_a_late_source(stage: Stage, subject: Subject) -> None:
    """Let one rank start late, in both directions; when `wait` returns, the rows must be in landing memory.

    Notes
    -----
    An earlier exchange has filled the same slot with the same layer, so a `wait` that returns early finds old rows.
    """
    with Exchange(stage, subject) as exchange:
        exchange.complete(expect)
        for late in range(stage.world_size):
            exchange.renew()
            plan = exchange.plan(generation=2 + late)
            if stage.rank == late:
                time.sleep(_SOON_S)
            exchange.hooks.wait(exchange.hooks.transfer(plan), 10.0)
            missing = exchange.missing(plan)
            exchange.meet()
            expect(not missing, f"rank {late} started late; wait returned without (tensor, row) {missing[:8]}")


def keeps_two_layers_apart(stage: Stage, subject: Subject) -> None:
    """Have two layers in flight; rows of the first must stay in landing memory while the second lands."""
    with Exchange(stage, subject, staging_layers=2) as exchange:
        plans = [exchange.plan(layer, slot=layer) for layer in range(2)]
        handles = [exchange.hooks.transfer(plan) for plan in plans]
        exchange.hooks.wait(handles[0], 10.0)
        exchange.meet()
        exchange.hooks.wait(handles[1], 10.0)
        missing = [(plan.layer, *row) for plan in plans for row in exchange.missing(plan)]
        exchange.meet()
        expect(not missing, f"two layers in flight: (layer, tensor, row) {missing[:8]} are not in their slot")


def writes_landing_memory_alone(stage: Stage, subject: Subject) -> None:
    """Compare the live rows, and the other slot, before a transfer and after it."""
    with Exchange(stage, subject, staging_layers=2) as exchange:
        before = exchange.live()
        exchange.paint(1)
        exchange.hooks.wait(exchange.hooks.transfer(exchange.plan(slot=0)), 10.0)
        changed = [
            (layer, tensor)
            for layer, tensors in enumerate(before)
            for tensor, rows in enumerate(tensors)
            if not torch.equal(rows, exchange.model.weights[layer][tensor])
        ]
        untouched = exchange.painted(1)
        exchange.meet()
        expect(not changed, f"live rows of (layer, tensor) {changed} changed before the commit")
        expect(untouched, "landing slot 1 was written by a transfer into slot 0")


def leaves_the_plan_alone(stage: Stage, subject: Subject) -> None:
    """Compare a plan's columns before the hooks and after them."""
    with Exchange(stage, subject) as exchange:
        plan = exchange.plan()
        before = _columns(plan)
        try:
            exchange.hooks.wait(exchange.hooks.transfer(plan), 10.0)
        except ValueError as error:  # from numpy, for a write into a read-only array
            if "read-only" in str(error) or "WRITEABLE" in str(error):
                raise Unmet(f"the plan's arrays are read-only: {told(error)}") from error
            raise
        after = _columns(plan)
        exchange.meet()
        for name, column in before.items():
            expect(np.array_equal(column, after[name]), f"{name} of the plan was changed")
            expect(not getattr(*_owner(plan, name)).flags.writeable, f"{name} of the plan was made writeable")


def is_done_when_wait_returns(stage: Stage, subject: Subject) -> None:
    """When every rank's `wait` has returned, change the live rows; landing memory must not follow."""
    with Exchange(stage, subject) as exchange:
        plan = exchange.plan()
        exchange.hooks.wait(exchange.hooks.transfer(plan), 10.0)
        exchange.meet()
        for tensor in (tensor for layer in exchange.model.weights for tensor in layer):
            tensor.fill_(0x5A)
        exchange.pump(_SOON_S)
        missing = exchange.missing(plan)
        exchange.meet()
        expect(not missing, f"live rows changed after every wait; (tensor, row) {missing[:8]} changed with them")
        exchange.paint(0)
        exchange.pump(_SOON_S)
        painted = exchange.painted(0)
        exchange.meet()
        expect(painted, "landing memory was written after wait had returned it")


def returns_from_progress_at_once(stage: Stage, subject: Subject) -> None:
    """Call `progress` while a transfer is in flight whose peer has not started."""
    with Exchange(stage, subject) as exchange:
        exchange.complete()
        handle = None
        if stage.rank == 0:
            handle = exchange.hooks.transfer(exchange.plan(generation=2))
        started = time.monotonic()
        with stage.inside("progress", judged=True):
            for _ in range(5):
                exchange.backend.progress()
        seconds = time.monotonic() - started
        exchange.meet()
        if handle is None:
            handle = exchange.hooks.transfer(exchange.plan(generation=2))
        exchange.hooks.wait(handle, 10.0)
        exchange.meet()
        expect(seconds < 5 * 0.1, f"five calls of progress took {seconds:.2f} s; it must never wait")


def runs_beside_the_engine(stage: Stage, subject: Subject) -> None:
    """Rearrange from worker threads while the thread that built the communicator computes; its data must not change."""
    maps = shuffles(3, 4, stage.world_size, 4, seed=8)
    model = Model(stage.rank, 4, [[20_000, 24]] * 4, subject.device_type)
    model.fill(maps[2])
    problems: list[str] = []
    left = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) / 4096
    truth = left @ left.T
    state = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())

    def work(old: Any, new: Any) -> None:
        try:
            comm.rearrange(old, new)
        except Exception as error:
            problems.append(describe(error))

    with communicator(stage, subject, model.weights) as comm:
        comm.rearrange(maps[2], maps[0])
        wrong = model.wrong_rows(maps[0])
        reach(
            not wrong, f"from the thread that built the communicator: wrong bytes in (layer, tensor, row) {wrong[:8]}"
        )
        for old, new in ((maps[0], maps[1]), (maps[1], maps[2])):
            worker = threading.Thread(target=work, args=(old, new))
            worker.start()
            while worker.is_alive():
                if not torch.equal(left @ left.T, truth):
                    problems.append("the engine's own thread computed something else meanwhile")
                worker.join(1e-3)
            if problems:
                break
    expect(not problems, f"from a worker thread: {'; '.join(problems)}")
    wrong = model.wrong_rows(maps[2])
    expect(not wrong, f"from a worker thread: wrong bytes in (layer, tensor, row) {wrong[:8]}")
    now = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    expect(now == state, f"torch's (default dtype, threads, grad mode) went from {state} to {now}")


def lets_the_engine_run(stage: Stage, subject: Subject) -> None:
    """Wait in a worker thread for a peer that is late; the engine's thread must go on meanwhile."""
    with Exchange(stage, subject) as exchange:
        exchange.complete()
        exchange.renew()
        plan = exchange.plan(generation=2)
        failures: list[str] = []
        if stage.rank:
            time.sleep(0.4)

        def work() -> None:
            try:
                exchange.hooks.wait(exchange.hooks.transfer(plan), 10.0)
            except Exception as error:
                failures.append(told(error))

        worker = threading.Thread(target=work)
        longest, last = 0.0, time.monotonic()
        worker.start()  # returns late when the worker takes the interpreter at once
        while worker.is_alive():
            worker.join(1e-3)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        missing = exchange.missing(plan)
        exchange.meet()
        reach(not failures, f"in a worker thread: {failures}")
        reach(not missing, f"in a worker thread: wait returned without (tensor, row) {missing[:8]}")
        expect(longest < 0.35, f"the engine's thread stood still for {longest:.2f} s: the wait holds the interpreter")


_COLUMNS = ("peer", "tensor", "row", "peer_row", "nbytes", "landing_offset", "message", "batch")


def _columns(plan: Any) -> dict[str, Any]:
    return {
        f"{side}.{name}": getattr(getattr(plan, side), name).copy()
        for side in ("sends", "receives")
        for name in _COLUMNS
    }


def _owner(plan: Any, name: str) -> tuple[Any, str]:
    side, _, column = name.partition(".")
    return getattr(plan, side), column
