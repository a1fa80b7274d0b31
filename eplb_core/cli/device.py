"""Which device types torch sees on this machine; torch is asked in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_LIMIT_S = 60.0
_SEEN, _NOT_SEEN, _UNKNOWN = "seen", "not seen", "unknown"


class UnknownDeviceTypeError(ValueError):
    """No device type of that name is known to torch."""


def likely_device_type() -> str:
    """Return "cuda" when there is a GPU's device file, else "cpu"; asking torch would import it."""
    return "cuda" if any(Path(file).exists() for file in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")) else "cpu"


def why_no_device(device_type: str) -> str | None:
    """Return why weights cannot be on a device type here, or None.

    Parameters
    ----------
    device_type : str
        Such as "cuda". For "cpu", which is everywhere, torch is not asked.

    Returns
    -------
    str or None
        The reason.

    Raises
    ------
    UnknownDeviceTypeError
        torch knows no such type.
    """
    if device_type == "cpu":
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-m", "eplb_core.cli.device", device_type],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=_LIMIT_S,
            check=False,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"torch did not say within {_LIMIT_S:g} s whether it sees a {device_type} device"
    if done.stdout == _UNKNOWN:
        raise UnknownDeviceTypeError(f"{device_type!r} is not a device type that torch knows")
    if done.stdout == _NOT_SEEN:
        return f"torch sees no {device_type} device here"
    return None if done.stdout == _SEEN else f"torch failed when it was asked for {device_type} devices"


def _ask_torch(device_type: str) -> str:
    """Ask for the number of devices, which needs no context on them; runs in the child."""
    import torch

    try:
        torch.device(device_type)
    except RuntimeError:  # raised by torch for an unknown type
        return _UNKNOWN
    try:
        return _SEEN if torch.get_device_module(device_type).device_count() else _NOT_SEEN
    except (RuntimeError, AttributeError):  # a type that this build does not implement
        return _NOT_SEEN


def main() -> None:
    """Answer for the device type named on the command line."""
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    answer = _ask_torch(sys.argv[1])
    with os.fdopen(answer_fd, "w", encoding="ascii") as pipe:
        pipe.write(answer)


if __name__ == "__main__":
    main()
