"""Wording of a backend's errors: a library's text cut short, ranks by name, the three errors of a wait."""

from __future__ import annotations

import re
from collections.abc import Iterable

from eplb_core.backend.protocol import Cancelled
from eplb_core.errors import EplbError, error_for

_PLACE_IN_SOURCE = re.compile(r"^\[[^\]]*\]\s*")
_MOST_RANKS = 8


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as messages name them.

    Parameters
    ----------
    ranks : iterable of int
        In any order, repeated or not.

    Returns
    -------
    str
        At most eight by number.

    Examples
    --------
    >>> name_ranks([3])
    'rank 3'
    >>> name_ranks([5, 1, 1, 0])
    'ranks 0, 1 and 5'
    >>> name_ranks(range(20))
    'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more'
    >>> name_ranks([])
    'no rank'
    """
    distinct = sorted(set(ranks))
    if not distinct:
        return "no rank"
    named = [str(rank) for rank in distinct[:_MOST_RANKS]]
    if len(distinct) > _MOST_RANKS:
        named.append(f"{len(distinct) - _MOST_RANKS} more")
    *first, last = named
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def first_line(error: BaseException) -> str:
    r"""Return the first sentence of an error's text, as the state of an `EplbError`.

    Libraries put a source location in front of it, and advice, addresses and frames after it.

    Parameters
    ----------
    error : BaseException
        As the library raised it.

    Returns
    -------
    str
        Without a full stop; the name of the class where there is no text.

    Examples
    --------
    >>> first_line(RuntimeError("[tcp/pair.cc:553] Connection closed by peer. This may be a crash\nframe #0: ..."))
    'Connection closed by peer'
    >>> first_line(MemoryError())
    'MemoryError'
    """
    lines = _PLACE_IN_SOURCE.sub("", str(error).strip()).splitlines()
    return lines[0].split(". ")[0].rstrip(".") if lines else type(error).__name__


def cancelled_error(label: str, cancelled: Cancelled, where: str, waiting_for: str = "") -> EplbError:
    """Build the error of a wait that was cancelled.

    Parameters
    ----------
    label : str
        Leading word of the backend's errors.
    cancelled : Cancelled
        What ``context.cancelled()`` returned.
    where : str
        Layer and phase, such as ``"layer 3, phase wait"``.
    waiting_for : str
        Ranks or thing that the wait was for, if known.

    Returns
    -------
    TransferError
        EPLB-T001 with ``state="cancelled"``.

    Examples
    --------
    >>> from eplb_core.backend import Cancelled
    >>> str(cancelled_error("mine", Cancelled("rank 2 aborted layer 3"), "layer 3, phase wait", "rank 1"))
    'mine transfer failed with state=cancelled rank 2 aborted layer 3 (layer 3, phase wait for rank 1). [EPLB-T001]'
    """
    of_whom = f" for {waiting_for}" if waiting_for else ""
    return error_for("EPLB-T001", label=label, state="cancelled", detail=f"{cancelled} ({where}{of_whom}).")


def stalled_error(label: str, seconds: float, where: str, waiting_for: str) -> EplbError:
    """Build the error of a wait whose limit ran out.

    Parameters
    ----------
    label : str
        Leading word of the backend's errors.
    seconds : float
        Seconds that it waited.
    where : str
        Layer and phase.
    waiting_for : str
        Ranks or thing that it waited for.

    Returns
    -------
    StalledError
        EPLB-T002.

    Examples
    --------
    >>> str(stalled_error("mine", 60.0, "layer 3, phase wait", name_ranks([1, 2])))
    'Stalled for 60.0 s in layer 3, phase wait over mine, waiting for ranks 1 and 2. [EPLB-T002]'
    """
    return error_for("EPLB-T002", seconds=seconds, where=f"{where} over {label}", waiting_for=waiting_for)


def failed_error(label: str, state: str, where: str, peers: Iterable[int] = ()) -> EplbError:
    """Build the error for a failure that the library reports.

    Parameters
    ----------
    label : str
        Leading word of the backend's errors.
    state : str
        The library's own words; see `first_line`.
    where : str
        Layer and phase.
    peers : iterable of int
        Ranks at the other end, as far as they are known.

    Returns
    -------
    TransferError
        EPLB-T001.

    Examples
    --------
    >>> str(failed_error("mine", "Connection closed by peer", "layer 3, phase wait", [1]))
    'mine transfer failed with state=Connection closed by peer (with rank 1, layer 3, phase wait). [EPLB-T001]'
    """
    others = list(peers)
    whose = f"with {name_ranks(others)}, " if others else ""
    return error_for("EPLB-T001", label=label, state=state, detail=f"({whose}{where}).")
