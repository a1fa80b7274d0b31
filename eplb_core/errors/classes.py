"""The typed errors: one class per family, one stable code per cause, texts from `eplb_core.errors.codes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eplb_core.errors.codes import CATALOGUE

if TYPE_CHECKING:
    from eplb_core.report import RearrangeReport


class EplbError(Exception):
    """Base of every error this package raises.

    The message starts with the catalogue's text for the code (hosts and operators search for it), goes on with the
    detail of this very case, and ends with the code.

    Parameters
    ----------
    code : str
        A code of the catalogue, such as ``"EPLB-T003"``; its letter must belong to the class.
    *values, **fields
        The values the catalogue's text asks for, by position or by name.
    detail : str
        What the reader needs beyond the catalogue's text: the difference, ranks, layer, phase, remedy.

    Attributes
    ----------
    code : str
        Stable; ``eplb explain CODE`` prints what it means and what to do.
    fields : dict
        The values of the text, for programs.
    detail : str
        As given.
    report : RearrangeReport or None
        On errors that leave ``rearrange``, ``stage`` or ``step``: which layers are committed and which
        ``physical_to_logical_map`` now holds.
    """

    family = ""

    def __init__(self, code: str, /, *values: Any, detail: str = "", **fields: Any) -> None:
        entry = CATALOGUE[code]
        if not code.startswith(f"EPLB-{self.family}"):
            raise ValueError(f"{code} is not a code of {type(self).__name__}")
        self.code = code
        self.values = values
        self.fields = fields
        self.detail = detail
        self.report: RearrangeReport | None = None
        text = entry.text.format(*values, **fields)
        if text.endswith(("..", "?.", "!.")):  # what was filled in last is a sentence already
            text = text[:-1]
        super().__init__(f"{text}{' ' if detail else ''}{detail} [{code}]")

    def __reduce__(self) -> tuple[Any, ...]:
        # Hosts pass exceptions between processes; keyword fields do not survive the default.
        notes = list(getattr(self, "__notes__", ()))
        return _rebuild, (type(self), self.code, self.values, self.detail, self.fields, self.report, notes)


class ConfigError(EplbError, ValueError):
    """A configuration that cannot be used (EPLB-Cnnn)."""

    family = "C"


class DiscoveryError(EplbError):
    """A plugin that could not be loaded or is claimed twice (EPLB-Dnnn)."""

    family = "D"


class MetadataError(EplbError):
    """Registered tensors or wire messages that do not fit together (EPLB-Mnnn)."""

    family = "M"


class PlanError(EplbError, ValueError):
    """Maps from which no plan can be made (EPLB-Pnnn)."""

    family = "P"


class TransferError(EplbError):
    """A rearrangement that failed while it ran (EPLB-Tnnn)."""

    family = "T"


class StalledError(TransferError):
    """A peer that did not act within the limit of the wait."""


class PeerLostError(TransferError):
    """A peer whose process is gone."""


class PoisonedError(TransferError):
    """The communicator refuses work after a failure, until ``rebuild``."""


class StoreLostError(TransferError):
    """The store's host is gone; outcomes may be in doubt until ``rebuild``."""


class CommitError(TransferError):
    """The copy into the live weights failed: this rank's weights are invalid."""


class BenchError(EplbError):
    """A failure of what measures or demonstrates: ``eplb demo`` (EPLB-Bnnn)."""

    family = "B"


_FAMILIES: dict[str, type[EplbError]] = {
    cls.family: cls for cls in (ConfigError, DiscoveryError, MetadataError, PlanError, TransferError, BenchError)
}
_SPECIAL: dict[str, type[EplbError]] = {
    "EPLB-T002": StalledError,
    "EPLB-T023": StalledError,
    "EPLB-T003": PeerLostError,
    "EPLB-T004": PoisonedError,
    "EPLB-T005": StoreLostError,
    "EPLB-T006": CommitError,
}


def error_for(code: str, /, *values: Any, detail: str = "", **fields: Any) -> EplbError:
    """Build the error of a code, in the class that belongs to it.

    Parameters
    ----------
    code : str
        A code of the catalogue.
    *values, **fields
        See `EplbError`.
    detail : str
        See `EplbError`.

    Returns
    -------
    EplbError
        Of the most specific class.
    """
    return error_class(code)(code, *values, detail=detail, **fields)


def error_class(code: str) -> type[EplbError]:
    """Return the most specific class of a code."""
    return _SPECIAL.get(code) or _FAMILIES[code.removeprefix("EPLB-")[0]]


def _rebuild(
    cls: type[EplbError],
    code: str,
    values: tuple[Any, ...],
    detail: str,
    fields: dict[str, Any],
    report: RearrangeReport | None,
    notes: list[str],
) -> EplbError:
    error = cls(code, *values, detail=detail, **fields)
    error.report = report
    if notes:
        error.__dict__["__notes__"] = notes  # as `add_note` keeps them, on a Python that has it
    return error
