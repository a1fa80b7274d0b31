"""The distributions: what their wheels and sdists hold and ask for, built by the real build backend."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import eplb_core

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = {"eplb_core": ROOT} | {
    project.parent.name.replace("-", "_"): project.parent for project in sorted(ROOT.glob("plugins/*/pyproject.toml"))
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build wheel and sdist of every distribution; {package: (wheel, sdist)}."""
    folder = tmp_path_factory.mktemp("dist")
    built = {}
    for package, project in PROJECTS.items():
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
        subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=120)
        (wheel,), (sdist,) = folder.glob(f"{package}-*.whl"), folder.glob(f"{package}-*.tar.gz")
        built[package] = wheel, sdist
    return built


def in_wheel(wheel, ending):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(ending))
        return archive.read(name).decode()


def requirements(wheel):
    return message_from_string(in_wheel(wheel, ".dist-info/METADATA")).get_all("Requires-Dist")


@pytest.mark.parametrize("package", PROJECTS)
def test_a_wheel_holds_its_package_typed_and_licensed_and_nothing_else(built, package):
    wheel, _ = built[package]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {package, f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= set(names)
    assert "Apache License" in in_wheel(wheel, ".dist-info/licenses/LICENSE")
    assert not [name for name in names if "test" in name and "eplb_core/testing" not in name]


@pytest.mark.parametrize("package", PROJECTS)
def test_an_sdist_holds_what_the_wheel_is_built_from_and_no_other_distribution(built, package):
    wheel, sdist = built[package]
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        sources = {name for name in archive.namelist() if name.startswith(f"{package}/")}
    prefix = "" if package == "eplb_core" else "src/"
    assert {f"{prefix}{source}" for source in sources} <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith("plugins/") or ".venv" in name or name.endswith(".pyc")]


def test_versions_move_in_lock_step(built):
    versions = {message_from_string(in_wheel(wheel, "/METADATA"))["Version"] for wheel, _ in built.values()}
    assert versions == {eplb_core.__version__}


def test_plugins_accept_the_core_of_their_own_minor_version_only(built):
    major, minor = (int(part) for part in eplb_core.__version__.split(".")[:2])
    for package, (wheel, _) in built.items():
        if package != "eplb_core":
            assert f"eplb-core<{major}.{minor + 1},>={major}.{minor}" in requirements(wheel)


def test_no_distribution_pins_a_dependency_and_the_core_asks_for_no_backend(built):
    for wheel, _ in built.values():
        assert not [needed for needed in requirements(wheel) if "==" in needed.split(";")[0]]
    core = {re.match(r"[\w-]+", needed)[0] for needed in requirements(built["eplb_core"][0]) if "extra" not in needed}
    assert core == {"numpy", "pluggy", "pydantic", "torch"}


def test_entry_points_are_where_the_core_and_the_shell_look(built):
    assert "eplb = eplb_core.cli:main" in in_wheel(built["eplb_core"][0], "/entry_points.txt")
    for package, (wheel, _) in built.items():
        if package != "eplb_core":
            section, _, entry = in_wheel(wheel, "/entry_points.txt").strip().partition("\n")
            adapts = package == "eplb_vllm"  # a plugin of its host's, not of the core's
            assert section == ("[vllm.general_plugins]" if adapts else "[eplb_core.plugins]")
            assert re.match(rf"{package}[.:]", entry.split(" = ")[1])
