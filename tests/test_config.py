"""The configuration: fields, defaults and limits, and one typed error for everything else."""

from __future__ import annotations

import copy
import pickle

import pytest
from pydantic import BaseModel, ValidationError

from eplb_core import EPLBConfig, EplbError
from eplb_core.errors import ConfigError

DEFAULTS = {
    "window_size": 1000,
    "step_interval": 3000,
    "num_redundant_experts": 0,
    "log_balancedness": False,
    "log_balancedness_interval": 1,
    "use_async": True,
    "policy": "default",
    "communicator": None,
    "enable_migration_batching": False,
    "timeout_s": 60.0,
    "staging_layers": 2,
    "staging": None,
    "max_ops_per_batch": 32,
    "on_failure": "raise",
    "fallback": None,
    "elastic": False,
    "max_bandwidth_gbps": None,
}

# What vLLM documents for --eplb-config, every field of it.
VLLM_JSON = """{
    "window_size": 500, "step_interval": 1500, "num_redundant_experts": 32, "log_balancedness": true,
    "log_balancedness_interval": 100, "use_async": true, "policy": "default", "communicator": "nixl"
}"""

WAYS = {
    "constructor": lambda values: EPLBConfig(**values),
    "model_validate": EPLBConfig.model_validate,
    "model_copy": lambda values: EPLBConfig().model_copy(update=values),
}

REFUSED = [
    ("window_size", 0),
    ("window_size", True),
    ("window_size", "many"),
    ("window_size", 2.5),
    ("step_interval", 0),
    ("num_redundant_experts", -1),
    ("log_balancedness", "perhaps"),
    ("log_balancedness_interval", None),
    ("use_async", None),
    ("policy", ""),
    ("communicator", ""),
    ("communicator", 3),
    ("timeout_s", 0),
    ("timeout_s", -1.0),
    ("timeout_s", float("inf")),
    ("timeout_s", float("nan")),
    ("timeout_s", None),
    ("staging_layers", 0),
    ("staging_layers", 3),
    ("staging", ""),
    ("max_ops_per_batch", 0),
    ("on_failure", "ignore"),
    ("fallback", ""),
]


def test_the_defaults_are_the_documented_ones():
    assert EPLBConfig().model_dump() == DEFAULTS


def test_every_field_is_described():
    undescribed = [name for name, field in EPLBConfig.model_fields.items() if not (field.description or "").strip()]
    assert undescribed == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_value_out_of_range_is_refused_by_name_of_its_field(way, field, value):
    with pytest.raises(ConfigError) as caught:
        WAYS[way]({field: value})
    assert caught.value.code == "EPLB-C001"
    assert str(caught.value).startswith(f"Invalid EPLB configuration: {field} ")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("window_size", 1), ("staging_layers", 1), ("timeout_s", 0.001), ("max_ops_per_batch", 1), ("on_failure", "keep")],
)
def test_the_bounds_themselves_are_allowed(field, value):
    assert getattr(EPLBConfig(**{field: value}), field) == value


@pytest.mark.parametrize("way", WAYS)
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(way):
    with pytest.raises(ConfigError, match=r"unknown key 'windw_size' \(did you mean 'window_size'\?\)"):
        WAYS[way]({"windw_size": 3})


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        EPLBConfig(window_size=0, timeout_s=-1, on_failure="ignore")
    assert all(field in str(caught.value) for field in ("window_size", "timeout_s", "on_failure"))


@pytest.mark.parametrize("way", WAYS)
def test_async_with_another_policy_is_refused_word_for_word(way):
    with pytest.raises(ConfigError) as caught:
        WAYS[way]({"policy": "greedy"})
    assert caught.value.code == "EPLB-C002"
    assert str(caught.value).startswith("Async EPLB is only supported with the default policy. ")
    assert "'greedy'" in str(caught.value)
    assert WAYS[way]({"policy": "greedy", "use_async": False}).policy == "greedy"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("interval", [0, -5])
