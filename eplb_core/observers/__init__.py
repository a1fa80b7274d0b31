"""Observers: each watches one communicator's calls to its backend; given as ``observers=[...]``.

`Observer` is the base of your own; `ChromeTrace`, `Stats` and `Checksums` are ready to use;
`eplb_core.observers.prometheus` exports `Stats`; `eplb_core.testing.faults` injects faults.
"""

from __future__ import annotations

from eplb_core.observers.base import Observer, Step
from eplb_core.observers.checksums import Checksums
from eplb_core.observers.stats import Stats
from eplb_core.observers.trace import ChromeTrace, merge_traces

__all__ = ["Checksums", "ChromeTrace", "Observer", "Stats", "Step", "merge_traces"]
