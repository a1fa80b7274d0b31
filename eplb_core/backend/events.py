"""Events for observers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Event:
    """An event that observers get through ``observe``.

    Parameters
    ----------
    kind : {"agree", "vote", "tally", "commit", "abort"}
        A ballot is about to be cast (agree, vote); this rank has read all ballots of a layer and is about to decide
        (tally); a layer was committed; a rearrangement was aborted.
    name : str
        Name of the communicator.
    epoch, generation : int
        Numbers of the rearrangement.
    layer : int or None
        Index of the layer; None for agree and for an abort outside a layer.
    ok : bool
        The vote of a ballot: True for commit, False for abort.
    reason : str
        Reason of an abort.
    evidence : mapping of str to mapping of int to bytes
        For tally: evidence that observers attached to ballots, by observer name, then by rank.
    """

    kind: Literal["agree", "vote", "tally", "commit", "abort"]
    name: str
    epoch: int
    generation: int
    layer: int | None
    ok: bool
    reason: str = ""
    evidence: Mapping[str, Mapping[int, bytes]] = field(default_factory=dict)
