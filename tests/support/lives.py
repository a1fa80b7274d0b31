"""The lives of a rank: what each of its steps came to, and which rows are not what its own report claims afterwards."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from _pytest.mark.structures import ParameterSet

import eplb_core as eplb
from eplb_core.errors import EplbError
from eplb_core.testing.model import Map, Model
from eplb_core.testing.ranks import Rank, Ranks
from tests.support.backends import BackendCase, case_config, case_options

LAYERS = [[512, 16]] * 3
NUM_ROWS = 4
AT_ONCE_S = 3.0
"""By when a failure elsewhere is known, whatever `timeout_s` is."""

_LINGERING = Path(__file__).parents[1] / "data" / "lingering"


def _nixl_why_not() -> str | None:
    info = eplb.discover().backends.get("nixl")
    if info is None:
        return "the nixl backend is not installed"
    return info.available() if info.available else None


_NEEDS_NIXL = [pytest.mark.skipif(_nixl_why_not() is not None, reason=str(_nixl_why_not()))]
_GLOO = pytest.param(BackendCase("torch_gloo"), id="torch_gloo")
_NIXL = pytest.param(BackendCase("nixl"), id="nixl", marks=_NEEDS_NIXL)
_NIXL_TCP = pytest.param(BackendCase("nixl", {"UCX_TLS": "tcp"}), id="nixl-tcp", marks=_NEEDS_NIXL)
_NIXL_STAGED = pytest.param(BackendCase("nixl", options={"mode": "staged"}), id="nixl-staged", marks=_NEEDS_NIXL)


def _in_the_soak_run(case: ParameterSet) -> ParameterSet:
    return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.soak])


over_every_transport = pytest.mark.parametrize(
    "backend", [_GLOO, _NIXL, _in_the_soak_run(_NIXL_TCP), _in_the_soak_run(_NIXL_STAGED)]
)
over_gloo_and_nixl = pytest.mark.parametrize("backend", [_GLOO, _NIXL])
over_gloo_and_nixl_tcp = pytest.mark.parametrize("backend", [_GLOO, _NIXL_TCP])
over_nixl = pytest.mark.parametrize("backend", [_NIXL, _NIXL_TCP])


@dataclass(frozen=True, repr=False)
class Step:
    """One call of a rank, and what holds there after it.

    Parameters
    ----------
    name : str
        What the story calls it.
    code : str
        ``""`` when it went well, the code of an `EplbError`, else the name of whatever else was raised.
    kind, text : str
        Class and text of what was raised.
    seconds : float
        How long it took.
    wrong : list of (layer, tensor, row)
        Rows of this rank that are not what its report claims.
    committed, decided : tuple of int
        Of the report; `decided` is None where a report says nothing of it.
    placement : list of list of int
        The map that the report claims.
    epoch : int
        Of the communicator.
    usable : bool or None
        What the communicator says of itself; None when it says nothing.
    """

    name: str
    code: str
    kind: str
    text: str
    seconds: float
    wrong: list[tuple[int, int, int]]
    committed: tuple[int, ...]
    decided: tuple[int, ...] | None
    placement: list[list[int]]
    epoch: int
    usable: bool | None

    @property
    def went_well(self) -> bool:
        """Did it return?"""
        return not self.code

    def __repr__(self) -> str:
        outcome = f"{self.kind}: {self.text[:300]}" if self.code else "went well"
        holds = f"committed {self.committed}, epoch {self.epoch}, wrong {self.wrong}"
        return f"\n  <{self.name!r} {outcome}, after {self.seconds:.2f} s; {holds}>"

    @property
    def refused(self) -> bool:
        """Did it raise an error of ours?"""
        return self.code.startswith("EPLB-")


class Life:
    """A communicator of one rank, over a model whose every byte is known.

    Parameters
    ----------
    rank : Rank
        The process.
    backend : str
        Which; configuration and options are the test case's.
    held : Map
        What the weights hold at first, and so what counts as claimed until a report has a map.
    number, world_size : int or None
        Which rank it is, and of how many; None is the process's own.
    control : ControlPlane or None
        None makes one over the test's store.
    model : Model or None
        None makes one and fills it.
    layers : sequence of sequence of int
        Bytes of the rows, ``[num_layers][num_tensors]``.
    version : int
        Of the model's bytes.
    timeout_s : float
        Of the configuration.
    **keywords
        Passed to the communicator.
    """

    def __init__(
        self,
        rank: Rank,
        backend: str,
        held: Map,
        *,
        number: int | None = None,
        world_size: int | None = None,
        control: eplb.ControlPlane | None = None,
        model: Model | None = None,
        layers: Sequence[Sequence[int]] = LAYERS,
        version: int = 0,
        timeout_s: float = 10.0,
        **keywords: Any,
    ) -> None:
        self.number = rank.rank if number is None else number
        self.steps: list[Step] = []
        self._held = held
        if model is None:
            model = Model(self.number, NUM_ROWS, layers, version=version)
            model.fill(held)
        self.model = model
        if control is None:
            control = control_plane(rank, self.number, world_size)
        config = case_config(backend, timeout_s=timeout_s)
        weights = [list(layer) for layer in model.weights]
        self.comm = eplb.Communicator(config, weights, control, options=case_options(), **keywords)

    @property
    def held(self) -> Map:
        """The placement that the report claims."""
        claimed = self.comm.report.physical_to_logical_map
        return claimed if claimed.size else self._held

    def do(self, name: str, call: Callable[..., Any], *args: Any, **keywords: Any) -> Step:
        """Make a call and write down what came of it."""
        caught: BaseException | None = None
        started = time.monotonic()
        try:
            call(*args, **keywords)
        except (Exception, KeyboardInterrupt) as error:
            caught = error
        seconds = time.monotonic() - started
        report = self.comm.report
        if isinstance(caught, EplbError) and caught.report is not None:
            told = caught.report
            assert np.array_equal(told.physical_to_logical_map, report.physical_to_logical_map)
            assert told.committed_layers == report.committed_layers
        step = Step(
            name=name,
            code="" if caught is None else getattr(caught, "code", type(caught).__name__),
            kind="" if caught is None else type(caught).__name__,
            text="" if caught is None else str(caught),
            seconds=seconds,
            wrong=self.model.wrong_rows(self.held),
            committed=report.committed_layers,
            decided=getattr(report, "decided_layers", None),
            placement=self.held.tolist(),
            epoch=report.epoch,
            usable=getattr(self.comm, "usable", None),
        )
        self.steps.append(step)
        return step

    def connect(self) -> None:
        """Connect at leisure, for stories whose limits are short: processes start at different moments."""
        self.comm.connect(30.0)

    def rearrange(self, name: str, wanted: Map) -> Step:
        """Rearrange from what holds."""
        return self.do(name, self.comm.rearrange, self.held, wanted)

    def reloaded(self, name: str, mapping: Map) -> Step:
        """Say that the host wrote the weights anew."""
        return self.do(name, lambda: self.comm.reloaded(mapping))

    def end(self) -> list[Step]:
        """Leave at once, and return the story."""
        self.do("leave", self.comm.close, force=True)
        return self.steps


def control_plane(rank: Rank, number: int | None = None, world_size: int | None = None) -> eplb.ControlPlane:
    """Make a control plane over the test's store for a process that plays another rank than its own."""
    return eplb.ControlPlane.from_store(
        rank.store(),
        rank=rank.rank if number is None else number,
        world_size=rank.world_size if world_size is None else world_size,
    )


