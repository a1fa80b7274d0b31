"""``eplb new-backend``: a distribution under 100 lines of Python, well formed, never over somebody's files."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomllib
import torch
from typer.testing import CliRunner

import eplb_core
from eplb_core.backend import Cancelled
from eplb_core.backend.toolkit import Wait
from eplb_core.cli.app import app
from eplb_core.errors import ConfigError, MetadataError, TransferError
from eplb_core.testing import scaffold
from eplb_core.testing.scaffold import new_backend

EXAMPLE = Path(__file__).parents[1] / "examples" / "third_party_backend"


def test_the_command_says_what_it_wrote_and_what_comes_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["new-backend", "carrier-pigeon"])
    assert result.exit_code == 0, result.output
    for path in sorted((tmp_path / "eplb-carrier-pigeon").rglob("*.*")):
        assert str(path.relative_to(tmp_path)) in result.stdout
    assert "eplb verify carrier-pigeon" in " ".join(result.stdout.split())


def test_a_new_backend_is_under_120_lines_of_python(tmp_path):
    sources = [path for path in new_backend("mine", tmp_path / "mine") if path.suffix == ".py"]
    lines = [line for path in sources for line in path.read_text().splitlines() if line.strip()]
    assert {path.name for path in sources} == {
        "__init__.py",
        "hooks.py",
        "options.py",
        "backend.py",
        "metadata.py",
        "transfer.py",
        "test_conformance.py",
    }
    assert len(lines) < 120


@pytest.mark.parametrize("name", ["mine", "carrier-pigeon", "RDMA_2"])
def test_every_file_is_well_formed_and_named_after_the_backend(tmp_path, name):
    for path in new_backend(name, tmp_path / "out"):
        text = path.read_text()
        assert "$" not in text, path
        if path.suffix == ".py":
            ast.parse(text)
    project = tomllib.loads((tmp_path / "out" / "pyproject.toml").read_text())["project"]
    ((entry, module),) = project["entry-points"]["eplb_core.plugins"].items()
    assert entry == name
    assert (tmp_path / "out" / "src" / module.partition(".")[0] / "hooks.py").is_file()
    major, minor = (int(part) for part in eplb_core.__version__.split(".")[:2])
    assert project["dependencies"] == [f"eplb-core>={major}.{minor},<{major}.{minor + 1}"]


def test_it_passes_the_linter_that_this_project_uses(tmp_path):
    new_backend("mine", tmp_path / "mine")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,I,B,UP", "--line-length", "120"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is there already and is not an empty folder") as caught:
        new_backend("mine", tmp_path)
    assert caught.value.code == "EPLB-C013"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", ["", "9lives", "a b", "../up", "two--dashes", "x-"])
def test_a_name_that_no_package_can_have_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="is not a name for a new backend: it must start with a letter and go on"):
        new_backend(name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["core", "gloo", "NCCL", "cupy", "pynccl", "nixl", "vmread"])
def test_a_name_whose_distribution_is_the_projects_own_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(scaffold, "discover", eplb_core.discovery.catalog.Catalog)
    with pytest.raises(ConfigError, match=f"eplb-{name.lower()} is one of eplb-core's own distributions") as caught:
        new_backend(name, tmp_path / "out")
    assert caught.value.code == "EPLB-C013"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["torch_gloo", "Torch-Gloo", "torch-gloo"])
def test_a_name_that_an_installed_plugin_has_is_refused_and_its_distribution_named(tmp_path, name):
    with pytest.raises(ConfigError, match=r"eplb-gloo [\d.]+ \(in .*\) offers 'torch_gloo'"):
        new_backend(name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("plugins", ["", "torch_gloo"])
def test_a_plugin_that_eplb_plugins_leaves_out_keeps_its_name(tmp_path, monkeypatch, plugins):
    monkeypatch.setenv("EPLB_PLUGINS", plugins)
    with pytest.raises(ConfigError, match="offers 'torch_nccl'"):
        new_backend("torch-nccl", tmp_path / "out")


@pytest.mark.parametrize("place", ["/proc/x", "file/below", "file"])
def test_a_folder_that_cannot_be_written_is_a_typed_error(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=place) as caught:
        new_backend("mine", tmp_path / place)
    assert caught.value.code == "EPLB-C013"


def test_backends_whose_names_begin_alike_refuse_each_others_metadata(tmp_path):
    def magic(name: str) -> str:
        (metadata,) = (path for path in new_backend(name, tmp_path / name) if path.name == "metadata.py")
        return next(line for line in metadata.read_text().splitlines() if line.startswith("MAGIC"))

    assert magic("transporter") != magic("transporters")


def generated(folder: Path, monkeypatch, name: str = "mine"):
    """Import what was generated, and build it for rank 0 of two, whose work is called off."""
    new_backend(name, folder / name)
    monkeypatch.syspath_prepend(folder / name / "src")
    for module in [module for module in sys.modules if module.partition(".")[0] == f"eplb_{name}"]:
        monkeypatch.delitem(sys.modules, module)  # an earlier test's, from another folder
    module = importlib.import_module(f"eplb_{name}.backend")
    context = SimpleNamespace(rank=0, cancelled=lambda: Cancelled("rank 1 gave up"))
    return module.MineBackend(SimpleNamespace(pause_s=1e-4), context)


def test_a_layer_that_is_called_off_is_said_to_be_cancelled_and_why(tmp_path, monkeypatch):
    backend = generated(tmp_path, monkeypatch)
    backend.register_buffers(SimpleNamespace(rows=[[torch.zeros(2, 8, dtype=torch.uint8)]]))
    backend.files[1] = os.dup(backend.own)  # where nothing is ready
    wait = Wait(backend.context, 60, label="mine", where="layer 0, phase wait")
    with pytest.raises(
        TransferError, match=r"state=cancelled rank 1 gave up \(layer 0, phase wait for rank 1\)"
    ) as caught:
        backend.await_rows(SimpleNamespace(generation=1, layer=0, slot=0), 1, wait)
    assert caught.value.code == "EPLB-T001"
    assert backend.close()


def test_a_write_that_was_cut_short_is_no_success(tmp_path, monkeypatch):
    backend = generated(tmp_path, monkeypatch)
    monkeypatch.setattr(os, "pwrite", lambda file, data, where: len(data) - 1)
    with pytest.raises(TransferError, match="a write was cut short"):
        backend.register_buffers(SimpleNamespace(rows=[[torch.zeros(2, 8, dtype=torch.uint8)]]))
    assert backend.close()


def test_anothers_metadata_is_said_to_be_so(tmp_path, monkeypatch):
    peer = SimpleNamespace(rank=1, payload=b"something else")
    with pytest.raises(MetadataError, match="its metadata was not written by mine"):
        generated(tmp_path, monkeypatch).exchange_metadata(None, [peer])


def test_the_readme_explains_its_commands_in_one_column(tmp_path):
    for name in ("mine", "carrier-pigeon-over-long-distances"):
        readme = (new_backend(name, tmp_path / name)[1]).read_text()
        assert len({line.index("#") for line in readme.splitlines() if re.match(r"(eplb|pytest) .*#", line)}) == 1


def test_its_tests_do_not_run_with_the_settings_of_a_project_around_it(tmp_path):
    (tmp_path / "conftest.py").write_text("raise ImportError('what only that project has')")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--unknown-option'\n")
    new_backend("mine", tmp_path / "mine")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path / "mine", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/test_conformance.py" in done.stdout


def test_the_examples_tests_do_not_run_with_the_settings_of_the_repository():
    command = [sys.executable, "-m", "pytest", "--collect-only", "--strict-markers", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rootdir: {EXAMPLE}" in done.stdout


def test_the_templates_are_in_the_wheel(tmp_path):
    root = Path(eplb_core.__file__).parents[1]
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    templates = {path.name for path in (root / "eplb_core/testing/scaffold").glob("*.template")}
    assert templates
    assert {f"eplb_core/testing/scaffold/{name}" for name in templates} <= names
