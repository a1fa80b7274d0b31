"""Scenarios in which placements change and every byte is checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from eplb_core.errors import ConfigError
from eplb_core.testing.exchange import communicator
from eplb_core.testing.expectation import expect, expecting, reach
from eplb_core.testing.model import Map, Model, shuffles
from eplb_core.testing.pool import Stage, Subject


def rearranges(
    stage: Stage,
    subject: Subject,
    maps: Sequence[Any],
    row_nbytes: Sequence[Sequence[int]],
    fields: dict[str, Any] | None = None,
    judged_after: int | None = None,
) -> int:
    """Go through placements and check every row after each; return the bytes that the reports count.

    Notes
    -----
    Once `judged_after` placements were reached, an exception counts as a failure of what the test is about.
    """
    placements: list[Map] = [np.array(placement, dtype=np.int64) for placement in maps]
    num_rows = placements[0].shape[1] // stage.world_size
    model = Model(stage.rank, num_rows, row_nbytes, subject.device_type)
    model.fill(placements[0])
    received = 0
    with communicator(stage, subject, model.weights, **(fields or {})) as comm:
        for number, (old, new) in enumerate(itertools.pairwise(placements)):
            judged = judged_after is not None and number >= judged_after
            with _judging(judged, f"after {number} placements, the next one raised"):
                received += comm.rearrange(old, new).nbytes_received
            wrong = model.wrong_rows(new)
            expect(not wrong, f"placement {number + 1}: wrong bytes in (layer, tensor, row) {wrong[:8]}")
    return received


def moves_bits(stage: Stage, subject: Subject) -> None:
    """Move floats of several formats with every bit pattern, NaNs that signal among them."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool)
    old, new = np.arange(8)[None], np.arange(8)[None, ::-1].copy()
    mine = slice(stage.rank * 4, stage.rank * 4 + 4)
    truth = []
    for number, dtype in enumerate(dtypes):
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.arange(8 * 256 * size, dtype=torch.int64).mul(2654435761 + number).bitwise_right_shift(7)
        if dtype.is_floating_point and size > 1:  # every element an infinity or a NaN: all that arithmetic would change
            raw = raw.reshape(-1, size)
            raw[:, -1], raw[:, -2] = raw[:, -1] | 0x7F, raw[:, -2] | 0x80
        raw = raw.reshape(8, 256 * size) % (2 if dtype is torch.bool else 256)
        truth.append(raw.to(torch.uint8))
    weights = [raw[old[0, mine]].to(subject.device_type).view(dtype) for raw, dtype in zip(truth, dtypes, strict=True)]
    with communicator(stage, subject, [weights]) as comm:
        comm.rearrange(old, new)
    for dtype, tensor, raw in zip(dtypes, weights, truth, strict=True):
        expect(
            torch.equal(tensor.cpu().view(torch.uint8).reshape(4, -1), raw[new[0, mine].copy()]),
            f"{dtype}: bits changed on the way",
        )


def moves_scalars_and_empty_rows(stage: Stage, subject: Subject) -> None:
    """Move a scalar per expert beside a tensor without bytes and rows of one byte."""
    old, new = np.arange(8)[None], np.arange(8)[None, ::-1].copy()
    mine = slice(stage.rank * 4, stage.rank * 4 + 4)
    experts = torch.arange(8, dtype=torch.float32)
    every = [experts[:, None].expand(8, 0).contiguous(), experts + 0.5, experts.to(torch.uint8)[:, None] + 7]
    weights = [tensor[old[0, mine]].to(subject.device_type) for tensor in every]
    rearranges(stage, subject, [old, new], [[64, 24, 8]])
    amiss = "rows of 64 bytes travel; a scalar beside empty rows and rows of one byte raised"
    with expecting(amiss), communicator(stage, subject, [weights], name="scalars") as comm:
        comm.rearrange(old, new)
    for number, (tensor, whole) in enumerate(zip(weights, every, strict=True)):
        expect(
            torch.equal(tensor.cpu(), whole[new[0, mine].copy()]),
            f"tensor {number} of shape {tuple(whole.shape)}: wrong values after the move",
        )


