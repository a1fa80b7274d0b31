"""Names of tensors, and counters that add up."""

from __future__ import annotations

import torch
from prometheus_client import CollectorRegistry, generate_latest

from eplb_core.observers import Stats
from eplb_vllm.metrics import Exporter
from eplb_vllm.names import tensor_names


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 3))
        self.w2_weight = torch.nn.Parameter(torch.zeros(2, 3))


def test_tensors_are_named_after_the_parameters_whose_memory_they_are():
    layers = [Layer(), Layer()]
    # vLLM hands out views: flattened, transposed, as bytes.
    weights = [[layer.w13_weight.data.view(2, -1), layer.w2_weight.data.view(torch.uint8)] for layer in layers]
    assert tensor_names(weights, layers) == [["w13_weight", "w2_weight"]] * 2


def test_what_no_layer_knows_is_named_after_its_place_and_no_name_comes_twice():
    layer = Layer()
    weights = [[torch.zeros(2, 3), layer.w2_weight.data, layer.w2_weight.data.view(torch.uint8)]]
    assert tensor_names(weights, [layer]) == [["0", "w2_weight.1", "w2_weight.2"]]


def test_counters_take_what_was_counted_since_the_last_time():
    registry = CollectorRegistry()
    exporter, first, second = Exporter(registry), Stats(), Stats()
    first._counts.layers_committed = 3
    exporter.publish("vllm-0", first)
    exporter.publish("vllm-0", first)
    first._counts.layers_committed = 5
    first._counts.aborts["EPLB-T003"] = 1
    exporter.publish("vllm-0", first)
    exporter.forget(first)
    second._counts.layers_committed = 10  # the next communicator of that name, after an elastic switch
    exporter.publish("vllm-0", second)
    said = generate_latest(registry).decode()
    assert 'eplb_layers_committed_total{communicator="vllm-0"} 15.0' in said
    assert 'eplb_aborts_total{code="EPLB-T003",communicator="vllm-0"} 1.0' in said
