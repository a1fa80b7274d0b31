"""A new backend's distribution, written from the templates beside this module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template

from eplb_core._version import __version__
from eplb_core.discovery.discover import discover
from eplb_core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[_-][A-Za-z0-9]+)*")
_OURS = {"core", "cupy", "gloo", "nccl", "nixl", "pynccl", "vmread"}
"""``eplb-<name>`` is a distribution of this project."""


def new_backend(name: str, folder: Path | None = None) -> tuple[Path, ...]:
    """Write a whole distribution of a backend that works, over a toy transport.

    Parameters
    ----------
    name : str
        Name of the backend; the distribution is ``eplb-<name>``.
    folder : Path or None
        Where to; missing or empty. None is ``eplb-<name>`` in the working directory.

    Returns
    -------
    tuple of Path
        The files written, in order.

    Raises
    ------
    ConfigError
        EPLB-C013: the name cannot be a package's or belongs to another distribution, the folder holds something, or it
        cannot be written.
    """
    words = re.split("[_-]", name)
    distribution, package = f"eplb-{'-'.join(words).lower()}", f"eplb_{'_'.join(words).lower()}"
    problem = _why_no_name(name)
    if problem is not None:
        raise ConfigError("EPLB-C013", problem=f"{name!r} is not a name for a new backend: {problem}")
    target = Path(distribution) if folder is None else folder
    major, minor = (int(part) for part in __version__.split(".")[:2])
    commands = {"find": "eplb backends", "verify": f"eplb verify {name}", "test": "pytest"}
    width = max(map(len, commands.values()))
    values = {
        "name": name,
        "distribution": distribution,
        "package": package,
        "class_name": "".join(word.capitalize() for word in words) + "Backend",
        "minor": f"{major}.{minor}",
        "next_minor": f"{major}.{minor + 1}",
        **{key: f"{command:{width}} " for key, command in commands.items()},
    }
    places = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"src/{package}/__init__.py": "__init__.py",
        f"src/{package}/py.typed": "py.typed",
        f"src/{package}/hooks.py": "hooks.py",
        f"src/{package}/options.py": "options.py",
        f"src/{package}/metadata.py": "metadata.py",
        f"src/{package}/transfer.py": "transfer.py",
        f"src/{package}/backend.py": "backend.py",
        "tests/test_conformance.py": "test_conformance.py",
    }
    texts = {
        target / place: Template(
            files(__name__).joinpath(f"{template}.template").read_text(encoding="utf-8")
        ).substitute(values)
        for place, template in places.items()
    }
    try:
        _write(target, texts)
    except OSError as error:
        problem = f"{error.filename or target}: {error.strerror or error}"
        raise ConfigError("EPLB-C013", problem=problem) from error
    return tuple(texts)


def _why_no_name(name: str) -> str | None:
    """Say why no new backend can have a name, or None."""
    if not _NAME.fullmatch(name):
        return "it must start with a letter and go on with letters and digits, joined by single '-' or '_'"
    for taken, owner in _taken_names():
        if _canonical(taken) == _canonical(name):
            unlike = "" if taken == name else "; names must differ in more than case, '-' and '_'"
            return f"{owner} offers {taken!r}{unlike}"
    if _canonical(name) in _OURS:
        return f"eplb-{_canonical(name)} is one of eplb-core's own distributions"
    return None


def _taken_names() -> Iterator[tuple[str, str]]:
    """Yield the backends and entry points that are installed, usable or not, each with its distribution."""
    catalog = discover()
    for failure in catalog.failures:
        if failure.distribution:
            yield failure.entry_point, f"{failure.distribution} {failure.version}"
    claims = [(name, origin) for (kind, name), origin in catalog.origins.items() if kind == "backend"]
    claims += [(name, each) for (kind, name), all_ in catalog.conflicts.items() if kind == "backend" for each in all_]
    for name, origin in claims:
        yield name, str(origin)
    for origin in (*catalog.origins.values(), *catalog.excluded):
        yield origin.entry_point, str(origin)


def _canonical(name: str) -> str:
    return name.replace("_", "-").lower()


def _write(target: Path, texts: dict[Path, str]) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("EPLB-C013", problem=f"{target} is there already and is not an empty folder")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
