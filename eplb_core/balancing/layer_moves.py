"""In which order a worker starts, awaits and votes on the layers of a rearrangement, so that no circle waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple


class Move(NamedTuple):
    """One thing that a worker does.

    Parameters
    ----------
    verb : {"start", "land", "await copies", "await slots", "vote"}
        "start" a transfer; "land": wait for its rows; "await copies": until this rank's engine committed the layer and
        its device has done the copies; "await slots": until every rank came here; "vote": drive a `LayerVote`.
    layer : int
        Which layer.
    """

    verb: Literal["start", "land", "await copies", "await slots", "vote"]
    layer: int


def moves(layers: Sequence[int], staging_layers: int) -> Iterator[Move]:
    """Yield what a worker does in one rearrangement, in order.

    From a layer's landed ballot to its decision a worker does nothing that can wait for its engine, for a device or for
    landing memory: its engine may be waiting for that decision, or for the engine of another rank that does. So
    whatever waits for the engine comes before a vote, and so does the start of the next transfer, which then runs
    beside the vote.

    With one slot a transfer starts after the commit of the layer before, and ranks whose engine came to it would wait
    for rows of those whose engine did not; so they wait for each other first, without a limit on it.

    Parameters
    ----------
    layers : sequence of int
        What moves, in the order of the votes.
    staging_layers : int
        Landing slots, 1 or 2.

    Yields
    ------
    Move
    """
    for layer in layers[:staging_layers]:
        yield Move("start", layer)
    for place, layer in enumerate(layers):
        yield Move("land", layer)
        if staging_layers > 1 and place > 0:
            yield Move("await copies", layers[place - 1])
            yield from (Move("start", later) for later in layers[place + 1 : place + 2])
        yield Move("vote", layer)
        if staging_layers == 1:
            yield Move("await copies", layer)
            for later in layers[place + 1 : place + 2]:
                yield Move("await slots", later)
                yield Move("start", later)
    if layers and staging_layers > 1:
        yield Move("await copies", layers[-1])
