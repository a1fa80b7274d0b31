"""Probing backends: each runs its own ``probe()`` in a process of its own, so that a crash or a hang stays there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

_TAIL_LINES = 3


def probe_all(names: Sequence[str], *, limit_s: float) -> dict[str, dict[str, Any]]:
    """Run the probes of backends, all at once.

    Parameters
    ----------
    names : sequence of str
        Backends to probe.
    limit_s : float
        Seconds after which a probe that still runs is killed.

    Returns
    -------
    dict of str to dict
        By name: ``ok``, ``facts`` (str to str), ``problem`` (why not, or None) and ``seconds``.
    """
    started = time.monotonic()
    running = {name: _start(name) for name in names}
    return {name: _finish(process, started, limit_s) for name, process in running.items()}


def _start(name: str) -> subprocess.Popen[bytes]:
    # The answer comes through stdout, which the child sets aside before it imports anything that could print.
    return subprocess.Popen(
        [sys.executable, "-m", "eplb_core.cli.probe", name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _finish(process: subprocess.Popen[bytes], started: float, limit_s: float) -> dict[str, Any]:
    try:
        answer, noise = process.communicate(timeout=max(0.0, limit_s - (time.monotonic() - started)))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return _result(started, problem=f"it had no answer after {limit_s:g} s and was killed")
    finally:
        if process.poll() is None:  # Ctrl-C
            process.kill()
    try:
        said = json.loads(answer)
    except ValueError:
        tail = " / ".join(noise.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:])
        return _result(started, problem=f"its process ended with status {process.returncode}{': ' * bool(tail)}{tail}")
    return _result(started, **said)


def _result(started: float, facts: dict[str, str] | None = None, problem: str | None = None) -> dict[str, Any]:
    seconds = round(time.monotonic() - started, 3)
    return {"ok": problem is None, "facts": facts or {}, "problem": problem, "seconds": seconds}


def _probe_here(name: str) -> dict[str, Any]:
    """Import one backend and ask it; in the child."""
    from eplb_core.declaration import PluginRaisedError, contained
    from eplb_core.discovery import discover, load_target
    from eplb_core.errors import EplbError
    from eplb_core.selection import resolve

    try:
        info = resolve(discover(), "backend", name)
        options = load_target(info.options) if isinstance(info.options, str) else info.options
        backend = load_target(info.target)
        facts = contained("its probe()", lambda: backend.probe(None if options is None else options()))
        return {"facts": {str(key): str(value) for key, value in facts.items()}}
    except (EplbError, PluginRaisedError) as error:
        return {"problem": str(error)}


def main() -> None:
    """Probe the backend named on the command line and answer in JSON."""
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    answer = json.dumps(_probe_here(sys.argv[1]))
    with os.fdopen(answer_fd, "w", encoding="ascii") as pipe:
        pipe.write(answer)


if __name__ == "__main__":
    main()
