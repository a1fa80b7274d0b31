"""How a check of the kit fails: what it is about does not hold, or something else ended it before it could look."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

_FOREIGN_FRAMES = 3
_OWN = ("eplb_core", "pluggy", "contextlib")  # whose frames say nothing about a backend


PREFIX = "not reached: "


class Unmet(AssertionError):
    """What a test of the kit is about does not hold."""


class NotReached(AssertionError):
    """Something else failed before a test could look at what it is about; the text starts with `PREFIX`."""


class UnheardError(TimeoutError):
    """A rank did not hear another one's word: never a cause, always the consequence of what happened there."""


def expect(holds: bool, text: str) -> None:
    """Raise `Unmet` with `text` unless it holds; unlike an assert, under ``python -O`` too."""
    if not holds:
        raise Unmet(text)


def reach(holds: bool, text: str) -> None:
    """Raise `NotReached` with `text` unless that holds on which the check at hand builds."""
    if not holds:
        raise NotReached(f"{PREFIX}{text}")


@contextmanager
def expecting(text: str) -> Iterator[None]:
    """Expect that nothing is raised; `text` says what then does not hold."""
    try:
        yield
    except (Unmet, NotReached, UnheardError):
        raise
    except Exception as error:
        raise Unmet(f"{text}: {told(error)}") from error


def told(error: BaseException) -> str:
    """Return an exception's type and text, what caused it, and the lines of the backend in which it came up.

    Notes
    -----
    Frames of the core and of the kit are left out, and so is an error that only repeats its cause: the same fault then
    reads the same, whichever test meets it.
    """
    if error.__cause__ is not None:
        text = str(error.__cause__)
        text = text.rpartition(" [EPLB-")[0] or text
        if text and text in str(error):
            return told(error.__cause__)
    name = type(error).__name__
    lines = [f"{name}: {error}" if str(error) else name]
    frames = list(traceback.walk_tb(error.__traceback__))
    foreign = [pair for pair in frames if str(pair[0].f_globals.get("__name__", "")).partition(".")[0] not in _OWN]
    for frame, number in foreign[-_FOREIGN_FRAMES:]:
        code = frame.f_code
        place = "/".join(PurePath(code.co_filename).parts[-2:])
        source = linecache.getline(code.co_filename, number).strip()
        lines.append(f"  {place}:{number}, in {code.co_name}: {source}")
    if error.__cause__ is not None:
        lines.append(f"from {told(error.__cause__)}")
    return "\n".join(lines)
