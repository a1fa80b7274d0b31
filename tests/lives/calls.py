"""What one call of the public API did on one rank, as its process tells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tests.lives.worlds import Map

Outcome = Literal["ok", "error", "interrupted", "untyped"]

COLLECTIVE = ("rearrange", "begin", "stage", "commit", "end", "connect", "rebuild")


@dataclass
class Call:
    """One call, from the moment it was entered.

    Parameters
    ----------
    name : str
        Of the method.
    began_s, ended_s : float
        `time.monotonic`, which processes of one machine share.
    outcome : {"ok", "error", "interrupted", "untyped"}
        "error": an `EplbError`. "interrupted": the injected KeyboardInterrupt. "untyped": anything else.
    code, text : str
        Of the error; a traceback when it was untyped.
    reported : bool
        Did the error carry a report?
    placement : Map or None
        What the last report says this rank's communicator holds; before a first rearrangement, what its host loaded.
    committed, decided, doubtful : tuple of int
        Layers, from the report.
    epoch, generation, quarantined_nbytes : int
        From the report.
    wrong : tuple of str
        Rows whose bytes are not what the report says.
    early : tuple of str
        Rows that are still the old ones although the report says new: decided, and not yet committed by the host.
    invalid : bool
        A commit failed on this rank (EPLB-T006): its weights are nothing any more, which the error says.
    acted : bool
        Did the injected fault happen?
    starved_s : float
        How long a thread of this process could have run and had no core.
    """

    name: str
    began_s: float = 0.0
    ended_s: float = 0.0
    outcome: Outcome = "ok"
    code: str = ""
    text: str = ""
    reported: bool = True
    placement: Map | None = None
    committed: tuple[int, ...] = ()
    decided: tuple[int, ...] = ()
    doubtful: tuple[int, ...] = ()
    epoch: int = 0
    generation: int = 0
    quarantined_nbytes: int = 0
    wrong: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    invalid: bool = False
    acted: bool = False
    starved_s: float = 0.0

    @property
    def ok(self) -> bool:
        """It returned."""
        return self.outcome == "ok"

    @property
    def collective(self) -> bool:
        """It is one that members make together, or a part of one."""
        return self.name.startswith(COLLECTIVE)

    @property
    def whole(self) -> bool:
        """A rearrangement came to its end."""
        return self.ok and self.name in ("rearrange", "end")

    @property
    def seconds(self) -> float:
        """How long it took, stops included."""
        return self.ended_s - self.began_s

    @property
    def starved(self) -> bool:
        """So many others wanted the cores that a limit may have run out for no other reason."""
        return self.starved_s > max(0.1, 0.2 * self.seconds)

    def __str__(self) -> str:
        text = f"{self.name} " + (self.outcome if not self.code else self.code) + f" in {self.seconds:.2f} s"
        for name in ("committed", "decided", "doubtful"):
            if getattr(self, name):
                text += f", {name} {list(getattr(self, name))}"
        text += f" (epoch {self.epoch}, generation {self.generation})"
        if self.quarantined_nbytes:
            text += ", quarantined memory"
        if self.acted:
            text += " [fault acted]"
        if self.text:
            text += f": {self.text.splitlines()[0][:220]}"
        return text


@dataclass(frozen=True)
class Fault:
    """What `eplb_core.testing.faults.FaultInjector` is told to do during a call."""

    phase: str
    action: str
    layer: int | None = None
    delay_s: float = 0.0

    def __str__(self) -> str:
        where = f"{self.phase}" + ("" if self.layer is None else f" of layer {self.layer}")
        return f"{self.action} in {where}" + (f" for {self.delay_s:.2f} s" if self.action == "delay" else "")


@dataclass(frozen=True)
class Command:
    """What a rank's process is told to do: a method of `tests.lives.rank.Host`, after a delay.

    Parameters
    ----------
    method : str
        Which.
    arguments : dict
        Of the method.
    delay_s : float
        Before the call.
    bound_s : float
        By when, from its start, the whole of it must be over, time in which the process was stopped not counted.
    fault : Fault or None
        Armed for the call.
    """

    method: str
    arguments: dict[str, object] = field(default_factory=dict)
    delay_s: float = 0.0
    bound_s: float = 60.0
    fault: Fault | None = None
