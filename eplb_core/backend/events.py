"""What observers are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Event:
    """What observers are told through ``observe``.

    Parameters
    ----------
    kind : {"agree", "vote", "tally", "commit", "abort"}
        What happens on this rank: a ballot is about to be cast (agree, vote), this rank read all ballots of a layer and
        is about to decide (tally), a layer was committed, a generation was aborted.
    name : str
        Name of the communicator.
    epoch, generation : int
        Numbers of the rearrangement.
    layer : int or None
        Index of the layer; None for agree and for an abort outside a layer.
    ok : bool
        The vote of a ballot: True for commit, False for abort.
    reason : str
        Why not.
    evidence : mapping of str to mapping of int to bytes
        For tally: what observers attached to their ballots, by observer name, then by rank.
    """

    kind: Literal["agree", "vote", "tally", "commit", "abort"]
    name: str
    epoch: int
    generation: int
    layer: int | None
    ok: bool
    reason: str = ""
    evidence: Mapping[str, Mapping[int, bytes]] = field(default_factory=dict)
