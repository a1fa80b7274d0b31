"""How far a backend has come and what it therefore refuses; which transfers are in flight, by landing slot."""

from __future__ import annotations

from typing import Generic, TypeVar

from eplb_core.backend.protocol import BackendContext
from eplb_core.backend.toolkit.handle import LayerTransfer
from eplb_core.errors import error_for

H = TypeVar("H", bound=LayerTransfer)


class Lifecycle(Generic[H]):
    """A backend from its construction to its close: built, registered, connected; then out of use, or closed.

    The core keeps the order of calls; hosts that drive a backend themselves, tests, and what happens after a failure do
    not always. Each method says what is about to happen, or happened, and raises where that cannot be.

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
        """Is it out of use after a failure?"""
        return self._poisoned is not None

    def check_usable(self) -> None:
        """Refuse whatever comes after a close or a failure.

        Raises
        ------
        TransferError
            EPLB-T008, closed.
        PoisonedError
            EPLB-T004, out of use since a failure, which it names.
        """
        if self.is_closed:
            raise error_for("EPLB-T008", name=self._name)
        if self._poisoned is not None:
            where, reason = self._poisoned
            raise error_for("EPLB-T004", name=self._name, where=where, reason=reason)

    def registering(self) -> None:
        """The buffers come in.

        Raises
        ------
        TransferError, PoisonedError
            See `check_usable`.
        PlanError
            EPLB-P004: they came before.
        """
        self.check_usable()
        if self._is_registered:
            raise error_for("EPLB-P004", problem=f"{self._label} was given its buffers before")
        self._is_registered = True

    def connecting(self) -> None:
        """Peers come in, the first ones or further ones.

        Raises
        ------
        TransferError, PoisonedError
            See `check_usable`.
        PlanError
            EPLB-P004: there are no buffers yet.
        """
        self.check_usable()
        if not self._is_registered:
            raise error_for("EPLB-P004", problem=f"{self._label} is connected before it was given its buffers")

    def connected(self) -> None:
        """Transfers may begin."""
        self.is_connected = True

    def starting(self, slot: int) -> None:
        """A plan comes in.

        Raises
        ------
        TransferError, PoisonedError
            See `check_usable`.
        PlanError
            EPLB-P004: it is not connected, the slot is not there, or a transfer into it is in flight.
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
        """A transfer is waited for.

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
        """Note that a transfer is over, or given up; any number of times."""
        if self.in_flight.get(handle.slot) is handle:
            del self.in_flight[handle.slot]

    def poison(self, where: str, reason: str) -> None:
        """Put it out of use; what was said first stays."""
        if self._poisoned is None:
            self._poisoned = (where, reason)

    def close(self) -> bool:
        """Refuse everything from now on; True the first time."""
        is_first = not self.is_closed
        self.is_closed = True
        return is_first
