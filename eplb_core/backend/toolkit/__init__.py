"""What every author of a backend needs besides the contract: bounded waits, errors, pairs of ranks, order of calls.

Part of the contract: names and signatures change only with `eplb_core.API_VERSION`. Nothing here has to be used, and
nothing of it knows a transport.

==========================  ==========================================================================================
`Deadline`, `Backoff`       a limit that several steps share; pauses of a polling loop
`Wait`                      a wait for what can be polled: called off with the others, bounded, with growing pauses
`CancelWatch`               the same for calls that block and can be neither polled nor sliced
`cancelled_error` ...       the typed errors of a wait, in one wording
`first_line`, `name_ranks`  a library's error, and ranks, as people read them
`rounds_of_pairs`           which peers meet in which round, so that both ends of a pair meet in the same one
`check_member`              metadata of another member, and of nobody else
`greet`                     nonces between new pairs: connects them, and proves who is who
`LayerTransfer`             the handle that `transfer` returns, to be extended
`Lifecycle`                 what is refused before connect, after a failure and after close; what is in flight
`row_batches`               a plan's rows as tensors, batch by batch
`BlockAccounts`             the books of a staging allocator
==========================  ==========================================================================================
"""

from __future__ import annotations

from eplb_core.backend.accounts import BlockAccounts
from eplb_core.backend.toolkit.failures import (
    cancelled_error,
    failed_error,
    first_line,
    name_ranks,
    stalled_error,
)
from eplb_core.backend.toolkit.greeting import greet
from eplb_core.backend.toolkit.handle import LayerTransfer
from eplb_core.backend.toolkit.lifecycle import Lifecycle
from eplb_core.backend.toolkit.pairs import check_member, rounds_of_pairs
from eplb_core.backend.toolkit.rows import RowMove, row_batches
from eplb_core.backend.toolkit.waiting import Backoff, Deadline, Wait
from eplb_core.backend.toolkit.watch import CancelWatch

__all__ = [
    "Backoff",
    "BlockAccounts",
    "CancelWatch",
    "Deadline",
    "LayerTransfer",
    "Lifecycle",
    "RowMove",
    "Wait",
    "cancelled_error",
    "check_member",
    "failed_error",
    "first_line",
    "greet",
    "name_ranks",
    "rounds_of_pairs",
    "row_batches",
    "stalled_error",
]
