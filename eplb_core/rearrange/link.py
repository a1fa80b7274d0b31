"""Link: backends connect to the peers of a plan, and all members vote on whether that worked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from eplb_core.arrays import IntArray
from eplb_core.backend.toolkit import Deadline
from eplb_core.control.store import StoreGone
from eplb_core.errors import DiscoveryError, EplbError, TransferError, error_for
from eplb_core.rearrange import records
from eplb_core.rearrange.epoch import Epoch
from eplb_core.voting.vote import Tally, Vote, all_agree
from eplb_core.wire.ballots import Ballot, Decision


def link(
    epoch: Epoch,
    pairs: IntArray,
    peers: Sequence[int],
    timeout_s: float,
    topic: str = "link",
    *,
    always: bool = False,
) -> None:
    """Connect the backends of pairs that no plan has named before; collective if there are any, or with `always`.

    Parameters
    ----------
    epoch : Epoch
        An epoch whose members have met.
    pairs : ndarray, int64, [num_pairs, 2]
        Every pair of ranks that exchanges rows, from the whole plan, so that all members come to the same answer.
    peers : sequence of int
        Peers of this rank.
    timeout_s : float
        Limit, seconds.
    topic : str
        Topic of the vote; used once in a generation.

    Notes
    -----
    The first call of an epoch always exchanges, so that every backend sees ``exchange_metadata`` before a transfer.
    """
    if not always and epoch.exchanged and bool(epoch.linked[pairs[:, 0], pairs[:, 1]].all()):
        return
    members, _ = epoch.entered
    vote = members.vote(topic, f"generation {members.generation}, phase connect")
    new = [peer for peer in peers if not epoch.linked[min(peer, members.rank), max(peer, members.rank)]]
    deadline = Deadline(timeout_s)
    vote_on(epoch, vote, lambda: exchange(epoch, vote, new, deadline), Ballot(True), timeout_s)
    members.keys.forget_later([vote])
    note_linked(epoch, pairs)


def all_pairs(members: Sequence[int]) -> IntArray:
    """Return every (low, high) pair of some ranks, ``[num_pairs, 2]``."""
    ranks = np.array(members, dtype=np.int64)
    low, high = np.triu_indices(len(ranks), k=1)
    return np.stack([ranks[low], ranks[high]], axis=1)


def vote_on(
    epoch: Epoch, vote: Vote, ready: Callable[[], None], ballot: Ballot, timeout_s: float, tally: Tally | None = None
) -> Decision:
    """Do this rank's part, vote on it, and keep calling the backend's ``progress`` until all have voted."""
    members, watch = epoch.entered
    watch.attend(vote)
    deadline = Deadline(timeout_s)
    try:
        ready()
    except StoreGone:
        raise
    except Exception as error:
        decision = vote.abort(watch.diagnose(error, vote, vote.where).error, fatal=True)
    else:
        vote.cast(ballot, tally or all_agree(members.rank))
        # A rank that is connected keeps calling progress(), so that the others become connected too.
        decision = watch.decide(vote, timeout_s=max(1.0, deadline.left_s), progress=epoch.backend.progress)
    if not decision.commit:
        raise error_of(decision)
    return decision


def exchange(epoch: Epoch, vote: Vote, new: Sequence[int], deadline: Deadline) -> None:
    """Call ``exchange_metadata`` for some peers, and ``progress`` until they are connected."""
    members, watch = epoch.entered
    metadata = records.metadata_of(members, records.record_of(epoch), new)
    receipt = epoch.hooks.exchange_metadata(epoch.local, metadata)
    left_out = sorted(set(new) - set(receipt.peers))
    if left_out:
        reason = f"its exchange_metadata left out rank(s) {left_out}"
        raise DiscoveryError("EPLB-D003", backend=epoch.setup.info.name, reason=reason)
    while not epoch.backend_connected():
        epoch.backend.progress()
        cancelled = watch.cancelled()
        if cancelled is not None:
            raise TransferError("EPLB-T007", rank=epoch.rank, where=vote.where, reason=cancelled.reason)
        if deadline.over:
            waiting_for = f"the connections to ranks {list(new)}"
            raise error_for("EPLB-T002", seconds=deadline.elapsed_s, where=vote.where, waiting_for=waiting_for)
        time.sleep(50e-6)


def note_linked(epoch: Epoch, pairs: IntArray) -> None:
    """Note, after the vote, that these pairs are connected at both ends."""
    epoch.linked[pairs[:, 0], pairs[:, 1]] = True
    epoch.exchanged = True


def error_of(decision: Decision) -> EplbError:
    """Return why it was aborted."""
    return decision.error or error_for("EPLB-M006", rank=decision.by, reason="no reason given")
