"""When NIXL must not be touched any more, and how what it still holds is kept for as long as the process lives."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from eplb_core.backend import Cancelled
from eplb_nixl.memory import RegisteredMemory


class Guard:
    """Says whether NIXL may make progress: not after a peer's death, nor once registered memory is gone.

    Over transports without one-sided reads (TCP) UCX serves a READ at its source, from a request that the reader sent.
    When the reader dies, the requests it left in the socket are still taken up by the source's next progress, the reply
    finds the endpoint failed, and UCX 1.23 ends the process ("Fatal: unexpected error", in ucp_request_try_send): a
    killed rank takes the survivors with it. Ending the agent without progress is safe. So before any call that makes
    progress this is asked, and after a death there are no such calls; the epoch is over then anyway. The same goes for
    memory that the host took away: a READ of it, served from here, is a segmentation fault.

    Parameters
    ----------
    cancelled : callable
        The context's; cheap, for it looks only every few milliseconds.
    """

    def __init__(self, cancelled: Callable[[], Cancelled | None]) -> None:
        self._cancelled = cancelled
        self._is_gone = False
        self.memory: RegisteredMemory | None = None
        """What is registered, once something is."""

    def may_progress(self) -> bool:
        """Return False from the first moment a peer, or registered memory, is known to be gone."""
        if not self._is_gone:
            cancelled = self._cancelled()
            # A lost store counts: its host is a rank as a rule, and only its neighbours in the ring see that rank die.
            self._is_gone = cancelled is not None and (cancelled.peer_lost or cancelled.store_lost)
        return not self._is_gone and (self.memory is None or self.memory.is_there())


def make_immortal(thing: object) -> None:
    """Keep an object, and all it refers to, until the process ends, without running finalisers even then.

    A list in a module would be emptied when the interpreter shuts down, and NIXL's finalisers make progress.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
