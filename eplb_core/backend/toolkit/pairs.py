"""Who talks to whom: peers checked against the members, pairs of ranks dealt out into rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eplb_core.backend.protocol import BackendContext
from eplb_core.errors import error_for


def check_member(peer: int, context: BackendContext) -> None:
    """Refuse metadata of a rank that is not another member.

    Parameters
    ----------
    peer : int
        Rank that sent the message.
    context : BackendContext
        Says who the members are.

    Raises
    ------
    MetadataError
        EPLB-M005.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> context = SimpleNamespace(rank=0, members=(0, 1, 3))
    >>> check_member(3, context)
    >>> check_member(2, context)
    Traceback (most recent call last):
        ...
    eplb_core.errors.classes.MetadataError: Refused a message from rank 2: it is not another member. [EPLB-M005]
    """
    if peer not in context.members or peer == context.rank:
        raise error_for("EPLB-M005", peer=peer, problem="it is not another member")


def rounds_of_pairs(
    members: Sequence[int], rank: int, peers: Iterable[int], *, peers_per_round: int = 1
) -> list[list[int]]:
    """Deal a rank's peers out into rounds, so that both ends of every pair meet in the same round.

    Members at places i and j meet in round (i + j) mod N: the same seen from either end, and another one for each peer
    of a rank. So nobody has two peers in a round, ranks that carry the rounds out in order never wait in a circle, and
    none of this depends on which pairs are asked for, as long as both ends ask.

    Parameters
    ----------
    members : sequence of int
        All ranks that take part, ascending; the same on every rank.
    rank : int
        This rank, one of them.
    peers : iterable of int
        Members to meet, all or some.
    peers_per_round : int
        At most so many consecutive rounds are done as one.

    Returns
    -------
    list of list of int
        Peers round by round, rounds without any left out. Rounds keep their order, not their number.

    Examples
    --------
    >>> members = [0, 1, 2, 3]
    >>> for rank in members:
    ...     others = [peer for peer in members if peer != rank]
    ...     print(rank, rounds_of_pairs(members, rank, others))
    0 [[1], [2], [3]]
    1 [[3], [0], [2]]
    2 [[3], [0], [1]]
    3 [[1], [2], [0]]
    >>> rounds_of_pairs(members, 0, [1, 2, 3], peers_per_round=8)
    [[1, 2, 3]]
    """
    place = {member: number for number, member in enumerate(members)}
    rounds: dict[int, list[int]] = {}
    for peer in sorted(peers):
        rounds.setdefault((place[peer] + place[rank]) % len(place) // max(1, peers_per_round), []).append(peer)
    return [rounds[number] for number in sorted(rounds)]
