"""Declarations of a plugin's backends, staging allocators and policies; read without importing any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # discovery reads descriptors; it must not pay for torch, numpy or pydantic
    from pydantic import BaseModel


API_VERSION = 1
"""Version of the plugin contract; a plugin declares the one it was written for."""


@dataclass(frozen=True)
class BackendInfo:
    """Declaration of a backend; read without importing the backend.

    Parameters
    ----------
    name : str
        Name that hosts write into ``EPLBConfig.communicator``; also the entry point's name.
    summary : str
        One line for ``eplb backends``.
    api_version : int
        `API_VERSION` of the contract the backend was written for.
    target : str
        ``"module:Class"``, imported only when the backend is chosen.
    options : type[pydantic.BaseModel] or str or None
        Options model or its ``"module:Class"``; None takes no options.
    async_safe : bool or None
        May transfers run from a worker thread beside the model's own kernels? None is undeclared, treated as unsafe.
    async_reason : str
        Reason why not, as the error shows it ("NCCL multi-stream conflicts").
    label : str
        Leading word of its errors; the name when empty.
    device_types : tuple of str
        ``torch.device.type`` of the weights it moves; ``("*",)`` is any.
    elastic_safe : bool
        May ranks join after connect?
    zero_copy : bool
        Does it read live rows without a copy in between?
    batched : bool
        Does it need moves cut into batches of at most ``max_ops_per_batch`` operations?
    auto_priority : int or None
        The automatic choice takes the highest; with None the backend is taken only when named.
    requires : tuple of str
        Importable modules without which it is not usable.
    install_hint : str
        Command that makes it usable.
    available : callable
        Import-light (find_spec, dlopen); returns None when usable on this machine, else why not. ``select`` calls no
        other code.
    landing_layout : {"rows", "packed_by_peer"} or None
        What the class declares, for hosts that ask before they choose: only "rows" takes a host's own landing memory.
        None is undeclared here.
    """

    name: str
    summary: str
    api_version: int
    target: str
    options: type[BaseModel] | str | None = None
    async_safe: bool | None = None
    async_reason: str = ""
    label: str = ""
    device_types: tuple[str, ...] = ("cpu",)
    elastic_safe: bool = False
    zero_copy: bool = False
    batched: bool = False
    auto_priority: int | None = None
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    available: Callable[[], str | None] | None = None
    landing_layout: Literal["rows", "packed_by_peer"] | None = None


@dataclass(frozen=True)
class StagingInfo:
    """Declaration of a staging allocator.

    Parameters
    ----------
    name : str
        Name for ``EPLBConfig.staging``.
    summary : str
        One line for ``eplb backends``.
    api_version : int
        See `BackendInfo`.
    target : str
        ``"module:Class"`` of a `StagingAllocator`.
    device_types : tuple of str
        Device types its memory can stage for; ``("*",)`` is any.
    memory : {"host", "device", "any"}
        Kind of its memory: on the host, on the weights' device, or on either, as requested. Naming an allocator of one
        kind for a backend that stages in the other is a `ConfigError`.
    requires : tuple of str
        See `BackendInfo`.
    install_hint : str
        See `BackendInfo`.
    available : callable
        See `BackendInfo`.
    """

    name: str
    summary: str
    api_version: int
    target: str
    device_types: tuple[str, ...] = ("*",)
    memory: Literal["host", "device", "any"] = "host"
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    available: Callable[[], str | None] | None = None


@dataclass(frozen=True)
class PolicyInfo:
    """Declaration of a placement policy.

    Parameters
    ----------
    name : str
        Name for ``EPLBConfig.policy``.
    summary : str
        One line.
    api_version : int
        See `BackendInfo`.
    target : str
        ``"module:function"``; see `eplb_core.balancing.placement.rebalance_experts` for the signature.
    requires : tuple of str
        See `BackendInfo`.
    install_hint : str
        See `BackendInfo`.
    available : callable
        See `BackendInfo`.
    worthwhile_gain : float or None
        What balancedness (mean over maximum of the ranks' tokens) a layer must gain for its weights to be moved; layers
        that gain less stay as they are. None moves whatever the policy returns.
    """

    name: str
    summary: str
    api_version: int
    target: str
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    available: Callable[[], str | None] | None = None
    worthwhile_gain: float | None = None
