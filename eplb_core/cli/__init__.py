"""The ``eplb`` command, for operators; needs the extra ``cli``. Internal: its face is what it prints."""

from __future__ import annotations

from importlib.util import find_spec


def main() -> None:
    """Run ``eplb``, or say in one line what to install for it."""
    missing = [module for module in ("typer", "rich") if find_spec(module) is None]
    if missing:
        raise SystemExit(f"eplb needs {' and '.join(missing)}: pip install 'eplb-core[cli]'")
    from eplb_core.cli.app import run

    run()
