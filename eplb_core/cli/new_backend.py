"""``eplb new-backend``: writes a distribution of a backend that passes the conformance kit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eplb_core.cli.console import stdout, write


def new_backend(
    name: Annotated[str, typer.Argument(help="Name of the backend; the distribution is eplb-NAME.")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", show_default="eplb-NAME", help="A new or empty folder.")
    ] = None,
) -> None:
    """Write a new backend: a distribution that installs, works over a toy transport, and passes 'eplb verify'."""
    from eplb_core.testing.scaffold import new_backend as written_files

    written = written_files(name, folder)
    root = written[0].parent
    for path in written:
        write(stdout(), str(path))
    write(stdout(), "")
    write(stdout(), f"pip install -e '{root}[test]', then 'eplb verify {name}'. The transport is a toy: replace it.")
