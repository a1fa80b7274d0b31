"""Names that one communicator at a time may have."""

from __future__ import annotations

import threading
import weakref

from eplb_core.errors import ConfigError


class Claims:
    """The names that are taken on one control plane; several threads may ask."""

    def __init__(self) -> None:
        self._holders: dict[str, weakref.ref[object] | None] = {}
        self._lock = threading.Lock()

    def take(self, name: str, holder: object) -> None:
        """Take a name until `give_back`, or until the holder given is gone; EPLB-C010 when it is taken."""
        with self._lock:
            if name in self._holders:
                held_by = self._holders[name]
                if held_by is None or held_by() is not None:
                    problem = f"a communicator named {name!r} is open on this control plane already"
                    raise ConfigError("EPLB-C010", problem=problem, detail="Close it first, or give this one a name=.")
            self._holders[name] = None if holder is None else weakref.ref(holder)

    def give_back(self, name: str, holder: object) -> None:
        """Give a name back, unless another holder has it; one that is not taken is no error."""
        with self._lock:
            held_by = self._holders.get(name)
            if holder is None or held_by is None or held_by() in (None, holder):
                self._holders.pop(name, None)
