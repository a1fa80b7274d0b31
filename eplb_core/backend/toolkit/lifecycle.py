"""The state of a backend, calls refused in it, and transfers in flight by landing slot."""

from __future__ import annotations

from typing import Generic, TypeVar

from eplb_core.backend.protocol import BackendContext
from eplb_core.backend.toolkit.handle import LayerTransfer
from eplb_core.errors import error_for

H = TypeVar("H", bound=LayerTransfer)


class Lifecycle(Generic[H]):
    """State of a backend: built, registered, connected; then poisoned or closed.

    The core keeps the order of calls; tests, and hosts that call a backend themselves, may not, nor may calls after a
    failure. Call the method for what is about to happen, or has happened; it raises when that is out of order.

    Parameters
    ----------
    context : BackendContext
        Name of the communicator, landing slots.
    label : str
        Leading word of the backend's errors.

    Attributes
    ----------
    in_flight : dict of int to handle
        Transfers begun and not ended, by slot.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> life = Lifecycle(SimpleNamespace(name="default", staging_layers=2), "mine")
    >>> life.registering()
    >>> life.connecting()
    >>> life.connected()
    >>> life.starting(slot=0)
    >>> handle = SimpleNamespace(slot=0)
    >>> life.begin(handle)
    >>> life.waiting(handle)
    >>> life.end(handle)
    >>> life.close()
    True
    >>> life.starting(slot=1)
    Traceback (most recent call last):
        ...
    eplb_core.errors.classes.TransferError: Communicator 'default' is closed. [EPLB-T008]
    """

    def __init__(self, context: BackendContext, label: str) -> None:
        self._name = context.name
        self._num_slots = context.staging_layers
        self._label = label
        self._is_registered = False
        self._poisoned: tuple[str, str] | None = None  # since where, why
        self.is_connected = False
        self.is_closed = False
        self.in_flight: dict[int, H] = {}

    @property
    def is_poisoned(self) -> bool:
        """Is the backend poisoned by a failure?"""
        return self._poisoned is not None

    def check_usable(self) -> None:
        """Raise if the backend is closed or poisoned.

        Raises
        ------
        TransferError
            EPLB-T008, closed.
        PoisonedError
            EPLB-T004, poisoned; the message names the failure.
        """
        if self.is_closed:
            raise error_for("EPLB-T008", name=self._name)
        if self._poisoned is not None:
            where, reason = self._poisoned
            raise error_for("EPLB-T004", name=self._name, where=where, reason=reason)

    def registering(self) -> None:
        """Check that `register_buffers` may be called now, once.

        Raises
        ------
        TransferError, PoisonedError
            See `check_usable`.
        PlanError
            EPLB-P004: it was called before.
        """
        self.check_usable()
        if self._is_registered:
            raise error_for("EPLB-P004", problem=f"{self._label} was given its buffers before")
        self._is_registered = True

    def connecting(self) -> None:
        """Check that `exchange_metadata` may be called now.

        Raises
        ------
        TransferError, PoisonedError
            See `check_usable`.
        PlanError
            EPLB-P004: `register_buffers` was not called.
        """
        self.check_usable()
        if not self._is_registered:
            raise error_for("EPLB-P004", problem=f"{self._label} is connected before it was given its buffers")

    def connected(self) -> None:
        """Note that the backend is connected: transfers may begin."""
        self.is_connected = True

    def starting(self, slot: int) -> None:
        """Check that a transfer into a slot may begin now.

        Raises
        ------
        TransferError, PoisonedError
            See `check_usable`.
        PlanError
            EPLB-P004: not connected, no such slot, or a transfer into it is in flight.
        """
        self.check_usable()
        if not self.is_connected:
            raise error_for("EPLB-P004", problem=f"a transfer over {self._label} before it is connected")
        if slot in self.in_flight or not 0 <= slot < self._num_slots:
            raise error_for("EPLB-P004", problem=f"a transfer into slot {slot}, which is in use or not there")

    def begin(self, handle: H) -> None:
        """Note a transfer whose memory is in use from now on."""
        self.in_flight[handle.slot] = handle

    def waiting(self, handle: H) -> None:
        """Check that a transfer may be waited for now.

        Raises
        ------
        TransferError, PoisonedError
            See `check_usable`.
        PlanError
            EPLB-P004: it is not in flight.
        """
        self.check_usable()
        if self.in_flight.get(handle.slot) is not handle:
            raise error_for("EPLB-P004", problem=f"a wait over {self._label} for a transfer that is not in flight")

    def end(self, handle: H) -> None:
        """Note that a transfer is over or given up; may be called again."""
        if self.in_flight.get(handle.slot) is handle:
            del self.in_flight[handle.slot]

    def poison(self, where: str, reason: str) -> None:
        """Poison the backend; the first reason stays."""
        if self._poisoned is None:
            self._poisoned = (where, reason)

    def close(self) -> bool:
        """Refuse everything from now on; True the first time."""
        is_first = not self.is_closed
        self.is_closed = True
        return is_first
