"""A serving rank around the real ``EplbState``: a model of known bytes, a skewed load, a check after every step."""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class Layer(torch.nn.Module):
    """An MoE layer as ``MixtureOfExperts`` sees it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        from vllm.distributed.eplb.eplb_state import EplbLayerState

        super().__init__()
        self.tensors = tensors
        for name, tensor in zip(("w13_weight", "w2_weight", "w13_scale"), tensors, strict=True):
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.eplb_state = EplbLayerState()

    def get_expert_weights(self) -> list[torch.Tensor]:
        return self.tensors

    def set_eplb_state(self, **state: Any) -> None:
        self.eplb_state.set_layer_state(**state)


def model_class() -> type:
    from vllm.model_executor.models.interfaces import MixtureOfExperts

    class KnownModel(MixtureOfExperts):
        """Every row's bytes follow from layer, tensor and logical expert."""

        def __init__(self, rank, world, *, layers, logical, redundant, row_nbytes, salt=0):
            self.salt, self.row_nbytes, self.rank = salt, row_nbytes, rank
            self.num_moe_layers, self.num_expert_groups, self.num_shared_experts = layers, 1, 0
            self.num_logical_experts = self.num_routed_experts = logical
            self.update_physical_experts_metadata(logical + redundant, (logical + redundant) // world)
            local = self.num_local_physical_experts
            self.moe_layers = [
                Layer([torch.zeros(local, nbytes, dtype=torch.uint8) for nbytes in row_nbytes]) for _ in range(layers)
            ]
            self.expert_weights = []

        def update_physical_experts_metadata(self, num_physical_experts, num_local_physical_experts):
            self.num_physical_experts = num_physical_experts
            self.num_local_physical_experts = num_local_physical_experts
            self.num_redundant_experts = num_physical_experts - self.num_logical_experts

        def row(self, layer, tensor, expert):
            """Return the bytes of an expert: its numbers, then a ramp that depends on them."""
            nbytes = self.row_nbytes[tensor]
            seed = (expert * 131 + layer * 31 + tensor * 7 + self.salt * 17 + 1) % 251
            row = torch.full((nbytes,), seed, dtype=torch.uint8)
            row[0], row[-1] = expert % 256, (expert + layer + tensor + self.salt) % 256
            return row

        def fill(self, mapping):
            """Write every local row as a map says; -1 leaves zeros."""
            local = self.num_local_physical_experts
            for layer, moe in enumerate(self.moe_layers):
                for slot in range(local):
                    expert = int(mapping[layer, self.rank * local + slot])
                    for tensor, weight in enumerate(moe.tensors):
                        weight[slot] = self.row(layer, tensor, expert) if expert >= 0 else 0

        def wrong_rows(self, mapping):
            """Count local rows that are not what a map says."""
            local, wrong = self.num_local_physical_experts, 0
            for layer, moe in enumerate(self.moe_layers):
                for slot in range(local):
                    expert = int(mapping[layer, self.rank * local + slot])
                    if expert >= 0:
                        wrong += sum(
                            not torch.equal(weight[slot], self.row(layer, tensor, expert))
                            for tensor, weight in enumerate(moe.tensors)
                        )
            return wrong

    return KnownModel


def configuration(core: dict | None, *, use_async: bool, communicator: str = "torch_gloo", step_interval: int = 12):
    """Make a VllmConfig with EPLB on, and with the key where `core` is not None."""
    from vllm.config import VllmConfig
    from vllm.config.parallel import EPLBConfig

    config = VllmConfig()
    config.parallel_config.enable_eplb = True
    config.parallel_config.eplb_config = EPLBConfig(
        window_size=6, step_interval=step_interval, communicator=communicator, use_async=use_async
    )
    if core is not None:
        config.additional_config = {"eplb_core": {"timeout_s": 20.0, **core}}
    return config


@contextmanager
def groups(rank, world, port, config, stages=1):
    """Make vLLM's groups as its engine does, `stages` of them in the pipeline; its configuration is current inside."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    config.parallel_config.tensor_parallel_size = world // stages
    config.parallel_config.pipeline_parallel_size = stages
    with set_current_vllm_config(config):
        init_distributed_environment(backend="gloo")
        ensure_model_parallel_initialized(world // stages, stages)
        yield


class Engine:
    """One rank's models under one ``EplbState``."""

    def __init__(self, config, rank, world, models=1, **shape):
        from vllm.distributed.eplb.eplb_state import EplbState

        shape = {"layers": 3, "logical": 12, "redundant": 4, "row_nbytes": (4096, 96, 1), **shape}
        self.config, self.rank, self.world = config, rank, world
        self.state = EplbState(config.parallel_config, torch.device("cpu"))
        self.state.device_index = 0
        self.models = []
        self.generator = torch.Generator().manual_seed(7)
        self.steps = self.wrong = 0
        self.maps: list[Any] = []
        cls = model_class()
        for number in range(models):
            self.add(cls(rank, world, salt=number, **shape), f"model {number}")

    def add(self, model, name):
        self.name(model, name)
        local = list(range(model.num_logical_experts))
        local += [i % model.num_logical_experts for i in range(model.num_redundant_experts)]
        model.fill(torch.tensor([local] * model.num_moe_layers))
        for number, layer in enumerate(model.moe_layers):
            self.config.compilation_config.static_forward_context[f"{name}.{number}"] = layer
        self.state.add_model(model, model.config, name)
        self.models.append(model)

    @staticmethod
    def name(model, name):
        model.config = SimpleNamespace(compute_hash=lambda: name, model=name)

    def model_state(self, number=0):
        return self.state.model_states[self.models[number].config.compute_hash()]

    def communicator(self, number=0):
        return self.model_state(number).communicator

    def mapping(self, number=0):
        return self.model_state(number).physical_to_logical_map

    def start(self):
        self.state.start_async_loop()

    def step(self, is_dummy=False):
        """One forward step: a load that drifts, vLLM's step, and a look at every row of every model."""
        for number, _ in enumerate(self.models):
            state = self.model_state(number)
            hot = (self.steps // 10 + number) % state.model.num_logical_experts
            load = torch.randint(1, 5, state.expert_load_pass.shape, generator=self.generator, dtype=torch.int32)
            load[state.physical_to_logical_map == hot] += 60
            load[state.physical_to_logical_map == (hot + 3) % state.model.num_logical_experts] += 25
            state.expert_load_pass.copy_(load)
        self.state.step(is_dummy=is_dummy)
        self.steps += 1
        self.check()

    def check(self):
        for number, model in enumerate(self.models):
            self.wrong += model.wrong_rows(self.mapping(number))
            self.maps.append(self.mapping(number).tolist())

    def changed(self):
        """How many steps changed a map."""
        per_model = len(self.models)
        return sum(self.maps[i] != self.maps[i - per_model] for i in range(per_model, len(self.maps)))

    def worker_lives(self):
        return self.state.async_worker is None or self.state.async_worker.is_alive()
