"""Store operations as data: a protocol is a generator of them, and its driver carries them out.

So tests run the code that decides in production through every order of operations, with crashes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from eplb_core.control.store import StoreClient
    from eplb_core.errors import EplbError

R = TypeVar("R")


@dataclass(frozen=True)
class Put:
    """Set a key; the answer is None."""

    key: str
    value: bytes

    def on(self, client: StoreClient) -> None:
        """Carry it out."""
        client.set(self.key, self.value)


@dataclass(frozen=True)
class Get:
    """Read keys; the answer is their values, None for those that are not there."""

    keys: tuple[str, ...]

    def on(self, client: StoreClient) -> list[bytes | None]:
        """Carry it out, in two round trips when all keys exist."""
        if len(self.keys) == 1:
            return [client.read(self.keys[0])]
        if client.exists(*self.keys):
            return list(client.read_many(list(self.keys)))
        return [client.read(key) for key in self.keys]


@dataclass(frozen=True)
class Count:
    """Count one up at a key; the answer is the count. Never repeated."""

    key: str

    def on(self, client: StoreClient) -> int:
        """Carry it out."""
        return client.add(self.key)


@dataclass(frozen=True)
class PutFirst:
    """Set a key unless it has a value; the answer is the value that it has then."""

    key: str
    value: bytes

    def on(self, client: StoreClient) -> bytes:
        """Carry it out."""
        return client.put_first(self.key, self.value)


@dataclass(frozen=True)
class Delete:
    """Delete keys; the answer is None."""

    keys: tuple[str, ...]

    def on(self, client: StoreClient) -> None:
        """Carry it out."""
        client.delete(*self.keys)


@dataclass(frozen=True)
class Pause:
    """Wait a little; the answer is None, or a `Refusal` with which to give up."""


@dataclass(frozen=True)
class Refusal:
    """The reason why a protocol should give up waiting.

    Parameters
    ----------
    error : EplbError
        Error that goes into this rank's ballot or abort, and that is raised.
    fatal : bool
        True when a peer is involved that will not answer again.
    """

    error: EplbError
    fatal: bool = True


Operation = Put | Get | Count | PutFirst | Delete | Pause
Steps = Generator[Operation, Any, R]


def perform(steps: Steps[R], client: StoreClient, pause: Callable[[], Refusal | None] | None = None) -> R:
    """Drive a protocol on a store.

    Parameters
    ----------
    steps : generator of Operation
        A protocol, as the store operations that it asks for.
    client : StoreClient
        Connection to the store.
    pause : callable or None
        Called for each `Pause`: waits a little, and returns a `Refusal` to give up, or None.

    Returns
    -------
    object
        What the protocol returns.

    Raises
    ------
    StoreGone
        The store did not answer.
    """
    answer: Any = None
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as done:
            result: R = done.value
            return result
        if isinstance(operation, Pause):
            answer = None if pause is None else pause()
            continue
        answer = operation.on(client)
