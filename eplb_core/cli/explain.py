"""``eplb explain``: what an error code means, when it happens, what usually causes it and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Annotated

import typer
from rich.console import Console

from eplb_core.cli.console import stderr, stdout, write, write_points
from eplb_core.errors import error_class
from eplb_core.errors.codes import CATALOGUE

_LEAST_SHARED_NCHARS = 8
_SIMILAR = 0.8
_MOST_GUESSES = 4


def explain(
    code: Annotated[
        str | None,
        typer.Argument(help="A code such as EPLB-T003 or t3, or a whole message; without one all codes are listed."),
    ] = None,
) -> None:
    """Explain an error code: meaning, when it happens, common situations, solutions."""
    if code is None:
        _list(stdout(), CATALOGUE)
        write(stdout(), "'eplb explain CODE' says what one means and what to do.")
        return
    known = find_code(code) or find_text(code)
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


def find_text(message: str) -> str | None:
    """Return the code whose text occurs in a message, whatever its fields are; None if there is none.

    Parameters
    ----------
    message : str
        Message as it was logged; it may be wrapped, have words around it, or be cut short.

    Returns
    -------
    str or None
        A key of the catalogue: the code whose text, from its first word, has the most words in common with the message.
    """
    words = " ".join(message.split()).casefold()
    best = max(CATALOGUE, key=lambda code: _shared_nchars(code, words))  # of equals the first
    return best if _shared_nchars(best, words) >= _LEAST_SHARED_NCHARS else None


def close_codes(asked: str) -> list[str]:
    """Return similar codes, the most similar first; for a single letter, all codes of that letter."""
    text = asked.strip().upper().removeprefix("EPLB").lstrip("-_ ")
    family = [code for code in CATALOGUE if re.fullmatch(r"[A-Z]", text) and code.startswith(f"EPLB-{text}")]
    similar = {code: SequenceMatcher(None, f"EPLB-{text}", code).ratio() for code in CATALOGUE}
    close = [code for code, ratio in similar.items() if ratio >= _SIMILAR]
    return family or sorted(close, key=lambda code: -similar[code])[:_MOST_GUESSES]


def _shared_nchars(code: str, words: str) -> int:
    """Count the characters of a text's fixed parts that a message contains in order, from the first part on."""
    place = shared = 0
    for fixed in re.split(r"\{[^}]*\}", CATALOGUE[code].text.casefold()):
        part = fixed.strip(" .,:()")
        found = words.find(part, place)
        if found < 0:
            break
        place = found + len(part)
        shared += len(part)
    return shared


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
    """Return the text of a code with readable fields: ``{rank!r}`` as ``<rank>``, ``{0}`` as ``...``."""
    return re.sub(
        r"\{(\w+)[^}]*\}", lambda field: "..." if field[1].isdigit() else f"<{field[1]}>", CATALOGUE[code].text
    )
