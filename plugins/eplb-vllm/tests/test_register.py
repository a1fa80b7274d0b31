"""How the plugin gets into vLLM, and how it stays out: imports, the hook, the guard, the key."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import on_cpu  # noqa: E402

import eplb_vllm  # noqa: E402
from eplb_vllm import hook  # noqa: E402

with_vllm = pytest.mark.skipif(not on_cpu.is_there(), reason=on_cpu.SKIP)


def in_a_process(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "VLLM_TARGET_DEVICE": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


# --- without vLLM ----------------------------------------------------------------------------------------------------


def test_registering_imports_neither_torch_nor_vllm_nor_the_core():
    code = (
        "import sys, eplb_vllm; eplb_vllm.register(); eplb_vllm.register()\n"
        "print(sorted({'torch', 'numpy', 'vllm', 'eplb_core'} & set(sys.modules)), len([f for f in sys.meta_path"
        " if type(f).__name__ == 'PatchAfterImport']))"
    )
    assert in_a_process(code) == "[] 1"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that nobody has imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "eplb_hooked_module.py").write_text('"""Hooked."""\nVALUE = 41\n')
    yield "eplb_hooked_module"
    sys.modules.pop("eplb_hooked_module", None)


def test_the_hook_runs_once_after_its_module_was_executed(module, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    sys.meta_path.insert(0, hook.PatchAfterImport(module, lambda: seen.append(sys.modules[module].VALUE)))
    import importlib
    import inspect

    loaded = importlib.import_module(module)
    assert seen == [41]
    assert "VALUE = 41" in inspect.getsource(loaded)
    assert not [finder for finder in sys.meta_path if isinstance(finder, hook.PatchAfterImport)]


def test_a_module_that_is_missing_stays_missing(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    sys.meta_path.insert(0, hook.PatchAfterImport("eplb_no_such_module", pytest.fail))
    with pytest.raises(ModuleNotFoundError):
        import eplb_no_such_module  # noqa: F401


# --- with vLLM -------------------------------------------------------------------------------------------------------


@pytest.fixture
def patches():
    on_cpu.stand_in_for_an_accelerator()
    from eplb_vllm import patches

    patches.unpatch()
    yield patches
    patches.unpatch()


@with_vllm
def test_every_binding_of_every_function_is_replaced_once(patches):
    from importlib import import_module

    from eplb_vllm import known

    before = {name: getattr(import_module(modules[0]), name) for name, (_, modules) in known.PATCHED.items()}
    patches.patch()
    patches.patch()
    for name, (_, modules) in known.PATCHED.items():
        bound = {getattr(import_module(module), name) for module in modules}
        assert len(bound) == 1
        assert bound.pop()._eplb_vllm_original is before[name]
    holders = {name for name, module in sys.modules.items() if name.startswith("vllm.") for known_name in known.PATCHED
               if vars(module).get(known_name) is before[known_name]}  # fmt: skip
    assert not holders, "somebody still holds vLLM's own"


@with_vllm
@pytest.mark.parametrize("change", ["parameter", "missing", "replaced", "method", "field", "abstract"])
def test_a_vllm_that_has_changed_gets_one_warning_that_names_it_and_stays_as_it_is(
    patches, change, monkeypatch, caplog
):
    import dataclasses

    from vllm.distributed.eplb import async_worker, eplb_communicator, eplb_state, rebalance_execute

    def move_from_buffer(expert_weights, expert_weights_buffers, transfer_metadata, new_indices, ep_rank, stream):
        """As a later vLLM might have it."""

    if change == "parameter":
        monkeypatch.setattr(rebalance_execute, "move_from_buffer", move_from_buffer)
        monkeypatch.setattr(eplb_state, "move_from_buffer", move_from_buffer)
        named = "rebalance_execute.move_from_buffer takes"
    elif change == "missing":
        monkeypatch.delattr(async_worker, "run_rebalance_experts")
        named = "async_worker.run_rebalance_experts is missing"
    elif change == "replaced":
        monkeypatch.setattr(async_worker, "transfer_layer", move_from_buffer)
        named = "something else has replaced it"
    elif change == "method":
        monkeypatch.setattr(eplb_state.EplbState, "drain_async", lambda self, limit_s: None)
        named = "EplbState.drain_async takes (self, limit_s)"
    elif change == "field":
        monkeypatch.setattr(rebalance_execute, "AsyncEplbLayerResult", dataclasses.make_dataclass("R", ["layer_idx"]))
        named = "AsyncEplbLayerResult has no field consumed_event"
    else:
        monkeypatch.setattr(eplb_communicator.EplbCommunicator, "__abstractmethods__", frozenset({"execute"}))
        named = "EplbCommunicator asks for ['execute']"
    before = eplb_state._move_to_workspace
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING):
        patches.patch()
    (warning,) = [record.getMessage() for record in caplog.records if "eplb-vllm" in record.getMessage()]
    assert named in warning
    assert "has no effect" in warning
    assert eplb_state._move_to_workspace is before


@with_vllm
def test_a_core_that_cannot_be_imported_costs_a_warning_and_not_vllm(patches, monkeypatch, caplog):
    from vllm.distributed.eplb import eplb_state

    monkeypatch.delattr(eplb_vllm, "seam", raising=False)
    monkeypatch.setitem(sys.modules, "eplb_vllm.seam", None)  # as import leaves a module that is not to be had
    before = eplb_state._move_to_workspace
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING):
        patches.patch()
    assert [record for record in caplog.records if "cannot be loaded" in record.getMessage()]
    assert eplb_state._move_to_workspace is before


@with_vllm
def test_vllm_loads_the_plugin_through_its_entry_point_and_its_code_is_patched_when_it_comes():
    code = (
        "from importlib.metadata import entry_points\n"
        "print([e.value for e in entry_points(group='vllm.general_plugins') if e.name == 'eplb_core'])\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.distributed.eplb import eplb_state\n"
        "print(hasattr(eplb_state._move_to_workspace, '_eplb_vllm_original'))"
    )
    listed, patched = in_a_process(code).splitlines()[-2:]
    if listed == "[]":
        pytest.skip("eplb-vllm is on the path here, and not installed")
    assert (listed, patched) == ("['eplb_vllm:register']", "True")


@with_vllm
def test_a_vllm_that_was_imported_first_is_patched_at_once(patches):
    from vllm.distributed.eplb import eplb_state

    assert not hasattr(eplb_state._move_to_workspace, "_eplb_vllm_original")
    eplb_vllm.register()
    assert hasattr(eplb_state._move_to_workspace, "_eplb_vllm_original")


def test_the_version_is_that_of_the_core():
    import eplb_core

    assert eplb_vllm.__version__ == eplb_core.__version__