def counts_bytes(stage: Stage, subject: Subject) -> None:
    """Compare what the report says with what the maps say."""
    old, new = np.arange(8)[None], np.arange(8)[None].copy()
    new[0, [0, 4]] = new[0, [4, 0]]
    received = rearranges(stage, subject, [old, new], [[96, 32]])
    expect(received == 128, f"one expert of 128 bytes was received; the receipt says {received}")


def lands_in_the_hosts_memory(stage: Stage, subject: Subject) -> None:
    """Use the host's own landing rows, or, where landing memory is packed, be refused by name."""
    maps = shuffles(3, 3, stage.world_size, 4)
    model = Model(stage.rank, 4, [[64, 32]] * 3, subject.device_type)
    model.fill(maps[0])
    slot = [torch.empty_like(tensor) for tensor in model.weights[0]]
    landing = [slot]  # of two; the core adds the other
    with communicator(stage, subject, model.weights, name="landing of its own") as comm:
        comm.rearrange(maps[0], maps[1])
        comm.rearrange(maps[1], maps[0])
    try:
        comm = communicator(stage, subject, model.weights, landing=landing)
    except ConfigError as error:
        expect(error.code == "EPLB-C010", f"refused with {error.code} instead of EPLB-C010")
        return
    with comm, expecting("with landing= of the host, what works without it raised"):
        comm.rearrange(maps[0], maps[1])
        comm.rearrange(maps[1], maps[2])
    wrong = model.wrong_rows(maps[2])
    expect(not wrong, f"wrong bytes in (layer, tensor, row) {wrong[:8]}")


def follows_the_hosts_changes(stage: Stage, subject: Subject) -> None:
    """Write new weights between two rearrangements; the new bytes must be moved."""
    maps = shuffles(2, 2, stage.world_size, 4, seed=3)
    model = Model(stage.rank, 4, [[128, 40]] * 2, subject.device_type)
    model.fill(maps[0])
    with communicator(stage, subject, model.weights) as comm:
        for version in range(3):
            model.version = version
            model.fill(maps[0])
            comm.rearrange(maps[0], maps[1])
            wrong = model.wrong_rows(maps[1])
            expect(not wrong, f"round {version}: old bytes in (layer, tensor, row) {wrong[:8]}")
            comm.rearrange(maps[1], maps[0])


def keeps_communicators_apart(stage: Stage, subject: Subject) -> None:
    """Interleave two communicators of one process, layer by layer."""
    maps = shuffles(2, 3, stage.world_size, 4, seed=4)
    models = [Model(stage.rank, 4, [[80, 16]] * 3, subject.device_type, version) for version in range(2)]
    comms = []
    for number, model in enumerate(models):
        model.fill(maps[0])
        comms.append(communicator(stage, subject, model.weights, name=f"model{number}"))
        if number == 0:
            comms[0].rearrange(*maps)
            comms[0].rearrange(*reversed(maps))
            wrong = model.wrong_rows(maps[0])
            reach(not wrong, f"one communicator alone: wrong bytes in (layer, tensor, row) {wrong[:8]}")
    with comms[0], comms[1], expecting("one communicator works alone; two of them, taking turns, raised"):
        generations = [comm.begin(*maps) for comm in comms]
        for layer in generations[0].layers:
            for generation in generations:
                generation.stage(layer)
            for generation in reversed(generations):
                generation.commit(layer)
        for generation in generations:
            generation.end()
    for number, model in enumerate(models):
        wrong = model.wrong_rows(maps[1])
        expect(not wrong, f"communicator {number}: wrong bytes in (layer, tensor, row) {wrong[:8]}")


def lives_again(stage: Stage, subject: Subject) -> None:
    """Close a communicator and build another of the same name over other weights."""
    maps = shuffles(2, 2, stage.world_size, 4, seed=6)
    control = stage.control()
    for version in range(3):
        model = Model(stage.rank, 4, [[72, 16]] * 2, subject.device_type, version)
        model.fill(maps[0])
        judging = _judging(version > 0, f"{version} communicators were closed, and the next one raised")
        with judging, communicator(stage, subject, model.weights, control=control) as comm:
            comm.rearrange(*maps)
        wrong = model.wrong_rows(maps[1])
        (expect if version else reach)(not wrong, f"life {version}: wrong bytes in (layer, tensor, row) {wrong[:8]}")


def _judging(judged: bool, text: str) -> AbstractContextManager[None]:
    return expecting(text) if judged else nullcontext()
