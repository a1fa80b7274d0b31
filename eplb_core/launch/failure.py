"""Why a rank did not finish."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from eplb_core.errors import EplbError


@dataclass(frozen=True)
class RankFailure:
    """What a rank raised, or how its process ended.

    Parameters
    ----------
    rank : int
        The rank that failed.
    error : str
        Class of the exception; "Died" or "Killed" for a process that could not say why.
    code : str
        Code of the catalogue; empty unless the error is an `EplbError`.
    message : str
        Text of the error.
    trace : str
        Traceback, or the last lines that the process wrote to stderr where these are kept.
    """

    rank: int
    error: str
    code: str
    message: str
    trace: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        """Describe the exception that is being handled."""
        code = error.code if isinstance(error, EplbError) else ""
        return cls(rank, type(error).__name__, code, str(error), traceback.format_exc())
