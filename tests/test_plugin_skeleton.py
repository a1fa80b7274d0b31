"""One skeleton for every plugin: the project's own, the example's, and the one that `eplb new-backend` writes.

Host adapters are no plugins of the core: they are the host's, found through the host's entry points, and embed the core
as any host does. They have no hooks, and share what holds for every distribution.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eplb_core.testing.scaffold import new_backend

ROOT = Path(__file__).resolve().parents[1]
BACKEND_MODULES = {"__init__", "hooks", "options", "backend", "metadata", "transfer"}
"""hooks: what is declared; options: what may be set; backend: the four hooks; metadata: what peers are told and what of
theirs is believed; transfer: one layer on its way."""
MODULE_LINES = 300
HOST_ADAPTERS = {"eplb-vllm": ("vllm.general_plugins", "eplb_vllm:register")}
"""By distribution: the host's group of entry points, and what it calls there."""


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "eplb-written"
    new_backend("written", folder)
    return folder


PROJECTS = [
    *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml") if path.parent.name not in HOST_ADAPTERS),
    ROOT / "examples" / "third_party_backend",
    None,
]


@pytest.fixture(params=PROJECTS, ids=lambda path: path.name if path else "what new-backend writes")
def project(request, written):
    return request.param or written


class Plugin:
    """A plugin's source, read without importing it."""

    def __init__(self, project: Path) -> None:
        self.name = project.name
        self.settings = (project / "pyproject.toml").read_text()
        (self.package,) = (path.parent for path in project.glob("src/*/hooks.py"))
        self.files = {path.stem: path for path in sorted(self.package.glob("*.py"))}
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.files.items()}

    def imports(self, module: str) -> set[str]:
        """Modules of this package that one of them imports, by name."""
        found = set()
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.ImportFrom) and node.module == self.package.name:
                found |= {alias.name for alias in node.names} & set(self.files)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{self.package.name}."):
                found.add(node.module.split(".")[1])
        return found

    def declared(self, keyword: str) -> list[str]:
        """Import strings that the hook module gives under a keyword, such as ``target``."""
        return [
            node.value.value
            for node in ast.walk(self.trees["hooks"])
            if isinstance(node, ast.keyword) and node.arg == keyword and isinstance(node.value, ast.Constant)
        ]

    @property
    def offers_a_backend(self) -> bool:
        return any(
            isinstance(node, ast.FunctionDef) and node.name == "eplb_register_backends"
            for node in ast.walk(self.trees["hooks"])
        )


@pytest.fixture
def plugin(project):
    return Plugin(project)


def test_a_plugin_has_every_module_of_the_skeleton(plugin):
    needed = BACKEND_MODULES if plugin.offers_a_backend else {"__init__", "hooks"}
    assert needed <= set(plugin.files)
    assert (plugin.package / "py.typed").is_file()


def test_what_is_declared_is_where_the_skeleton_has_it(plugin):
    modules = {target.partition(":")[0] for target in plugin.declared("target")}
    if plugin.offers_a_backend:
        assert modules == {f"{plugin.package.name}.backend"}
        assert {text.partition(":")[0] for text in plugin.declared("options")} == {f"{plugin.package.name}.options"}
    else:
        # Allocators: a module each, beside the hooks.
        assert modules
        assert {module.removeprefix(f"{plugin.package.name}.") for module in modules} <= set(plugin.files)


def test_discovery_is_pointed_at_the_hooks(plugin):
    _, _, points = plugin.settings.partition('[project.entry-points."eplb_core.plugins"]\n')
    assert set(re.findall(r'^[\w-]+ = "(.*)"$', points.partition("\n[")[0], re.MULTILINE)) == {
        f"{plugin.package.name}.hooks"
    }


def test_a_plugin_comes_with_what_explains_and_tests_it(project):
    assert (project / "README.md").is_file()
    assert list((project / "tests").glob("test_*.py"))


def test_a_module_is_one_idea_of_at_most_300_lines_and_says_which(plugin):
    for name, path in plugin.files.items():
        assert ast.get_docstring(plugin.trees[name]), path
        lines = len(path.read_text().splitlines())
        assert lines <= MODULE_LINES, path


def test_the_hooks_of_an_instance_are_implemented_in_the_backend_module_alone(plugin):
    implementing = {
        name
        for name, tree in plugin.trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(item, ast.FunctionDef) and item.name == "exchange_metadata" for item in node.body)
    }
    assert implementing == ({"backend"} if plugin.offers_a_backend else set())


def test_nothing_of_a_plugin_imports_its_backend_and_its_hooks_import_no_library(plugin):
    assert not [name for name in plugin.files if "backend" in plugin.imports(name)]
    reached, left = set(), {"hooks"}
    while left:
        name = left.pop()
        reached.add(name)
        left |= plugin.imports(name) - reached
    assert not reached & {"backend", "options", "metadata", "transfer"}


def test_the_hooks_load_without_torch(plugin):
    code = (
        f"import sys, {plugin.package.name}.hooks\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'cupy', 'nccl', 'nixl'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(plugin.package.parent)!r})\n{code}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


# --- host adapters ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=HOST_ADAPTERS)
def adapter(request):
    return ROOT / "plugins" / request.param


def test_a_host_adapter_is_found_by_its_host_and_not_by_the_core(adapter):
    settings = (adapter / "pyproject.toml").read_text()
    group, function = HOST_ADAPTERS[adapter.name]
    _, _, points = settings.partition(f'[project.entry-points."{group}"]\n')
    assert re.findall(r'^[\w-]+ = "(.*)"$', points.partition("\n[")[0], re.MULTILINE) == [function]
    assert "eplb_core.plugins" not in settings


def test_a_host_adapter_comes_typed_explained_tested_and_in_modules_of_one_idea(adapter):
    assert (adapter / "README.md").is_file()
    assert list((adapter / "tests").glob("test_*.py"))
    (package,) = (path.parent for path in adapter.glob("src/*/__init__.py"))
    assert (package / "py.typed").is_file()
    for path in package.glob("*.py"):
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), path
        assert len(text.splitlines()) <= MODULE_LINES, path


def test_what_the_host_calls_loads_without_torch_and_without_the_host(adapter):
    _, function = HOST_ADAPTERS[adapter.name]
    module, name = function.split(":")
    code = (
        f"import sys; sys.path.insert(0, {str(adapter / 'src')!r}); import {module}; {module}.{name}()\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'vllm', 'eplb_core'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
