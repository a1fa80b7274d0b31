"""Docstrings say something: no parameter is described by words that only point elsewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for pattern in ("eplb_core/**/*.py", "plugins/*/src/**/*.py") for path in ROOT.glob(pattern))

ENTRY = re.compile(r"^( *)([*\w][\w*, ]* : .*)\n((?:\1    .*\n?)+)", re.MULTILINE)
"""A parameter or attribute of numpydoc, and its indented description."""

EMPTY = re.compile(
    r"""
      Of\s.*                       # Of the communicator.
    | On\s(it|this\srank)\.
    | See\sthere\.
    | (Which|Whose|Who)\b[^?]*     # Whose step it is.
    | (How\smany|Where\sto|From\swhom|For\swhom)\.
    | (The\shost's|This\srank's|Its\s\w+)\.
    | [A-Z]\w*\.                   # Communicator.
    """,
    re.VERBOSE | re.DOTALL,
)


def entries(path):
    """Every (line of the name, description) of a parameter or attribute in the docstrings of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for _, name, description in ENTRY.findall(ast.get_docstring(node) or ""):
                yield f"{node.name}: {name}", " ".join(description.split())


def test_the_sources_are_found():
    assert len(SOURCES) > 150
    assert sum(1 for path in SOURCES for _ in entries(path)) > 500


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_parameter_is_described(path):
    assert [entry for entry in entries(path) if EMPTY.fullmatch(entry[1])] == []


@pytest.mark.parametrize(
    "words",
    ["Of the communicator.", "See there.", "Which.", "Whose step it is.", "The host's.", "Its name.", "Communicator."],
)
def test_words_that_say_nothing_are_recognized(words):
    assert EMPTY.fullmatch(words)


@pytest.mark.parametrize("words", ["Name of the communicator.", "Which tensors may be read?", "Limit of the wait."])
def test_words_that_say_something_are_let_through(words):
    assert not EMPTY.fullmatch(words)
