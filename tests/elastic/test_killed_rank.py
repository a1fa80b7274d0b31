"""One of four ranks is killed in the middle of a layer: what is lost, what comes back, and how long it takes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import numpy as np
import pytest
from safetensors.numpy import save_file

import eplb_core as eplb
from eplb_core.errors import PeerLostError
from eplb_core.hookspecs import hookimpl
from eplb_core.sources import CheckpointSource
from eplb_core.testing.known_bytes import known_bytes
from eplb_core.testing.model import Model
from eplb_core.testing.ranks import Rank, Ranks
from tests.support.backends import BackendCase, case_config, case_options
from tests.support.lives import over_gloo_and_nixl

LAYERS, ROWS, EXPERTS = [[4096, 2048]] * 4, 4, 12
VICTIM = 2


@dataclass
class DiesMidLayer:
    """Is killed when the rows of layer 1 have landed."""

    rank: Rank
    name: str = "dies"

    @hookimpl
    def observe(self, event):
        if (event.kind, event.layer) == ("vote", 1):
            self.rank.store("life").set("killed", str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def checkpoint(folder) -> None:
    """Write the test's experts as a Qwen3-MoE names them: gate and up make the first tensor, down is the second."""
    tensors = {}
    for layer in range(len(LAYERS)):
        for expert in range(EXPERTS):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            w13 = known_bytes(layer, 0, expert, LAYERS[layer][0]).reshape(2, -1, 8).copy()
            tensors[f"{prefix}.gate_proj.weight"], tensors[f"{prefix}.up_proj.weight"] = w13[0].copy(), w13[1].copy()
            w2 = known_bytes(layer, 1, expert, LAYERS[layer][1]).reshape(-1, 8).copy()
            tensors[f"{prefix}.down_proj.weight"] = w2
    save_file(tensors, folder / "model.safetensors")


def placement() -> np.ndarray:
    """Return a map in which each rank alone holds three experts, and a copy of its right neighbour's first."""
    row = [number for rank in range(4) for number in (*range(3 * rank, 3 * rank + 3), 3 * ((rank + 1) % 4))]
    return np.tile(row, (len(LAYERS), 1))


def lives_on(rank: Rank, backend: str, folder: str, with_source: bool):
    old = placement()
    moved = np.roll(old.reshape(-1, 4, ROWS), 1, axis=1).reshape(old.shape)
    model = Model(rank.rank, ROWS, LAYERS)
    comes_back = rank.rank == 4  # a process of its own, which is the victim's rank again
    if comes_back:
        model.rank = VICTIM
        rank.listen(120)
    sources = [CheckpointSource(folder)] if with_source else []
    observers = [DiesMidLayer(rank)] if rank.rank == VICTIM and not comes_back else []
    if not comes_back:
        model.fill(old)
    comm = eplb.Communicator(
        case_config(backend, timeout_s=20),
        model.weights,
        eplb.ControlPlane.from_store(rank.store(), rank=model.rank, world_size=4),
        options=case_options(),
        observers=observers,
        sources=sources,
    )
    story = {"seconds": {}}
    if not comes_back:
        comm.connect()
        with pytest.raises(PeerLostError) as caught:
            comm.rearrange(old, moved)
        killed_at = float(rank.store("life").get("killed"))
        told_at = time.time()
        story["committed"] = caught.value.report.committed_layers
        held = comm.rebuild(20, ranks=[0, 1, 3]).physical_to_logical_map
        met_at = time.time()
        story["held"] = held.tolist()
        wanted = np.full_like(held, -1)
        survivors = np.isin(np.arange(16) // ROWS, [0, 1, 3])
        wanted[:, survivors] = np.arange(EXPERTS)
        report = comm.rearrange(held, wanted, missing="report")
        whole_at = time.time()
        story["unmet"] = report.unmet
        story["wrong"] = model.wrong_rows(report.physical_to_logical_map)
        story["supplied"] = report.nbytes_supplied
        story["phases"] = dict(report.seconds_by_phase)
        times = {"told": told_at - killed_at, "met": met_at - told_at, "moved": whole_at - met_at}
        story["seconds"] = times | {"in all": whole_at - killed_at}
        rank.tell("serves")
        rank.listen(60)  # until the replacement has been started
        held = comm.rebuild(20, ranks=[0, 1, 2, 3]).physical_to_logical_map
    else:
        story["wrong"] = []
        held = None
        comm.connect()  # which meets the others' rebuild
    # The replacement knows nothing of its rows; the others' hosts tell it what the map is.
    if rank.rank == 0:
        rank.store("life").set("map", held.astype(np.int64).tobytes())
    everywhere = np.frombuffer(rank.store("life").get("map"), np.int64).reshape(old.shape).copy()
    if not with_source:  # what was unmet is nowhere: only what is held can be asked for
        wanted = everywhere.copy()
        wanted[:, VICTIM * ROWS : (VICTIM + 1) * ROWS] = everywhere[:, :ROWS]
    else:
        wanted = old
    report = comm.rearrange(everywhere, wanted)
    story["wrong"] += model.wrong_rows(report.physical_to_logical_map)
    story["whole"] = np.array_equal(report.physical_to_logical_map, wanted)
    comm.close()
    return story


def lost(held: np.ndarray) -> set[tuple[int, int]]:
    return {(layer, e) for layer, row in enumerate(held) for e in set(range(EXPERTS)) - set(row.tolist())}


@over_gloo_and_nixl
@pytest.mark.parametrize("with_source", [False, True], ids=["no source", "checkpoint"])
@pytest.mark.slow
def test_survivors_go_on_with_what_is_left_and_a_replacement_makes_it_whole(
    backend: BackendCase, with_source: bool, tmp_path
) -> None:
    checkpoint(tmp_path)
    with Ranks(5, lives_on, backend.name, str(tmp_path), with_source, env=backend.env) as ranks:
        assert ranks.join(60, without=(0, 1, 3, 4))[VICTIM].killed
        for number in (0, 1, 3):
            assert ranks.hear(number, 60) == "serves"
        for number in (0, 1, 3, 4):
            ranks.tell(number, "on")
        outcomes = ranks.join(90)
    assert [outcome.error for outcome in outcomes] == [None] * 5
    stories = [outcome.value for outcome in outcomes]
    again = stories[4]
    survivors = [stories[number] for number in (0, 1, 3)]
    held = np.array(survivors[0]["held"])
    assert (held[:, VICTIM * ROWS : (VICTIM + 1) * ROWS] == -1).all()
    for story in (*survivors, again):
        assert story["wrong"] == []
        assert story["whole"]
    for story in survivors:
        assert story["held"] == survivors[0]["held"]
        assert story["unmet"] == survivors[0]["unmet"]
        assert story["seconds"]["in all"] < 20
    unmet = {(layer, expert) for layer, expert, _ in survivors[0]["unmet"]}
    assert unmet == (set() if with_source else lost(held))
    assert (sum(story["supplied"] for story in survivors) > 0) == with_source
    print([story["seconds"] for story in survivors], survivors[0]["phases"])
