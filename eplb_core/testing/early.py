"""Finds backends that read ``context.epoch`` or ``context.store`` before the members have met."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any
from unittest.mock import patch

from eplb_core.backend import BackendContext
from eplb_core.rearrange import epoch
from eplb_core.testing.expectation import NotReached, UnheardError, Unmet, told

_LATE = {"epoch": "0", "store": "None"}


@contextmanager
def reads_before_the_meeting() -> Iterator[list[str]]:
    """Record every read of ``context.epoch`` and ``context.store`` by communicators built inside this context.

    Yields
    ------
    list of str
        Filled meanwhile: one text for each line that reads one of them.

    Notes
    -----
    The core itself reads neither, so every read is one of the backend, and too early. A copy (``dataclasses.replace``)
    counts as well, and rightly: it keeps the values from before the meeting.
    """
    reads: list[str] = []

    class Watched(BackendContext):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in _LATE and not super().__getattribute__("epoch"):
                text = f"context.{name} is {_LATE[name]} until exchange_metadata, and was read {_place()}"
                if text not in reads:
                    reads.append(text)
            return value

    with patch.object(epoch, "BackendContext", Watched):
        yield reads


@contextmanager
def building(text: str) -> Iterator[list[str]]:
    """Expect that a backend can be built, as `expecting` does; a failure also names what was read too early."""
    with reads_before_the_meeting() as reads:
        try:
            yield reads
        except (Unmet, NotReached, UnheardError):
            raise
        except Exception as error:
            raise Unmet("\n".join([f"{text}: {told(error)}", *reads])) from error


def _place() -> str:
    """Return the innermost line that is no part of the core or of the standard library's dataclasses."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_ours(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    place = "/".join(PurePath(frame.f_code.co_filename).parts[-2:])
    return f"in {frame.f_code.co_name} ({place}:{frame.f_lineno})"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("eplb_core", "dataclasses")
