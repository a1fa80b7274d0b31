"""Output of the commands: at most 100 columns, without colour, markup or padding when it is piped."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 100
_NARROWEST = 40


def stdout() -> Console:
    """Return a console for results: as wide as the terminal, or COLUMNS, up to 100 columns; 100 when piped."""
    return _bounded(Console(markup=False, highlight=False, emoji=False))


def stderr() -> Console:
    """Return a console for error messages."""
    return _bounded(Console(stderr=True, markup=False, highlight=False, emoji=False))


def write(console: Console, text: str, *, indent: str = "", hanging: str | None = None, style: str = "") -> None:
    """Write a paragraph, wrapped at the console's width.

    Parameters
    ----------
    console : Console
        Console to write to.
    text : str
        One paragraph.
    indent, hanging : str
        Prefix of the first line and of the following ones; the same when `hanging` is None.
    style : str
        Rich style of the whole paragraph.
    """
    following = indent if hanging is None else hanging
    lines = textwrap.wrap(
        text, console.width, initial_indent=indent, subsequent_indent=following, break_on_hyphens=False
    )
    console.print(Text("\n".join(lines), style=style), soft_wrap=True)


def write_points(console: Console, points: Iterable[str]) -> None:
    """Write a list, a paragraph each."""
    for point in points:
        write(console, point, indent="  - ", hanging="    ")


def write_table(console: Console, table: Table) -> None:
    """Write a table without padding its last column."""
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        console.file.write(line.rstrip() + "\n")


@contextmanager
def nothing_else_on_stdout() -> Iterator[None]:
    """Redirect output of plugins and libraries, from Python or from C, to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _bounded(console: Console) -> Console:
    told = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    console.width = max(_NARROWEST, min(console.width, WIDTH)) if told else WIDTH
    return console
