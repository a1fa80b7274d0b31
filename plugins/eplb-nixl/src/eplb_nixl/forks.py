"""A forked child has copies of its parent's agents, and must not end one: it would close the parent's connections."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """What a forked child leaves alone."""

    def leave_to_parent(self) -> None:
        """Called in the child, once; nothing of the library may be touched from here on, at exit neither."""
        ...


_alive: weakref.WeakSet[Inherited] = weakref.WeakSet()


def leave_to_parent_after_fork(thing: Inherited) -> None:
    """Have `leave_to_parent` called in every child that is forked while a thing lives."""
    _alive.add(thing)


def _in_child() -> None:
    for thing in list(_alive):
        thing.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
