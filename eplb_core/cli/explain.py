"""``eplb explain``: what an error code means, when it happens, what lies behind it and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated

import typer
from rich.console import Console

from eplb_core.catalogue import CATALOGUE
from eplb_core.cli.console import stderr, stdout, write, write_points
from eplb_core.errors import error_class


def explain(
    code: Annotated[
        str | None,
        typer.Argument(help="A code such as EPLB-T003 or t3, or a whole message that holds one; none lists all."),
    ] = None,
) -> None:
    """Explain an error code: meaning, when it happens, common situations, solutions."""
    if code is None:
        _list(stdout(), CATALOGUE)
        write(stdout(), "'eplb explain CODE' says what one means and what to do.")
        return
    known = find_code(code)
    if known is not None:
        _explain(stdout(), known)
        return
    close = close_codes(code)
    write(stderr(), f"No error has the code {code!r}." + (" Close to it are:" if close else ""))
    _list(stderr(), close)
    write(stderr(), "'eplb explain' lists all codes.")
    raise typer.Exit(2)


def find_code(asked: str) -> str | None:
    """Return the code that a user means, or None.

    Parameters
    ----------
    asked : str
        Any of ``EPLB-T003``, ``t003``, ``T3``, or text that holds ``[EPLB-T003]``.

    Returns
    -------
    str or None
        A key of the catalogue.
    """
    text = asked.strip().upper()
    match = re.search(r"EPLB-([A-Z])(\d+)", text) or re.fullmatch(r"(?:EPLB)?[\W_]*([A-Z])[\W_]*(\d+)\W*", text)
    code = f"EPLB-{match[1]}{int(match[2]):03d}" if match else ""
    return code if code in CATALOGUE else None


def close_codes(asked: str) -> list[str]:
    """Return codes that look like what was asked for, the most similar first."""
    text = asked.strip().upper()
    return get_close_matches(text if text.startswith("EPLB") else f"EPLB-{text}", CATALOGUE, n=4, cutoff=0.8)


def _list(console: Console, codes: Iterable[str]) -> None:
    for code in codes:
        write(console, f"{code}  {_template(code)}", hanging=" " * 11)


def _explain(console: Console, code: str) -> None:
    entry = CATALOGUE[code]
    write(console, f"{code}  {error_class(code).__name__}", style="bold")
    write(console, _template(code), indent="  ")
    for title, text in (("Meaning", entry.meaning), ("When", entry.when)):
        console.print()
        write(console, title, style="bold")
        write(console, text, indent="  ")
    for title, points in (("Common situations", entry.situations), ("Solutions", entry.solutions)):
        console.print()
        write(console, title, style="bold")
        write_points(console, points)


def _template(code: str) -> str:
    """Return the text a message starts with, its fields readable: ``{rank!r}`` as ``<rank>``, ``{0}`` as ``...``."""
    return re.sub(
        r"\{(\w+)[^}]*\}", lambda field: "..." if field[1].isdigit() else f"<{field[1]}>", CATALOGUE[code].text
    )
