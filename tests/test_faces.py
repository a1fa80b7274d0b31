"""The public face: names and signatures that other people's programs call, held against a snapshot.

A change is made on purpose: ``python tests/test_faces.py`` writes the snapshot anew, and CHANGELOG says what changed.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path

import pluggy
import pytest
from pydantic import BaseModel

SNAPSHOT = Path(__file__).parent / "data" / "faces"
FACES = (
    "",
    ".backend",
    ".backend.toolkit",
    ".hookspecs",
    ".errors",
    ".plan",
    ".sources",
    ".observers",
    ".balancing",
    ".testing",
)


def written(face: str) -> str:
    """Describe every public name of a face, one line each, members indented below their class."""
    module = import_module(f"eplb_core{face}")
    lines = []
    for name in sorted(module.__all__):
        lines += described(name, getattr(module, name))
    return "\n".join(lines) + "\n"


def described(name: str, value: object) -> list[str]:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        lines = [f"class {name}({bases}){signature(value)}"]
        fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
        for member, inner in sorted(public_members(value).items()):
            if member.startswith("_") or member in fields:
                continue
            if isinstance(inner, (classmethod, staticmethod)):
                lines.append(f"    {type(inner).__name__} {member}{signature(inner.__func__)}")
            elif inspect.isfunction(inner):
                lines.append(f"    {member}{signature(inner)}")
            elif isinstance(inner, property):
                lines.append(f"    property {member}")
        return lines
    if callable(value):
        return [f"{name}{signature(value)}"]
    return [f"{name}: {type(value).__name__}"]


def public_members(cls: type) -> dict[str, object]:
    """Return what a class defines, and what it inherits from modules of ours that are in no face themselves."""
    members: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base is cls or (base.__module__.startswith("eplb_core.") and not in_a_face(base)):
            members |= vars(base)
    return members


def in_a_face(cls: type) -> bool:
    return any(getattr(import_module(f"eplb_core{face}"), cls.__name__, None) is cls for face in FACES)


def signature(value: object) -> str:
    if inspect.isclass(value) and issubclass(value, BaseModel):
        return "(" + ", ".join(f"{name}={field.default!r}" for name, field in value.model_fields.items()) + ")"
    if getattr(value, "__module__", None) is None or isinstance(value, pluggy.HookimplMarker):
        return "(...)"  # pluggy's own, and none of ours
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(...)"
    # Where an object lies in memory, and how this Python spells an annotation that is no string, say nothing.
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"\b(typing|collections\.abc|eplb_core(\.\w+)*)\.", "", text))


@pytest.mark.parametrize("face", FACES)
def test_names_and_signatures_are_those_of_the_snapshot(face):
    kept = (SNAPSHOT / f"eplb_core{face}.txt").read_text()
    assert written(face) == kept, "changed on purpose? python tests/test_faces.py, and an entry in CHANGELOG"


if __name__ == "__main__":
    SNAPSHOT.mkdir(exist_ok=True)
    for each in FACES:
        (SNAPSHOT / f"eplb_core{each}.txt").write_text(written(each))
