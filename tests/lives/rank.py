"""The process of one rank: a host engine with weights and a communicator that does what the history tells it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.errors import EplbError
from eplb_core.testing.faults import FaultInjector
from tests.lives.calls import Call, Command, Fault
from tests.lives.worlds import Map, Weights, World

_TEXT_LIMIT = 2000
_SHOWN_ROWS = 4


def serve(world: World, rank: int, port: int, pipe: Connection, log: str, environment: dict[str, str]) -> None:
    """Obey commands until the pipe closes or says so."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.update(environment)
    torch.set_num_threads(1)
    host = Host(world, rank, port)
    pipe.send("here")
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            return
        if command is None:
            return
        pipe.send(host.obey(command))


class Host:
    """What a host engine has: weights, a placement it believes in, a communicator.

    Parameters
    ----------
    world : World
        The history's.
    rank, port : int
        Which rank, and where the store listens, which outlives this process.
    """

    def __init__(self, world: World, rank: int, port: int) -> None:
        self.world, self.rank = world, rank
        self.weights = Weights(world, rank)
        self.believed: Map | None = None
        self.comm: Any = None
        self.calls: list[Call] = []
        self._versions: list[int] = []
        self._invalid = False
        self._control: Any = None
        self._injector: FaultInjector | None = None
        self._generation: Any = None
        self._staged: dict[int, list[int]] = {}
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))

    def obey(self, command: Command) -> list[Call]:
        """Do what a command says and return the calls that it made."""
        self.calls = []
        if command.delay_s:
            time.sleep(command.delay_s)
        if self._injector is not None:
            self._arm(self._injector, command.fault)
        getattr(self, command.method)(**command.arguments)
        return self.calls

    # --- commands ----------------------------------------------------------------------------------------------------

    def load(self, mapping: Map, version: int, versions: list[int]) -> None:
        """Load the weights of a placement, as a host does before it builds a communicator."""
        self.weights.fill(mapping, version)
        self.believed, self._versions, self._invalid = mapping.copy(), versions, False
        self._staged = {}

    def build(self, new_control: bool) -> None:
        """Build a communicator, on a control plane of the process's own or on a new one over the same store."""
        if self._control is None or new_control:
            self._control = eplb.ControlPlane.from_store(self._store, rank=self.rank, world_size=self.world.world_size)
        world = self.world
        config = eplb.EPLBConfig(
            communicator=world.backend,
            use_async=False,
            timeout_s=world.timeout_s,
            staging_layers=world.staging_layers,
        )
        self._injector = FaultInjector("agree", "raise", generation=-1)
        self.comm = None
        with self._calling("Communicator"):
            self.comm = eplb.Communicator(
                config,
                self.weights.tensors,
                self._control,
                options=world.options,
                observers=[self._injector],
                name=world.name,
            )

    def check(self) -> None:
        """Look at the weights without any call."""
        with self._calling("nothing"):
            pass

    def connect(self, limit_s: float) -> None:
        """Call ``connect``."""
        with self._calling("connect"):
            self.comm.connect(limit_s)

    def rearrange(self, old: Map, new: Map) -> None:
        """Call ``rearrange``."""
        with self._calling("rearrange"):
            self.comm.rearrange(old, new)

    def layer_by_layer(self, old: Map, new: Map, lag: int, stop_after: int | None, commit_decided: bool) -> None:
        """Do the same through ``begin``, ``stage``, ``commit`` and ``end``.

        Parameters
        ----------
        old, new : Map
            From, to.
        lag : int
            How many staged layers the host leaves uncommitted while it stages the next.
        stop_after : int or None
            Stage so many layers, then walk away and leave the generation open.
        commit_decided : bool
            After a failure, commit what the report says is decided.
        """
        self._staged = {}
        with self._calling("begin") as call:
            self._generation = self.comm.begin(old, new)
        if not call.ok:
            return
        columns = self.world.columns(self.rank)
        waiting: list[int] = []
        for number, layer in enumerate(self._generation.layers):
            if number == stop_after:
                return
            with self._calling(f"stage({layer})", staging=(layer, old[layer, columns].tolist())) as call:
                self._generation.stage(layer)
            if not call.ok:
                for decided in call.decided if commit_decided else ():
                    self._commit(decided)
                return
            waiting.append(layer)
            if len(waiting) > lag and not self._commit(waiting.pop(0)):
                return
        while waiting:
            if not self._commit(waiting.pop(0)):
                return
        with self._calling("end"):
            self._generation.end()

    def rebuild(
        self, ranks: list[int], limit_s: float, budget_s: float, wrong_first: list[int] | None, first_connect: bool
    ) -> None:
        """Call ``rebuild`` until it succeeds or the time that the host grants is over.

        Parameters
        ----------
        ranks : list of int
            The members.
        limit_s, budget_s : float
            Of one call, and of all.
        wrong_first : list of int or None
            Members named in a first call, by mistake.
        first_connect : bool
            Let the first call be ``connect``, as a new process does that knows of no failure.
        """
        until = time.monotonic() + budget_s
        if wrong_first is not None:
            with self._calling(f"rebuild(ranks={wrong_first})"):
                self.comm.rebuild(limit_s, ranks=wrong_first)
        refused = 0
        while True:
            if first_connect:
                with self._calling("connect") as call:
                    self.comm.connect(limit_s)
            else:
                with self._calling(f"rebuild(ranks={ranks})") as call:
                    self.comm.rebuild(limit_s, ranks=ranks)
            first_connect = False
            refused = refused + 1 if call.code in ("EPLB-T008", "EPLB-T009") else 0
            if call.ok:
                self._staged = {}
            if call.ok or refused == 3 or call.outcome == "untyped" or call.wrong or time.monotonic() > until:
                break
            time.sleep(0.02)
        if len(self.calls) > 8:
            self.calls[4:-4] = [each for each in self.calls[4:-4] if each.wrong or each.outcome == "untyped"][:4]

    def reload(self, mapping: Map, version: int, versions: list[int]) -> None:
        """Rewrite the weights under a communicator and tell it what they hold now."""
        self.load(mapping, version, versions)
        with self._calling("reloaded"):
            if hasattr(self.comm, "reloaded"):
                self.comm.reloaded(mapping)

    def close(self, force: bool) -> None:
        """Call ``close``; the weights stay, and what they hold is what the last report said."""
        comm = self.comm
        with self._calling(f"close(force={force})"):
            comm.close(force=force)
        self.comm, self._injector, self._generation, self._staged = None, None, None, {}

    def _commit(self, layer: int) -> bool:
        with self._calling(f"commit({layer})", committing=layer) as call:
            self._generation.commit(layer)
        return call.ok

    # --- one call ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _calling(
        self, name: str, staging: tuple[int, list[int]] | None = None, committing: int | None = None
    ) -> Iterator[Call]:
        call = Call(name)
        waited = _waited_for_a_core()
        call.began_s = time.monotonic()
        report: Any = None
        try:
            yield call
        except EplbError as error:
            call.outcome, call.code, call.text = "error", error.code, str(error)[:_TEXT_LIMIT]
            report = error.report
            call.reported = report is not None
            self._invalid = self._invalid or error.code == "EPLB-T006"
        except KeyboardInterrupt:
            call.outcome = "interrupted"
        except Exception:
            call.outcome, call.text = "untyped", traceback.format_exc()[-_TEXT_LIMIT:]
        call.ended_s = time.monotonic()
        call.starved_s = max((after - waited.get(task, 0.0) for task, after in _waited_for_a_core().items()), default=0)
        if call.ok and staging is not None:
            self._staged[staging[0]] = staging[1]
        if call.ok and committing is not None:
            self._staged.pop(committing, None)
        call.acted = self._injector is not None and self._injector.acted
        call.invalid = self._invalid
        if report is not None:
            self._take(call, report)
        if self.comm is not None:
            self._take(call, self.comm.report)
        elif self.believed is not None:
            self._compare(call, self.believed)
        self.calls.append(call)

    def _take(self, call: Call, report: Any) -> None:
        """Note what a report says, and hold it against the bytes."""
        call.committed = tuple(report.committed_layers)
        call.decided = tuple(getattr(report, "decided_layers", ()))
        call.doubtful = tuple(report.layers_in_doubt)
        call.epoch, call.generation = report.epoch, report.generation
        call.quarantined_nbytes = report.quarantined_nbytes
        placement = report.physical_to_logical_map
        if placement.shape == (len(self.world.layers), self.world.num_slots):
            self.believed = placement.copy()
        call.placement = self.believed  # before a first rearrangement is agreed a communicator holds what was loaded
        if self.believed is not None:
            self._compare(call, self.believed)

    def _compare(self, call: Call, mapping: Map) -> None:
        if self._invalid:
            return
        wrong, early = [], []
        for layer, tensor, row, expert in self.weights.wrong(mapping):
            holds = self.weights.holds(layer, tensor, row, self._versions)
            text = f"layer {layer}, tensor {tensor}, row {row} should be expert {expert} and is {holds}"
            old = self._staged[layer][row] if layer in self._staged else None
            waits = old is not None and self.weights.is_expert(layer, tensor, row, old)
            (early if waits else wrong).append(text)
        for found, field in ((wrong, "wrong"), (early, "early")):
            if found and not getattr(call, field):
                more = [f"and {len(found) - _SHOWN_ROWS} more rows"] if len(found) > _SHOWN_ROWS else []
                setattr(call, field, tuple(found[:_SHOWN_ROWS] + more))

    def _arm(self, injector: FaultInjector, fault: Fault | None) -> None:
        injector.acted, injector.generation = False, -1
        if fault is not None:
            injector.phase, injector.action = fault.phase, fault.action  # type: ignore[assignment]
            injector.layer, injector.delay_s = fault.layer, fault.delay_s
            injector.generation = self.comm.report.generation + 1


def _waited_for_a_core() -> dict[str, float]:
    """Return, by thread, how many seconds it was ready to run while others ran."""
    waited = {}
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited[task.parent.name] = int(task.read_text().split()[1]) * 1e-9
        except (OSError, IndexError):  # the thread ended meanwhile
            continue
    return waited
