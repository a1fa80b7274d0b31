"""What may stand under ``additional_config["eplb_core"]``, and what is refused when the model is loaded."""

from __future__ import annotations

import dataclasses

import pytest

from eplb_core.errors import ConfigError
from eplb_vllm.settings import read_settings


@dataclasses.dataclass
class ItsConfig:
    """The fields of vLLM's EPLBConfig."""

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    use_async: bool = True
    policy: str = "default"
    communicator: str | None = "torch_gloo"
    enable_migration_batching: bool = False


def read(given, **its):
    return read_settings({"eplb_core": given}, ItsConfig(**its), "torch_gloo")


@pytest.mark.parametrize("additional_config", [{}, {"other": {}}, {"eplb_core": None}, object()])
def test_without_the_key_there_are_no_settings(additional_config):
    assert read_settings(additional_config, ItsConfig(), "torch_gloo") is None


def test_an_empty_key_takes_everything_from_vllm_and_keeps_serving_after_a_failure():
    settings = read({}, step_interval=77)
    assert (settings.config.communicator, settings.config.step_interval) == ("torch_gloo", 77)
    assert settings.config.on_failure == "keep"
    assert (settings.landing, settings.host, settings.options) == ("vllm", None, None)


def test_the_key_names_what_vllm_cannot():
    given = {"communicator": "vmread", "timeout_s": "30", "staging_layers": 2, "options": {"a": 1}, "landing": "own"}
    settings = read({**given, "host": "10.0.0.7", "on_failure": "raise"})
    assert (settings.config.communicator, settings.config.timeout_s) == ("vmread", 30.0)
    assert (settings.landing, settings.host, settings.options) == ("own", "10.0.0.7", {"a": 1})
    assert settings.slots_chosen


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"comunicator": "nixl"}, "did you mean 'communicator'"),
        ({"step_interval": 5}, "belongs into --eplb-config"),
        ({"max_bandwidth_gbps": 5}, "has no effect with vLLM"),
        ({"landing": "theirs"}, "landing should be"),
        ({"host": 7}, "host should be"),
        ({"options": "threads=2"}, "options should be"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"staging_layers": 3}, "staging_layers"),
        ({"on_failure": "retry"}, "on_failure"),
        ("nixl", "should be an object"),
        (True, "should be an object"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given, said):
    with pytest.raises(ConfigError, match="EPLB-C00") as refused:
        read(given)
    assert said in str(refused.value)