def use_lingering_backend() -> type:
    """Let this rank, and it alone, discover the backend that cannot stop what it has begun; return its class."""
    sys.path.append(str(_LINGERING))
    from eplb_lingering.backend import Lingering

    return Lingering


def same_bytes_as_claimed(*stories: Iterable[Step]) -> None:
    """After no step does any row differ from what that rank's own report claims."""
    for number, story in enumerate(stories):
        for step in story:
            assert step.wrong == [], f"story {number}: {step}"


def at(name: str, *stories: Iterable[Step]) -> list[Step]:
    """Return one step of every story."""
    return [next(step for step in story if step.name == name) for story in stories]


def all_went_well(steps: Sequence[Step]) -> None:
    """Every rank's step went well, to one placement in one epoch."""
    assert all(step.went_well for step in steps), steps
    assert all(step.placement == steps[0].placement for step in steps), steps
    assert len({step.epoch for step in steps}) == 1, steps


def all_refused(steps: Sequence[Step]) -> None:
    """Every rank's step raised an error of ours."""
    assert all(step.refused for step in steps), steps


def heard_within(ranks: Ranks, rank: int, seconds: float) -> Any:
    """Return a rank's next note, or None when it sends none in that time."""
    try:
        return ranks.hear(rank, seconds)
    except TimeoutError:
        return None


def within(seconds: float, call: Callable[[], Any]) -> tuple[str, float]:
    """Make a call in a thread that is let go of when the call does not end: its error's code, "" or "still inside".

    Returns
    -------
    str, float
        And the seconds it took.
    """
    told: list[str] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            told.append(getattr(error, "code", type(error).__name__))
        else:
            told.append("")

    started = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return (told[0] if told else "still inside"), time.monotonic() - started


def hosts_a_store(rank: Rank) -> None:
    """Be the process that hosts a store, until told to end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank.tell(store.port)
    rank.listen(120)


def store_at(port: int, timeout_s: float = 30.0) -> dist.TCPStore:
    """Open a client of the store on a port."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))


class StoreProxy:
    """A way to the test's store that can be cut: how one rank alone loses the store.

    It runs in the rank's own process, in threads that end with it.

    Parameters
    ----------
    port : int
        Of the store.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._requests_left: int | None = None
        self._then: Callable[[], None] = lambda: None
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, requests: int, then: Callable[[], None]) -> None:
        """Cut it after so many more requests, and call `then` once that is done."""
        with self._lock:
            self._requests_left, self._then = requests, then

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            with self._lock:
                self._sockets += [near, far]
            for source, sink, asks in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._forward, args=(source, sink, asks), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, asks: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if asks and self._counts_down():
                    self._cut()
                    return
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _counts_down(self) -> bool:
        with self._lock:
            if self._requests_left is None:
                return False
            self._requests_left -= 1
            return self._requests_left == 0

    def _cut(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
        self._listener.close()
        for each in sockets:
            with contextlib.suppress(OSError):  # no lingering: the other end is told at once
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)
        self._then()
