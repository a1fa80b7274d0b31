"""Long calculations that let other threads in: where experts should live is worked out beside a serving engine."""

from __future__ import annotations

import time


def let_others_run() -> None:
    """Let go of the interpreter for a moment; called at least once in every half millisecond of work.

    Notes
    -----
    Python takes the interpreter away from a thread after 5 ms, and only if another one asks. The engine's thread asks
    many times in a forward step, so each of its waits must be short.
    """
    time.sleep(0)
