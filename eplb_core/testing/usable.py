"""Whether a backend can be examined on this machine, so that it is not blamed for what the machine lacks."""

from __future__ import annotations

import torch

from eplb_core.backend import BackendInfo
from eplb_core.discovery.usable import first_rejection, need_of


def device_for(info: BackendInfo, asked: str | None = None) -> str:
    """Return the device type of the weights: the one asked for, else cpu, else the first declared that is here.

    Parameters
    ----------
    info : BackendInfo
        What the plugin declares.
    asked : str or None
        A ``torch.device.type``.

    Returns
    -------
    str
        Device type; the first declared one when none of them is here.
    """
    if asked is not None:
        return asked
    if "*" in info.device_types or "cpu" in info.device_types:
        return "cpu"
    return next((name for name in info.device_types if _is_here(name)), info.device_types[0])


def why_not_here(info: BackendInfo, device_type: str | None = None) -> str | None:
    """Say why the kit cannot be run on a backend on this machine, or None.

    Parameters
    ----------
    info : BackendInfo
        What the plugin declares: its device types, ``requires`` and ``available`` are asked, in this order.
    device_type : str or None
        Asked for; None is the kit's choice.

    Returns
    -------
    str or None
        One line.
    """
    device = device_for(info, device_type)
    rejection = first_rejection(info, need_of(False, device, False))
    if rejection is not None:
        hint = f". To install: {info.install_hint}" if rejection.rule == "available" and info.install_hint else ""
        verb = " is not usable here" if rejection.rule == "available" else ""
        return f"{info.name}{verb}: {rejection.reason}{hint}"
    if not _is_here(device):
        return f"{info.name} was to move weights on {device}, and torch has no such device here"
    return None


def _is_here(device_type: str) -> bool:
    """Does torch see such a device here? Does not initialise it, which is left to the ranks."""
    kind = device_type.partition(":")[0]
    if kind == "cpu":
        return True
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return False
    return bool(getattr(module, "is_available", lambda: False)())
