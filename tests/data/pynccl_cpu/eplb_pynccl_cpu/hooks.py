"""pynccl as it stands, but for CPU tensors, and those of the fake device, and only where the stub is to be loaded."""

from __future__ import annotations

import dataclasses
import os

import eplb_pynccl.hooks

from eplb_core import BackendInfo, hookimpl


def why_not() -> str | None:
    """Return why not: only the ranks of tests are given the stub."""
    return None if os.environ.get("EPLB_TEST_LIBNCCL") else "EPLB_TEST_LIBNCCL names no stub libnccl"


@hookimpl
def eplb_register_backends() -> BackendInfo:
    """Declare the backend."""
    return dataclasses.replace(
        eplb_pynccl.hooks.eplb_register_backends(),
        name="pynccl_cpu",
        target="eplb_pynccl_cpu.backend:CpuPyNcclBackend",
        device_types=("cpu", "eplbdev"),
        install_hint="",
        available=why_not,
    )
