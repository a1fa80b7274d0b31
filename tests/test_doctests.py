"""Every example in a docstring of the core runs and gives what it shows."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

import eplb_core

PACKAGE = Path(eplb_core.__file__).parent
OPTIONAL = {"matplotlib", "prometheus_client", "pytest", "rich", "safetensors", "scipy", "typer", "yaml"}
"""Modules of the extras; without one of them its examples are skipped, which the run shows."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def has_examples(path: Path) -> bool:
    nodes = (
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.Module))
    )
    return any(re.search(r"^\s*>>> ", ast.get_docstring(node) or "", re.MULTILINE) for node in nodes)


MODULES = [module_name(path) for path in sorted(PACKAGE.rglob("*.py")) if has_examples(path)]


def imported(name: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in OPTIONAL:
            pytest.skip(f"{name} needs {error.name}")
        raise


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    module = imported(name)
    examples = [example for example in doctest.DocTestFinder().find(module) if example.examples]
    for example in examples:
        said: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
        assert result.attempted > 0
        assert not result.failed, "".join(said)
    assert examples


def test_a_wrong_example_is_found():
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner().run(example, out=lambda text: None).failed == 1


def test_the_core_has_examples_at_all():
    assert {"eplb_core.backend.hookspecs", "eplb_core.observers.stats"} <= set(MODULES)
