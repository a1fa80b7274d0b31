"""A new backend's distribution, written from the templates beside this module."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template

from eplb_core import __version__
from eplb_core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[_-][A-Za-z0-9]+)*")


def new_backend(name: str, folder: Path | None = None) -> tuple[Path, ...]:
    """Write a whole distribution of a backend that works, over a toy transport.

    Parameters
    ----------
    name : str
        Of the backend; the distribution is ``eplb-<name>``.
    folder : Path or None
        Where to; missing or empty. None is ``eplb-<name>`` in the working directory.

    Returns
    -------
    tuple of Path
        The files written, in order.

    Raises
    ------
    ConfigError
        EPLB-C013: the name cannot be a package's, or the folder holds something.
    """
    if not _NAME.fullmatch(name):
        problem = f"{name!r} is no name for a backend: letters and digits, joined by single '-' or '_'"
        raise ConfigError("EPLB-C013", problem=problem)
    words = re.split("[_-]", name)
    distribution, package = f"eplb-{'-'.join(words).lower()}", f"eplb_{'_'.join(words).lower()}"
    target = Path(distribution) if folder is None else folder
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("EPLB-C013", problem=f"{target} is there already and is no empty folder")
    major, minor = (int(part) for part in __version__.split(".")[:2])
    values = {
        "name": name,
        "distribution": distribution,
        "package": package,
        "class_name": "".join(word.capitalize() for word in words) + "Backend",
        "magic": f"{name[:8]:-<8}",
        "minor": f"{major}.{minor}",
        "next_minor": f"{major}.{minor + 1}",
    }
    places = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"src/{package}/__init__.py": "__init__.py",
        f"src/{package}/py.typed": "py.typed",
        f"src/{package}/hooks.py": "hooks.py",
        f"src/{package}/options.py": "options.py",
        f"src/{package}/backend.py": "backend.py",
        "tests/test_conformance.py": "test_conformance.py",
    }
    written = []
    for place, template in places.items():
        text = files(__name__).joinpath(f"{template}.template").read_text(encoding="utf-8")
        path = target / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(text).substitute(values), encoding="utf-8")
        written.append(path)
    return tuple(written)
