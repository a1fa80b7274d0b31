"""In which order a worker waits for its engine and stages the layers of a rearrangement, so that no circle waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple


class Move(NamedTuple):
    """One thing that a worker does.

    Parameters
    ----------
    verb : {"await copies", "await slots", "stage"}
        "await copies": until this rank's engine committed the layer; "await slots": until every rank came here;
        "stage": start its transfer unless that was done, start the next layer's where a landing slot is free, wait for
        the rows, and drive its `LayerVote`.
    layer : int
        Number of the layer.
    """

    verb: Literal["await copies", "await slots", "stage"]
    layer: int


def moves(layers: Sequence[int], staging_layers: int) -> Iterator[Move]:
    """Yield what a worker does in one rearrangement, in order.

    From a layer's landed ballot to its decision a worker does nothing that can wait for its engine, for a device or for
    landing memory: its engine may be waiting for that decision, or for the engine of another rank that does. So
    whatever waits for the engine comes before a layer is staged. What starts there are the layer's own transfer and the
    next one, which then runs beside the vote.

    With one slot a transfer starts after the commit of the layer before, and ranks whose engine came to it would wait
    for rows of those whose engine did not; so they wait for each other first, without a limit on it.

    What is left when the moves are over is to await the copies of every layer decided, before the next agree.

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
    for place, layer in enumerate(layers):
        if place > 0:
            yield Move("await copies", layers[place - 1])
            if staging_layers == 1:
                yield Move("await slots", layer)
        yield Move("stage", layer)
