"""Checkpoints: experts are found under the names they have in the field, and their rows are read exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eplb_core.bench.tensors import allocate, fill, verify
from eplb_core.errors import BenchError
from eplb_core.sources.checkpoint_files import CheckpointExperts

HIDDEN, INTER, EXPERTS = 64, 48, 4


def drawn(shape, dtype=torch.bfloat16):
    """Any bit pattern, as bytes."""
    nbytes = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).reshape(shape)


def expert(prefix, names=("gate_proj", "up_proj", "down_proj"), dtype=torch.bfloat16, scales=False):
    gate, up, down = names
    shapes = {gate: (INTER, HIDDEN), up: (INTER, HIDDEN), down: (HIDDEN, INTER)}
    tensors = {f"{prefix}.{name}.weight": drawn(shape, dtype) for name, shape in shapes.items()}
    if scales:
        tensors |= {
            f"{prefix}.{name}.weight_scale_inv": drawn((shape[0] // 16, shape[1] // 16), torch.float32)
            for name, shape in shapes.items()
        }
    return tensors


def qwen_like(layers=(0, 1)):
    tensors = {
        "model.embed_tokens.weight": drawn((8, HIDDEN)),
        "model.layers.0.mlp.gate.weight": drawn((EXPERTS, HIDDEN)),
    }
    for layer in layers:
        for number in range(EXPERTS):
            tensors |= expert(f"model.layers.{layer}.mlp.experts.{number}")
    return tensors


def save_sharded(folder, tensors, num_shards=3):
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard::num_shards]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rows(experts, layer, name):
    """Every expert's row of a tensor, as bytes."""
    index = [spec.name for spec in experts.specs[layer]].index(name)
    found = np.empty((experts.num_experts, experts.specs[layer][index].nbytes), np.uint8)
    for number in range(experts.num_experts):
        experts.write(layer, index, number, found[number])
    return found


def bytes_of(*tensors):
    return np.concatenate([tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in tensors])


def test_gate_and_up_are_held_fused_as_engines_hold_them(tmp_path):
    tensors = qwen_like()
    save_sharded(tmp_path, tensors)
    experts = CheckpointExperts(tmp_path)
    assert [(spec.name, spec.shape, spec.dtype) for spec in experts.specs[1]] == [
        ("w13_weight", (2 * INTER, HIDDEN), "bfloat16"),
        ("w2_weight", (HIDDEN, INTER), "bfloat16"),
    ]
    w13, w2 = rows(experts, 1, "w13_weight"), rows(experts, 1, "w2_weight")
    for number in range(EXPERTS):
        prefix = f"model.layers.1.mlp.experts.{number}"
        gate_up = bytes_of(tensors[f"{prefix}.gate_proj.weight"], tensors[f"{prefix}.up_proj.weight"])
        assert np.array_equal(w13[number], gate_up)
        assert np.array_equal(w2[number], bytes_of(tensors[f"{prefix}.down_proj.weight"]))


def test_a_single_file_without_an_index_will_do(tmp_path):
    save_file(qwen_like(), tmp_path / "model.safetensors")
    experts = CheckpointExperts(tmp_path)
    assert (experts.num_experts, experts.layer_numbers) == (EXPERTS, (0, 1))


def test_mixtral_names_are_known(tmp_path):
    tensors = {}
    for number in range(EXPERTS):
        tensors |= expert(f"model.layers.5.block_sparse_moe.experts.{number}", ("w1", "w3", "w2"))
    save_file(tensors, tmp_path / "model.safetensors")
    experts = CheckpointExperts(tmp_path)
    assert experts.layer_numbers == (5,)
    prefix = "model.layers.5.block_sparse_moe.experts.2"
    w13 = bytes_of(tensors[f"{prefix}.w1.weight"], tensors[f"{prefix}.w3.weight"])
    assert np.array_equal(rows(experts, 0, "w13_weight")[2], w13)
    assert np.array_equal(rows(experts, 0, "w2_weight")[2], bytes_of(tensors[f"{prefix}.w2.weight"]))


