"""The rooms of the core: who may import whom, in one direction, and how large a module may grow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import eplb_core

PACKAGE = Path(eplb_core.__file__).parent

ROOMS = (
    "_version",
    "arrays",
    "report",
    "errors",
    "backend",
    "hookspecs",
    "config",
    "sources",
    "weights",
    "control",
    "plan",
    "wire",
    "discovery",
    "voting",
    "memory",
    "rearrange",
    "communicator",
    "observers",
    "balancing",
    "launch",
    "testing",
    "bench",
    "cli",
)
"""In the order of docs/architecture.md: a room imports itself and those before it."""

MODULE_LINES = 300
"""One idea with one reason to change; the table of error codes is the exception."""
LONGER = {"errors/codes.py"}

ROOM_LINES = {
    "errors": 1200,
    "backend": 2100,
    "sources": 600,
    "weights": 750,
    "control": 1450,
    "plan": 1400,
    "wire": 1000,
    "discovery": 1200,
    "voting": 1500,
    "memory": 700,
    "rearrange": 4300,
    "observers": 1100,
    "balancing": 4700,
    "launch": 650,
    "testing": 3600,
    "bench": 1150,
    "cli": 2000,
}


def modules():
    """Every module of the package, as a dotted name without the package's own, and its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


FILES = dict(modules())
HOMES = dict(eplb_core._HOMES)


def imported(path: Path):
    """What a module imports of the package, ``TYPE_CHECKING`` and imports inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "eplb_core":
                    yield alias.name.partition(".")[2]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "eplb_core":
            module = node.module.partition(".")[2]
            for alias in node.names:
                inner = f"{module}.{alias.name}".lstrip(".")
                if inner in FILES:
                    yield inner
                elif module:
                    yield module
                else:
                    yield {"hookimpl": "hookspecs", "__version__": "_version"}.get(alias.name) or HOMES[alias.name]


ARROWS = {name: sorted(set(imported(path)) - {name, ""}) for name, path in FILES.items() if name}


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_every_module_is_in_a_room_and_every_room_is_there():
    assert {room_of(name) for name in FILES if name} == set(ROOMS)


def test_no_room_imports_one_that_comes_after_it():
    climbs = [
        f"{name} imports {other}"
        for name, others in ARROWS.items()
        for other in others
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(name))
    ]
    assert not climbs


def test_no_modules_import_each_other_in_a_circle():
    # Kahn's algorithm: what is left when modules without imports are taken away, again and again, is in a circle.
    left = {name: {other for other in others if other in ARROWS} for name, others in ARROWS.items()}
    while True:
        free = {name for name, others in left.items() if not others}
        if not free:
            break
        left = {name: others - free for name, others in left.items() if name not in free}
    assert not left


@pytest.mark.parametrize("name", sorted(name for name in FILES if name))
def test_a_module_is_one_idea_of_at_most_300_lines(name):
    path = FILES[name]
    lines = len(path.read_text().splitlines())
    assert lines <= MODULE_LINES or str(path.relative_to(PACKAGE)) in LONGER


@pytest.mark.parametrize("room", sorted(ROOM_LINES))
def test_a_room_keeps_to_its_budget(room):
    lines = sum(len(path.read_text().splitlines()) for name, path in FILES.items() if name and room_of(name) == room)
    assert lines <= ROOM_LINES[room]


def test_what_is_in_no_face_says_that_it_is_internal():
    faces = {"backend", "errors", "plan", "sources", "observers", "balancing", "testing"}
    rooms = {name for name, path in FILES.items() if path.name == "__init__.py" and name and "." not in name}
    silent = [
        name
        for name in rooms - faces
        if not re.search(r"\bInternal\b", ast.get_docstring(ast.parse(FILES[name].read_text())) or "")
    ]
    assert not silent
