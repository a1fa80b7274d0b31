"""Announcements: by notification a staged source tells each reader that a transfer's rows are in its send buffer."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from eplb_core.backend import TransferPlan

_MESSAGE = struct.Struct("<4sQQQII")  # magic, epoch, generation, sequence, layer, slot
_MAGIC = b"EPRD"


class MisannouncedError(Exception):
    """A source announced a layer otherwise than this rank's plan has it: the two would not mean the same rows."""


@dataclass(frozen=True)
class Announcement:
    """Which transfer a source has made ready, as its plan says: nothing in it is counted by the backend.

    Parameters
    ----------
    epoch, generation, sequence : int
        Taken from the plan; a message of another epoch, or of a generation that is over, is nothing to go by.
    layer : int
        Layer whose rows are ready.
    slot : int
        Number of the send buffer that holds them.
    """

    epoch: int
    generation: int
    sequence: int
    layer: int
    slot: int

    @classmethod
    def of(cls, plan: TransferPlan, epoch: int) -> Announcement:
        """Announce what a plan says."""
        return cls(epoch, plan.generation, plan.sequence, plan.layer, plan.slot)

    def to_bytes(self) -> bytes:
        """Return the notification."""
        return _MESSAGE.pack(_MAGIC, self.epoch, self.generation, self.sequence, self.layer, self.slot)

    @classmethod
    def from_bytes(cls, message: bytes) -> Announcement | None:
        """Read a notification; None when it is none of ours."""
        if len(message) != _MESSAGE.size or not message.startswith(_MAGIC):
            return None
        _, *fields = _MESSAGE.unpack(message)
        return cls(*fields)

    def __str__(self) -> str:
        return f"transfer {self.sequence} in send buffer {self.slot}"


class Announced:
    """What one source has announced in the generation at hand.

    A source enters a generation only when this rank has ended the one before it, and has one layer once in each.

    Parameters
    ----------
    epoch : int
        Epoch of this rank.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._generation = 0
        self._by_layer: dict[int, Announcement] = {}

    def take(self, message: bytes) -> None:
        """Note a notification; those of other epochs and of earlier generations are left."""
        said = Announcement.from_bytes(message)
        if said is None or said.epoch != self._epoch or said.generation < self._generation:
            return
        if said.generation > self._generation:
            self._generation = said.generation
            self._by_layer.clear()
        self._by_layer[said.layer] = said

    def has(self, plan: TransferPlan) -> bool:
        """Say whether the rows of a plan's layer can be read.

        Raises
        ------
        MisannouncedError
            The source calls the same layer of the same generation by another sequence, or has it in another buffer.
        """
        said, expected = self._by_layer.get(plan.layer), Announcement.of(plan, self._epoch)
        if said is None or said.generation != plan.generation:
            return False
        if said != expected:
            raise MisannouncedError(f"it announced layer {plan.layer} as {said}, and this rank's plan has {expected}")
        return True

    def forget(self, plan: TransferPlan) -> None:
        """Forget a transfer that is over."""
        if self._by_layer.get(plan.layer) == Announcement.of(plan, self._epoch):
            del self._by_layer[plan.layer]
