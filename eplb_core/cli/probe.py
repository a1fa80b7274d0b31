"""Probing backends and staging allocators, each in a process of its own, so that a crash or a hang stays there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

_TAIL_LINES = 3
_NONE = {"probe": "it has none"}

Kind = Literal["backend", "staging"]


def probe_all(names: Sequence[tuple[Kind, str]], *, device: str, limit_s: float) -> list[dict[str, Any]]:
    """Run the probes of backends and staging allocators, side by side.

    Parameters
    ----------
    names : sequence of (kind, str)
        What to probe.
    device : str
        ``torch.device.type`` of the weights.
    limit_s : float
        Seconds after which a probe is killed.

    Returns
    -------
    list of dict
        In that order: ``ok``, ``facts`` (str to str), ``problem`` (why not, or None) and ``seconds``.
    """
    if not names:
        return []
    # As many at a time as there are cores, so that none runs out of time because of the others.
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(lambda each: _probe(each[0], each[1], device, limit_s), names))


def _probe(kind: Kind, name: str, device: str, limit_s: float) -> dict[str, Any]:
    started = time.monotonic()
    try:
        # The answer comes through stdout, which the child sets aside before it imports anything that could print.
        done = subprocess.run(
            [sys.executable, "-m", "eplb_core.cli.probe", kind, name, device],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _result(started, problem=f"it had no answer after {limit_s:g} s and was killed")
    try:
        said = json.loads(done.stdout)
    except ValueError:
        tail = " / ".join(done.stderr.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:])
        return _result(started, problem=f"its process ended with status {done.returncode}{': ' * bool(tail)}{tail}")
    return _result(started, **said)


def _result(started: float, facts: dict[str, str] | None = None, problem: str | None = None) -> dict[str, Any]:
    seconds = round(time.monotonic() - started, 3)
    return {"ok": problem is None, "facts": facts or {}, "problem": problem, "seconds": seconds}


def _probe_here(kind: Kind, name: str, device: str) -> dict[str, Any]:
    """Import one backend or allocator and ask it; in the child."""
    from eplb_core.discovery.discover import discover
    from eplb_core.discovery.load import PluginRaisedError, contained, load_target
    from eplb_core.discovery.select import resolve
    from eplb_core.errors import EplbError

    try:
        if kind == "backend":
            info = resolve(discover(), "backend", name)
            options = load_target(info.options) if isinstance(info.options, str) else info.options
            backend = load_target(info.target)
            if not hasattr(backend, "probe"):  # probe is optional, as for the Communicator
                return {"facts": _NONE}
            facts = contained("its probe()", lambda: backend.probe(None if options is None else options()))
        else:
            import torch

            allocator = load_target(resolve(discover(), "staging", name).target)
            if not hasattr(allocator, "probe"):
                return {"facts": _NONE}
            facts = contained("its probe()", lambda: allocator.probe(torch.device(device)))
        return {"facts": {str(key): str(value) for key, value in facts.items()}}
    except PluginRaisedError as raised:  # the plugin's own error is the better text
        return {"problem": str(raised.__cause__ if isinstance(raised.__cause__, EplbError) else raised)}
    except EplbError as error:
        return {"problem": str(error)}


def main() -> None:
    """Probe the backend or allocator on the command line (kind, name, device type) and answer in JSON."""
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    kind: Kind = "backend" if sys.argv[1] == "backend" else "staging"
    answer = json.dumps(_probe_here(kind, *sys.argv[2:4]))
    with os.fdopen(answer_fd, "w", encoding="ascii") as pipe:
        pipe.write(answer)


if __name__ == "__main__":
    main()