def test_a_log_interval_that_is_not_positive_is_refused_word_for_word(way, interval):
    with pytest.raises(ConfigError) as caught:
        WAYS[way]({"log_balancedness": True, "log_balancedness_interval": interval})
    assert caught.value.code == "EPLB-C003"
    assert str(caught.value).startswith("log_balancedness_interval must be greater than 0. ")
    assert WAYS[way]({"log_balancedness_interval": interval}).log_balancedness_interval == interval


def test_a_fallback_that_is_the_communicator_is_refused():
    with pytest.raises(ConfigError, match="fallback and communicator are both 'nixl'"):
        EPLBConfig(communicator="nixl", fallback="nixl")


def test_a_vllm_json_loads_as_it_is():
    cfg = EPLBConfig.model_validate_json(VLLM_JSON)
    assert cfg.model_dump() == DEFAULTS | {
        "window_size": 500,
        "step_interval": 1500,
        "num_redundant_experts": 32,
        "log_balancedness": True,
        "log_balancedness_interval": 100,
        "communicator": "nixl",
    }


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "EPLB-C001"),
        ("[]", "EPLB-C001"),
        ('{"window_size": 0}', "EPLB-C001"),
        ('{"timeout_s": Infinity}', "EPLB-C001"),
        ('{"timeout_s": true}', "EPLB-C001"),
        ('{"eplb": 1}', "EPLB-C001"),
        ('{"policy": "greedy"}', "EPLB-C002"),
        ('{"log_balancedness": true, "log_balancedness_interval": 0}', "EPLB-C003"),
    ],
)
def test_a_json_that_does_not_fit_is_a_typed_error(text, code):
    with pytest.raises(ConfigError) as caught:
        EPLBConfig.model_validate_json(text)
    assert caught.value.code == code


def test_strings_are_read_as_a_command_line_gives_them():
    cfg = EPLBConfig.model_validate_strings({"window_size": "5", "use_async": "false"})
    assert (cfg.window_size, cfg.use_async) == (5, False)
    with pytest.raises(ConfigError):
        EPLBConfig.model_validate_strings({"window_size": "five"})


@pytest.mark.parametrize("wrong", [5, None, ["window_size"], object()])
def test_what_is_no_mapping_is_a_typed_error(wrong):
    with pytest.raises(ConfigError, match="Invalid EPLB configuration"):
        EPLBConfig.model_validate(wrong)


def test_the_error_is_ours_and_a_value_error_and_never_pydantics_own():
    with pytest.raises(ValueError, match="window_size") as caught:
        EPLBConfig(window_size=0)
    assert isinstance(caught.value, EplbError)
    assert not isinstance(caught.value, ValidationError)
    assert isinstance(caught.value.__cause__, ValidationError)


def test_a_configuration_is_frozen():
    cfg = EPLBConfig()
    with pytest.raises(ConfigError, match="use model_copy"):
        cfg.window_size = 5
    with pytest.raises(ConfigError, match="use model_copy"):
        del cfg.window_size
    assert cfg == EPLBConfig()
    assert hash(cfg) == hash(EPLBConfig())


def test_a_copy_keeps_what_was_set_and_takes_what_is_changed():
    cfg = EPLBConfig(window_size=5).model_copy(update={"use_async": False})
    assert cfg == EPLBConfig(window_size=5, use_async=False)
    assert cfg.model_fields_set == {"window_size", "use_async"}


def test_a_configuration_travels_to_other_processes():
    cfg = EPLBConfig(window_size=5)
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert copy.deepcopy(cfg) == cfg
    assert EPLBConfig.model_validate_json(cfg.model_dump_json()) == cfg


def test_inside_a_hosts_own_model_the_error_is_that_models():
    class Host(BaseModel):
        eplb_config: EPLBConfig

    assert Host(eplb_config={"window_size": 5}).eplb_config.window_size == 5
    with pytest.raises(ValidationError, match="Async EPLB is only supported with the default policy"):
        Host(eplb_config={"policy": "greedy"})
