"""What is moved: sizes are the published ones, contents can be told apart, impossible sizes are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eplb_core.balancing import balancedness, rebalance_experts
from eplb_core.bench.load import zipf_load
from eplb_core.bench.presets import PRESETS, fitting_scale, preset, scaled, tensor_specs
from eplb_core.bench.tensors import GeneratedExperts, allocate, byte_rows, fill, verify
from eplb_core.bench.workload import BUDGET_NBYTES, WorkloadOptions, build_workload, check_memory
from eplb_core.errors import BenchError
from eplb_core.sources.specs import TensorSpec

# Billions of parameters as published with the model: in total, and used by a token.
PUBLISHED = {
    "olmoe-1b-7b": (6.9, 1.3),
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "qwen3-next-80b-a3b": (80, 3),
    "glm-4.5": (355, 32),
    "deepseek-v3": (671, 37),
    "kimi-k2": (1040, 32),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_presets_experts_are_nearly_all_of_the_model(name):
    geometry = preset(name)
    total, active = PUBLISHED[name]
    weights = [spec for spec in tensor_specs(geometry) if spec.dtype == geometry.dtype]
    billions = geometry.num_moe_layers * sum(int(np.prod(spec.shape)) for spec in weights) / 1e9
    assert 0.9 * total < billions * geometry.num_experts < total
    assert 0.5 * active < billions * geometry.top_k < active


def test_every_preset_is_compared_with_what_was_published():
    assert set(PRESETS) == set(PUBLISHED)


def test_tensors_are_shaped_as_engines_hold_them():
    assert tensor_specs(preset("Qwen3-30B-A3B")) == (
        TensorSpec("w13_weight", (1536, 2048), "bfloat16"),
        TensorSpec("w2_weight", (2048, 768), "bfloat16"),
    )
    assert tensor_specs(preset("DeepSeek-V3")) == (
        TensorSpec("w13_weight", (4096, 7168), "float8_e4m3fn"),
        TensorSpec("w2_weight", (7168, 2048), "float8_e4m3fn"),
        TensorSpec("w13_weight_scale_inv", (32, 56), "float32"),
        TensorSpec("w2_weight_scale_inv", (56, 16), "float32"),
    )


def test_scaling_divides_both_widths_and_keeps_the_experts():
    small = scaled(preset("deepseek-v3"), 32)
    assert (small.hidden_size, small.moe_intermediate_size, small.num_experts) == (224, 64, 256)
    assert tensor_specs(small)[2].shape == (2, 2)  # a started block has a scale
    with pytest.raises(BenchError, match="scale 3 does not divide the hidden_size"):
        scaled(preset("deepseek-v3"), 3)


def test_the_scale_that_fits_is_the_smallest_power_of_two():
    geometry = preset("qwen3-30b-a3b")
    for budget in (10**7, 10**8, 10**9, 10**10, 10**12):
        scale = fitting_scale(geometry, 8, budget)
        assert 8 * scaled(geometry, scale).nbytes_per_layer <= budget
        assert scale == 1 or 8 * scaled(geometry, scale // 2).nbytes_per_layer > budget


def test_an_unknown_preset_is_met_with_a_guess():
    with pytest.raises(BenchError, match=r"did you mean qwen3-30b-a3b"):
        preset("qwen3-30b")


@pytest.mark.parametrize("name", PRESETS)
def test_by_default_every_preset_fits_the_budget(name):
    workload = build_workload(WorkloadOptions(preset=name), 4)
    logical = workload.nbytes * workload.source.num_experts // workload.num_physical_experts
    assert logical <= BUDGET_NBYTES
    assert workload.num_physical_experts % 4 == 0
    assert workload.num_redundant_experts >= 4


@pytest.mark.parametrize(("ranks", "redundant"), [(1, 1), (2, 2), (3, 4), (4, 4), (6, 10), (16, 24)])
def test_by_default_each_rank_has_a_redundant_expert_and_the_slots_spread_evenly(ranks, redundant):
    workload = build_workload(WorkloadOptions(preset="mixtral-8x7b", scale=64), ranks)
    assert workload.num_redundant_experts == redundant
    assert workload.num_local_physical_experts * ranks == 8 + redundant


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_redundant_experts": 3}, "--redundant 4 does"),
        ({"num_redundant_experts": -1}, "--redundant 0 does"),
        ({"num_layers": 33}, "33 layers asked for; mixtral-8x7b has 32 MoE layers"),
        ({"num_layers": 0}, "0 layers asked for"),
        ({"scale": 0}, "scale must be at least 1"),
        ({"checkpoint": "/nowhere", "scale": 2}, "--scale is for presets"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_what_would(options, text):
    with pytest.raises(BenchError, match=text) as caught:
        build_workload(WorkloadOptions(**{"preset": "mixtral-8x7b", **options}), 4)
    assert caught.value.code == "EPLB-B003"


def test_a_workload_larger_than_the_memory_is_refused_before_anything_starts():
    huge = build_workload(WorkloadOptions(preset="kimi-k2", num_layers=60, scale=1), 4)
    with pytest.raises(BenchError, match=r"10\d\d\.\d GB, .* available; use fewer --layers or a larger --scale"):
        check_memory(huge)
    check_memory(build_workload(WorkloadOptions(scale=64, num_layers=1), 2))


def test_the_initial_map_holds_every_expert_and_repeats_the_first():
    workload = build_workload(
        WorkloadOptions(preset="mixtral-8x7b", scale=64, num_layers=2, num_redundant_experts=4), 4
    )
    assert workload.initial_map().tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]] * 2


# --- load -------------------------------------------------------------------------------------------------------------


def test_the_load_is_skewed_differs_by_layer_and_sends_no_expert_more_tokens_than_there_are():
    load = zipf_load(6, 128, 8, seed=1, num_tokens=512)
    assert load.sum(axis=1).tolist() == [512 * 8] * 6
    assert load.max() <= 512
    assert (load.max(axis=1) > 5 * load.mean(axis=1)).all()
    assert len({int(hottest) for hottest in load.argmax(axis=1)}) > 1


def test_the_load_follows_from_seed_and_round_alone():
    assert np.array_equal(zipf_load(2, 16, 2, seed=3, round_number=1), zipf_load(2, 16, 2, seed=3, round_number=1))
    assert not np.array_equal(zipf_load(2, 16, 2, seed=3, round_number=1), zipf_load(2, 16, 2, seed=3, round_number=2))
    assert not np.array_equal(zipf_load(2, 16, 2, seed=3), zipf_load(2, 16, 2, seed=4))


def test_every_expert_is_chosen_when_there_are_no_more_than_top_k():
    assert zipf_load(1, 4, 4, seed=0, num_tokens=10).tolist() == [[10] * 4]


def test_the_default_policy_evens_this_load_out():
    workload = build_workload(WorkloadOptions(), 4)
    load = zipf_load(workload.num_layers, workload.source.num_experts, workload.top_k, seed=0)
    placed = rebalance_experts(load, workload.num_physical_experts, num_ranks=4)
    assert balancedness(load, workload.initial_map(), 4).mean() < 0.85
    assert balancedness(load, placed, 4).mean() > 0.98


# --- contents ---------------------------------------------------------------------------------------------------------

SPECS = [
    (TensorSpec("w", (3, 5), "bfloat16"), TensorSpec("scale", (), "float32"), TensorSpec("flags", (3,), "bool"))
] * 2


def test_generated_rows_are_reproducible_and_no_two_are_alike():
    source = GeneratedExperts([(TensorSpec("w", (16,), "float32"),)] * 3, 5, seed=7)
    found = set()
    for layer in range(3):
        for expert in range(5):
            row, again = np.empty(64, np.uint8), np.empty(64, np.uint8)
            source.write(layer, 0, expert, row)
            GeneratedExperts(source.specs, 5, seed=7).write(layer, 0, expert, again)
            assert np.array_equal(row, again)
            found.add(row.tobytes())
    assert len(found) == 15


def test_what_was_filled_verifies_and_every_flipped_bit_is_found():
    source = GeneratedExperts(SPECS, 4, seed=0)
    held = np.array([[2, -1, 0], [1, 1, 3]])
    weights = allocate(SPECS, 3)
    fill(source, weights, held)
    good = verify(source, weights, held)
    assert (good.num_rows, good.nbytes, good.wrong) == (15, 5 * (30 + 4 + 3), ())
    for layer, tensor, row, byte in [(0, 0, 0, 29), (0, 1, 2, 3), (1, 2, 1, 0)]:
        byte_rows(weights[layer][tensor])[row, byte] ^= 0x80
        (wrong,) = verify(source, weights, held).wrong
        assert (wrong.layer, wrong.tensor, wrong.row, wrong.offset) == (layer, SPECS[0][tensor].name, row, byte)
        assert wrong.expert == held[layer, row]
        byte_rows(weights[layer][tensor])[row, byte] ^= 0x80


def test_experts_that_changed_places_are_found():
    source = GeneratedExperts(SPECS, 4, seed=0)
    weights = allocate(SPECS, 2)
    fill(source, weights, np.array([[0, 1], [2, 3]]))
    wrong = verify(source, weights, np.array([[0, 1], [3, 2]])).wrong
    assert {(row.layer, row.row) for row in wrong} == {(1, 0), (1, 1)}


def test_an_empty_slot_is_neither_filled_nor_checked():
    source = GeneratedExperts(SPECS, 4, seed=0)
    weights = allocate(SPECS, 1)
    for layer in weights:
        for tensor in layer:
            tensor.view(torch.uint8).fill_(7)
    fill(source, weights, np.array([[-1], [-1]]))
    assert all(bool((tensor.view(torch.uint8) == 7).all()) for layer in weights for tensor in layer)
    assert verify(source, weights, np.array([[-1], [-1]])).num_rows == 0
