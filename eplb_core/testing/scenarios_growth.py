"""Scenarios that measure what a backend uses of its process, its peers and the store."""

from __future__ import annotations

import gc
import os
import pickle
import pickletools
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eplb_core.testing.early import building
from eplb_core.testing.exchange import Exchange, communicator
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.pool import Stage, Subject

WARM_UP, ROUNDS = 8, 32
MIB = 1 << 20


def footprint(stage: Stage) -> dict[str, int]:
    """Return the descriptors, threads and KiB of memory of this process, and the number of keys in the store."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "python threads": threading.active_count(),
        "memory KiB": _pss_kib(),
        "store keys": stage.num_keys(),
        "children": sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children")),
    }


def goes_round_and_round(stage: Stage, subject: Subject) -> dict[str, Any]:
    """Rearrange many times; return the footprint after the first rounds and after the last."""
    maps = shuffles(5, 2, stage.world_size, 4, redundant=2, seed=13)
    model = Model(stage.rank, 4, [[4096, 24], [65_536, 8]], subject.device_type)
    model.fill(maps[0])
    environment = dict(os.environ)
    with communicator(stage, subject, model.weights) as comm:
        held = maps[0]
        before = {}
        for number in range(ROUNDS):
            if number == WARM_UP:
                stage.meet()
                before = footprint(stage)
            held = comm.rearrange(held, maps[(number + 1) % len(maps)]).physical_to_logical_map
        stage.meet()
        after = footprint(stage)
        stage.meet()
    changed = sorted(key for key in {*environment, *os.environ} if environment.get(key) != os.environ.get(key))
    return {"before": before, "after": after, "wrong": model.wrong_rows(held), "environment": changed}


def lives_many_times(stage: Stage, subject: Subject) -> list[dict[str, int]]:
    """Build, use and close communicators one after another; return the footprint after each."""
    maps = shuffles(2, 1, stage.world_size, 4, seed=14)
    model = Model(stage.rank, 4, [[4096, 24]], subject.device_type)
    control = stage.control()
    seen = []
    for _ in range(6):
        model.fill(maps[0])
        with communicator(stage, subject, model.weights, control=control) as comm:
            comm.rearrange(*maps)
        stage.meet()
        seen.append(footprint(stage))
        stage.meet()
    return seen


def takes_memory(stage: Stage, subject: Subject, num_layers: int, row_nbytes: int) -> dict[str, int]:
    """Swap every row of every layer between two ranks; return the bytes of a layer, of landing memory, and received."""
    half = 4 * stage.world_size // 2
    old = np.arange(2 * half)[None].repeat(num_layers, 0)
    new = np.roll(old, half, axis=1)
    row = torch.ones(4, row_nbytes, dtype=torch.uint8, device=subject.device_type)
    weights = [[row.clone()] for _ in range(num_layers)]
    stage.meet()
    gc.collect()
    before = _pss_kib() + _files_kib() // stage.world_size
    with communicator(stage, subject, weights, staging_layers=2) as comm:
        stage.meet()
        comm.rearrange(old, new)
        stage.meet()
        gc.collect()
        after = _pss_kib() + _files_kib() // stage.world_size
        landing = comm._lives.epoch.landing.nbytes
        stage.meet()
    return {"layer": 4 * row_nbytes, "landing": landing, "grown": (after - before) << 10}


def is_built(stage: Stage, subject: Subject) -> None:
    """Build a communicator over a small model without connecting it."""
    model = Model(stage.rank, 4, [[64, 24]], subject.device_type)
    with stage.inside("its constructor or register_buffers", judged=True), building("it cannot be built"):
        comm = communicator(stage, subject, model.weights)
    comm.close(force=True)


def describes_itself(stage: Stage, subject: Subject) -> dict[str, Any]:
    """Register the weights of a large model; return the metadata that is sent."""
    weights = [[torch.zeros(32, 2 + tensor, dtype=torch.uint8) for tensor in range(6)] for _ in range(61)]
    comm = communicator(stage, subject, [[t.to(subject.device_type) for t in layer] for layer in weights])
    payload = comm._lives.epoch.local.payload
    shared = dict(comm._lives.epoch.backend.shared_options)
    comm.close(force=True)
    return {"nbytes": len(payload), "pickle": is_pickle(payload), "shared": shared}


def serialises(stage: Stage, subject: Subject) -> list[str]:
    """Connect and exchange while calls of pickle's functions are recorded; return these calls."""
    calls: list[str] = []
    kept = {name: getattr(pickle, name) for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")}

    def telling(name: str, function: Any) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            calls.append(f"pickle.{name}")
            return function(*args, **given)

        return call

    for name, function in kept.items():
        setattr(pickle, name, telling(name, function))
    try:
        with Exchange(stage, subject) as exchange:
            plan = exchange.plan()
            exchange.hooks.wait(exchange.hooks.transfer(plan), 10.0)
            payload = exchange.session.local.payload
            exchange.meet()
    finally:
        for name, function in kept.items():
            setattr(pickle, name, function)
    return [*(["the metadata is a pickle"] if is_pickle(payload) else []), *sorted(set(calls))]


def is_pickle(payload: bytes) -> bool:
    """Is a payload a complete pickle?"""
    if len(payload) < 2:
        return False
    try:
        last = max(position or 0 for _, _, position in pickletools.genops(payload))
    except Exception:  # not a pickle
        return False
    return last == len(payload) - 1


def _files_kib() -> int:
    """Return the size of open in-memory files in KiB; memory that is not mapped counts for no process."""
    sizes = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            if os.readlink(link).startswith(("/memfd:", "/dev/shm/")):
                status = link.stat()
                sizes[status.st_dev, status.st_ino] = status.st_blocks // 2
    return sum(sizes.values())


def _pss_kib() -> int:
    """Return the memory of this process in KiB, pages shared with others counted in parts."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise OSError("smaps_rollup has no Pss")
