"""Experts that a dead rank took with it: the rest moves, what is lost is listed, and sources bring it back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import eplb_core as eplb
from eplb_core.errors import ConfigError, EplbError, PlanError
from eplb_core.sources import CheckpointSource, HostMemorySource
from eplb_core.testing.known_bytes import known_bytes
from eplb_core.testing.model import Model
from eplb_core.testing.ranks import Rank, run_ranks
from tests.support.backends import BackendCase, case_config, case_options
from tests.support.lives import over_gloo_and_nixl

LAYERS = [[4096, 16], [4096, 16], [64, 32]]
ROWS = 4


class KnownSource:
    """A host's own source, of the bytes of the test's model."""

    def __init__(self, experts=None, fails=False) -> None:
        self.experts, self.fails, self.read_rows = experts, fails, []

    def holds(self, layer: int, expert: int) -> bool:
        return self.experts is None or expert in self.experts

    def read(self, layer: int, tensor: int, expert: int, out) -> None:
        if self.fails:
            raise OSError("the disk is gone")
        self.read_rows.append((layer, tensor, expert))
        out[:] = known_bytes(layer, tensor, expert, LAYERS[layer][tensor], 0)


def placement() -> np.ndarray:
    """Return a map of three ranks: experts 0 to 8, of which rank 2 alone has 6, 7 and 8; slot 3 of a rank is a copy."""
    row = [0, 1, 2, 3, 3, 4, 5, 0, 6, 7, 8, 1]
    return np.tile(row, (len(LAYERS), 1))


LOST = (6, 7, 8)
SURVIVORS = [0, 4, 2, 6, 7, 1, 5, 3, -1, -1, -1, -1]
"""What is asked for afterwards: expert 8 nowhere, 6 and 7 at slots 3 and 4 of the survivors, and all others."""


def goes_on(rank: Rank, backend: str, which: str):
    """Rank 2 takes no part any more; the others ask for a placement that needs what it had."""
    old = placement()
    model = Model(rank.rank, ROWS, LAYERS)
    model.fill(old)
    source = KnownSource(fails=which == "fails", experts=(6,) if which == "half" else None)
    sources = [source] if which != "none" and (which != "one rank" or rank.rank == 0) else []
    comm = eplb.Communicator(
        case_config(backend, timeout_s=10), model.weights, rank.control(), options=case_options(), sources=sources
    )
    comm.rearrange(old, old)
    if rank.rank == 2:
        comm.close(force=True)
        return None
    held = comm.rebuild(10, ranks=[0, 1]).physical_to_logical_map
    assert (held[:, 8:] == -1).all()
    wanted = np.tile(SURVIVORS, (len(LAYERS), 1))
    story = {}
    with pytest.raises(EplbError) if which in ("none", "half", "one rank", "fails") else _nothing() as caught:
        comm.rearrange(held, wanted)
    if which in ("none", "half", "one rank", "fails"):
        story["refused"] = caught.value.code, str(caught.value)
        held = comm.report.physical_to_logical_map
        report = None if which == "fails" else comm.rearrange(held, wanted, missing="report")
    else:
        report = comm.report
    if report is not None:
        story["unmet"] = report.unmet
        story["supplied"] = report.nbytes_supplied
        story["wrong"] = model.wrong_rows(report.physical_to_logical_map)
        story["map"] = report.physical_to_logical_map.tolist()
        back = comm.rearrange(report.physical_to_logical_map, held, missing="report")  # an ordinary one afterwards
        story["wrong"] += model.wrong_rows(back.physical_to_logical_map)
        story["back"] = back.unmet
    story["read"] = sorted(set(source.read_rows))
    comm.close()
    return story


class _nothing:
    def __enter__(self):
        return None

    def __exit__(self, *args):
        return False


@over_gloo_and_nixl
def test_what_still_has_a_live_row_moves_and_the_rest_is_listed(backend: BackendCase) -> None:
    stories = run_ranks(3, goes_on, backend.name, "none", env=backend.env)[:2]
    for story in stories:
        assert story["refused"][0] == "EPLB-P002"
        assert "Only ranks [2] hold it in the old map" in story["refused"][1] or "held by none" in story["refused"][1]
        assert story["unmet"] == tuple((layer, e, (slot,)) for layer in range(3) for e, slot in ((6, 3), (7, 4)))
        assert story["wrong"] == []
        kept = [0, 4, 2, 3, 3, 1, 5, 3, -1, -1, -1, -1]  # slots 3 and 4 as they were
        assert story["map"] == [kept] * 3
        assert story["back"] == ()
    assert stories[0]["map"] == stories[1]["map"]


@over_gloo_and_nixl
def test_with_a_source_nothing_is_unmet_and_only_lost_experts_are_read(backend: BackendCase) -> None:
    stories = run_ranks(3, goes_on, backend.name, "all", env=backend.env)[:2]
    for number, story in enumerate(stories):
        assert story["unmet"] == ()
        assert story["wrong"] == []
        assert story["map"] == [SURVIVORS] * 3
        expert = 6 if number == 0 else 7
        assert story["read"] == [(layer, tensor, expert) for layer in range(3) for tensor in range(2)]
        assert story["supplied"] == sum(map(sum, LAYERS))


@pytest.mark.parametrize("which", ["half", "one rank"])
def test_ranks_with_different_sources_agree_on_what_is_unmet(which: str) -> None:
    for story in run_ranks(3, goes_on, "torch_gloo", which)[:2]:
        assert story["refused"][0] == "EPLB-P002"
        assert story["unmet"] == tuple((layer, 7, (4,)) for layer in range(3))
        assert story["wrong"] == []


@over_gloo_and_nixl
def test_a_source_that_fails_aborts_the_layer_on_every_rank_and_is_named(backend: BackendCase) -> None:
    for story in run_ranks(3, goes_on, backend.name, "fails", env=backend.env)[:2]:
        code, text = story["refused"]
        assert code == "EPLB-T024"
        assert "layer 0" in text
        assert "the disk is gone" in text


def differs_in_missing(rank: Rank):
    old = placement()[:, :8]
    model = Model(rank.rank, ROWS, LAYERS)
    with (
        eplb.Communicator(case_config("torch_gloo", timeout_s=10), model.weights, rank.control()) as comm,
        pytest.raises(PlanError) as caught,
    ):
        comm.rearrange(old, old, missing="report" if rank.rank else "raise")
    return caught.value.code, str(caught.value)


def test_ranks_that_want_different_things_of_what_is_missing_are_told() -> None:
    for code, text in run_ranks(2, differs_in_missing):
        assert code == "EPLB-P003"
        assert "missing=" in text


# --- the sources of the core ------------------------------------------------------------------------------------------

HIDDEN, INTER, EXPERTS = 32, 16, 6


def weight(layer: int, part: int, expert: int, *shape: int) -> torch.Tensor:
    numbers = known_bytes(layer, part, expert, 2 * int(np.prod(shape)), 0)
    return torch.from_numpy(numbers.copy()).view(torch.bfloat16).reshape(shape)


def checkpoint(folder, style: str) -> None:
    """Write layers 1 to 3 (layer 0 is dense) as three models of the field name them."""
    parent, names = {
        "qwen": ("mlp", ("gate_proj", "up_proj", "down_proj")),
        "deepseek": ("mlp", ("gate_proj", "up_proj", "down_proj")),
        "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
        "fused": ("mlp", ("gate_up_proj", "down_proj")),
    }[style]
    tensors = {"model.layers.0.mlp.gate_proj.weight": torch.zeros(4, 4)}
    for layer in (1, 2, 3):
        prefix = f"model.layers.{layer}.{parent}.experts"
        if style == "fused":
            both = [(weight(layer, 0, e, INTER, HIDDEN), weight(layer, 1, e, INTER, HIDDEN)) for e in range(EXPERTS)]
            tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in both])
            tensors[f"{prefix}.down_proj"] = torch.stack([weight(layer, 2, e, HIDDEN, INTER) for e in range(EXPERTS)])
            continue
        if style == "deepseek":
            tensors[f"model.layers.{layer}.mlp.shared_experts.gate_proj.weight"] = torch.zeros(4, 4)
        for expert in range(EXPERTS):
            for part, name in enumerate(names):
                shape = (HIDDEN, INTER) if part == 2 else (INTER, HIDDEN)
                tensors[f"{prefix}.{expert}.{name}.weight"] = weight(layer, part, expert, *shape)
    half = sorted(tensors)[: len(tensors) // 2]
    save_file({name: tensors[name] for name in half}, folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in tensors if name not in half}, folder / "model-2.safetensors")
    files = {name: f"model-{1 if name in half else 2}.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("style", ["qwen", "deepseek", "mixtral", "fused"])
def test_experts_of_a_checkpoint_are_found_by_the_usual_names(tmp_path, style: str) -> None:
    checkpoint(tmp_path, style)
    source = CheckpointSource(tmp_path, layers=[3, 2])
    assert source.holds(0, 0)
    assert source.holds(1, EXPERTS - 1)
    assert not source.holds(2, 0)
    assert not source.holds(0, EXPERTS)
    out = np.empty(2 * INTER * HIDDEN * 2, np.uint8)
    source.read(0, 0, 4, out)
    gate, up = (weight(3, part, 4, INTER, HIDDEN).view(torch.uint8).numpy().ravel() for part in (0, 1))
    assert (out == np.concatenate([gate, up])).all()
    down = np.empty(INTER * HIDDEN * 2, np.uint8)
    source.read(1, 1, 5, down)
    assert (down == weight(2, 2, 5, HIDDEN, INTER).view(torch.uint8).numpy().ravel()).all()
    assert source.nbytes_read == out.size + down.size
    with pytest.raises(ValueError, match="where 8 are registered"):
        source.read(0, 0, 0, np.empty(8, np.uint8))


def test_a_checkpoint_that_does_not_hold_what_is_asked_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="EPLB-C016"):
        CheckpointSource(tmp_path)
    checkpoint(tmp_path, "qwen")
    with pytest.raises(ConfigError, match="layer 0 has no experts in it"):
        CheckpointSource(tmp_path, layers=[0])
    with pytest.raises(ConfigError, match="no 'w13_scale'"):
        CheckpointSource(tmp_path, tensors=["w13_weight", "w13_scale"])
    assert CheckpointSource(tmp_path, tensors=["w2_weight", "w13_weight"]).tensor_names == ("w13_weight", "w2_weight")


def test_copies_in_host_memory_are_a_source() -> None:
    source = HostMemorySource({(0, 3): [torch.arange(4, dtype=torch.int16), torch.ones(2)]})
    assert source.holds(0, 3)
    assert not source.holds(1, 3)
    out = np.empty(8, np.uint8)
    source.read(0, 0, 3, out)
    assert out.view(np.int16).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="8 bytes where 4"):
        source.read(0, 0, 3, np.empty(4, np.uint8))
    with pytest.raises(ConfigError, match="not contiguous"):
        HostMemorySource({(0, 0): [torch.zeros(4, 4).t()]})


def test_what_is_no_source_is_refused() -> None:
    control = object()
    with pytest.raises(ConfigError):
        eplb.Communicator(case_config("torch_gloo"), [], control, sources=[control])
