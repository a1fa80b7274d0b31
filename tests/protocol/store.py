"""A store in memory that performs the operations of a protocol, one at a time, and never changes what it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eplb_core.voting.operations import Count, Delete, Get, Operation, Put, PutFirst

Contents = Mapping[str, bytes]


def perform(operation: Operation, contents: Contents) -> tuple[Any, Contents]:
    """Return the answer and what the store then holds; a `Pause` is no operation of a store."""
    match operation:
        case Get(keys):
            return [contents.get(key) for key in keys], contents
        case Put(key, value):
            return None, {**contents, key: value}
        case Count(key):
            count = int(contents.get(key, b"0")) + 1
            return count, {**contents, key: b"%d" % count}
        case PutFirst(key, value):
            return contents.get(key, value), {key: value, **contents}
        case Delete(keys):
            return None, {key: value for key, value in contents.items() if key not in keys}
    raise TypeError(operation)
