"""vLLM's own tests of EPLB pass over its communicators and over ours: the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import on_cpu  # noqa: E402

if not on_cpu.is_there():
    pytest.skip(on_cpu.SKIP, allow_module_level=True)

import its_tests  # noqa: E402

RAW = "test_eplb_communicator_pipeline_parallel"
"""It posts sends and receives itself, below the seam."""
WHERE = {
    "its torch_gloo": (None, "torch_gloo"),
    "its nixl": (None, "nixl"),
    "torch_gloo": ({"communicator": "torch_gloo"}, "torch_gloo"),
    "nixl": ({"communicator": "nixl"}, "torch_gloo"),
    "vmread": ({"communicator": "vmread"}, "torch_gloo"),
}
"""The key, and the name of the communicator in the tests' own parameters."""
PASS = {
    "test_rearrange_expert_weights_with_redundancy": 6,
    "test_async_transfer_layer_without_mtp": 1,
    "test_rearrange_expert_weights_no_change": 2,
    "test_rearrange_expert_weights_profile_mode": 2,
    "test_eplb_fml": 2,
}
"""How many must pass."""


@pytest.fixture(scope="module")
def texts():
    try:
        sdist = its_tests.fetch()
    except its_tests.CannotFetchError as error:
        pytest.skip(f"vLLM's sdist, which holds its tests, cannot be fetched: {error}")
    on_cpu.stand_in_for_an_accelerator()
    return its_tests.texts_of(sdist)


@pytest.mark.parametrize("where", WHERE)
def test_its_own_tests_pass_unchanged_but_for_device_and_port(where, texts, tmp_path):
    core, named = WHERE[where]
    others = {"torch_gloo", "nixl"} - {named}
    its_tests.write(texts, tmp_path, on_cpu.free_port(), core)
    words = f"not {' and not '.join(sorted(others))}" + (f" and not {RAW}" if core else "")
    outcomes, said = its_tests.run(tmp_path, words, limit_s=170)
    assert not [name for name, outcome in outcomes if outcome == "failed"], said
    passed = {name: count for (name, outcome), count in outcomes.items() if outcome == "passed" and name in PASS}
    assert passed == PASS, said