def test_fp8_weights_come_with_their_block_scales_and_dense_layers_and_shared_experts_are_left_out(tmp_path):
    tensors = {"model.layers.0.mlp.gate_proj.weight": drawn((INTER, HIDDEN))}
    for layer in (1, 2):
        tensors |= expert(f"model.layers.{layer}.mlp.shared_experts")
        for number in range(EXPERTS):
            tensors |= expert(f"model.layers.{layer}.mlp.experts.{number}", dtype=torch.float8_e4m3fn, scales=True)
    save_sharded(tmp_path, tensors)
    experts = CheckpointExperts(tmp_path)
    assert experts.layer_numbers == (1, 2)
    assert {spec.name: (spec.shape, spec.dtype) for spec in experts.specs[0]} == {
        "w13_weight": ((2 * INTER, HIDDEN), "float8_e4m3fn"),
        "w2_weight": ((HIDDEN, INTER), "float8_e4m3fn"),
        "w13_weight_scale_inv": ((2 * INTER // 16, HIDDEN // 16), "float32"),
        "w2_weight_scale_inv": ((HIDDEN // 16, INTER // 16), "float32"),
    }
    prefix = "model.layers.2.mlp.experts.3"
    scales = bytes_of(tensors[f"{prefix}.gate_proj.weight_scale_inv"], tensors[f"{prefix}.up_proj.weight_scale_inv"])
    assert np.array_equal(rows(experts, 1, "w13_weight_scale_inv")[3], scales)


def test_scalars_and_packed_parts_are_held_as_they_are(tmp_path):
    tensors = {}
    for number in range(EXPERTS):
        prefix = f"model.layers.0.mlp.experts.{number}"
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{prefix}.{name}.qweight"] = drawn((8, 16), torch.int32)
            tensors[f"{prefix}.{name}.input_scale"] = drawn((), torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    experts = CheckpointExperts(tmp_path)
    names = {spec.name: spec.shape for spec in experts.specs[0]}
    assert names == {
        f"{w}_{part}": shape for w in ("w1", "w2", "w3") for part, shape in (("qweight", (8, 16)), ("input_scale", ()))
    }
    scale = tensors["model.layers.0.mlp.experts.1.up_proj.input_scale"]
    assert np.array_equal(rows(experts, 0, "w3_input_scale")[1], bytes_of(scale[None]))


def test_experts_stacked_in_one_tensor_are_read_row_by_row(tmp_path):
    stacked = {
        "model.language_model.layers.7.mlp.experts.gate_up_proj": drawn((EXPERTS, HIDDEN, 2 * INTER)),
        "model.language_model.layers.7.mlp.experts.down_proj": drawn((EXPERTS, INTER, HIDDEN)),
    }
    save_file(stacked, tmp_path / "model.safetensors")
    experts = CheckpointExperts(tmp_path)
    assert (experts.num_experts, experts.layer_numbers) == (EXPERTS, (7,))
    gate_up = stacked["model.language_model.layers.7.mlp.experts.gate_up_proj"]
    assert np.array_equal(rows(experts, 0, "w13")[3], bytes_of(gate_up[3]))


def test_a_rank_reads_the_rows_it_holds_and_no_others(tmp_path):
    save_sharded(tmp_path, qwen_like())
    experts = CheckpointExperts(tmp_path)
    assert experts.nbytes_read == 0
    held = np.array([[2], [0]])
    weights = allocate(experts.specs, 1)
    fill(experts, weights, held)
    assert experts.nbytes_read == 2 * 3 * HIDDEN * INTER * 2
    assert verify(experts, weights, held).wrong == ()
    weights[1][0].view(torch.uint8)[0, 5, 7] ^= 1
    (wrong,) = verify(experts, weights, held).wrong
    assert str(wrong) == f"layer 1 w13_weight row 0: not expert 0 from byte {5 * HIDDEN * 2 + 7} on"


def test_layers_come_in_the_models_order_and_as_many_as_asked_for(tmp_path):
    save_sharded(tmp_path, qwen_like(layers=(10, 2, 1)))
    assert CheckpointExperts(tmp_path).layer_numbers == (1, 2, 10)
    assert CheckpointExperts(tmp_path, num_layers=2).layer_numbers == (1, 2)
    nbytes_layer = EXPERTS * 3 * HIDDEN * INTER * 2
    assert CheckpointExperts(tmp_path, budget_nbytes=2 * nbytes_layer).layer_numbers == (1, 2)
    assert CheckpointExperts(tmp_path, budget_nbytes=1).layer_numbers == (1,)
    with pytest.raises(BenchError, match=r"4 layers asked for; .* has 3 with experts"):
        CheckpointExperts(tmp_path, num_layers=4)


@pytest.mark.parametrize(
    ("config", "top_k"),
    [
        ({"num_experts_per_tok": 2}, 2),
        ({"text_config": {"num_experts_per_tok": 3}}, 3),
        ({"num_experts_per_tok": 99}, EXPERTS),
        (None, EXPERTS),
    ],
)
def test_top_k_comes_from_the_config_where_it_makes_sense(tmp_path, config, top_k):
    save_file(qwen_like(), tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert CheckpointExperts(tmp_path).top_k == top_k


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(folder, **options):
    with pytest.raises(BenchError) as caught:
        CheckpointExperts(folder, **options)
    return caught.value.code, str(caught.value)


def test_a_missing_folder_and_an_empty_one_are_refused(tmp_path):
    assert refusal(tmp_path / "nowhere")[0] == "EPLB-B004"
    code, text = refusal(tmp_path)
    assert code == "EPLB-B004"
    assert "holds no *.safetensors files" in text


def test_a_dense_model_is_refused_with_the_names_that_were_looked_for(tmp_path):
    save_file({"model.layers.0.mlp.gate_proj.weight": drawn((4, 4))}, tmp_path / "model.safetensors")
    code, text = refusal(tmp_path)
    assert code == "EPLB-B003"
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in text


def test_a_missing_expert_is_named(tmp_path):
    tensors = qwen_like()
    del tensors["model.layers.1.mlp.experts.2.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    code, text = refusal(tmp_path)
    assert code == "EPLB-B003"
    assert "model.layers.1.mlp.experts.*.down_proj.weight: no expert 2" in text


def test_an_expert_of_another_shape_is_named(tmp_path):
    tensors = qwen_like()
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"] = drawn((INTER, HIDDEN // 2))
    save_file(tensors, tmp_path / "model.safetensors")
    code, text = refusal(tmp_path)
    assert code == "EPLB-B003"
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in text


def test_damaged_files_are_refused_by_name(tmp_path):
    save_file(qwen_like(), tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    code, text = refusal(tmp_path)
    assert code == "EPLB-B004"
    assert "model.safetensors" in text


def test_a_shard_that_the_index_names_and_nobody_downloaded_is_named(tmp_path):
    save_sharded(tmp_path, qwen_like())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    code, text = refusal(tmp_path)
    assert code == "EPLB-B004"
    assert "model-00002-of-00003.safetensors" in text


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}'])
def test_a_damaged_index_is_a_json_error(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert refusal(tmp_path)[0] == "EPLB-B005"
