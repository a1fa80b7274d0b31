"""Does NIXL work on this machine? Versions, memory types, and, where a transport is required, a READ over it."""

from __future__ import annotations

import logging
import os
import secrets
import time

import numpy as np
import torch

from eplb_nixl.agent import Agent, Memory
from eplb_nixl.descriptors import blocks_of
from eplb_nixl.library import Library, NixlError, load_library, loaded_ucp, ucx_version
from eplb_nixl.options import NixlOptions
from eplb_nixl.registration import cannot_be_exported, device_index_of, memory_type_of, pieces_of
from eplb_nixl.transport import restriction

logger = logging.getLogger(__name__)

NBYTES = 4096
READ_LIMIT_S = 10.0
_SAMPLE_NBYTES = 32 << 20


def probe(options: NixlOptions) -> dict[str, str]:
    """Import NIXL, create what the options ask for, try it.

    Parameters
    ----------
    options : NixlOptions
        As for the backend.

    Returns
    -------
    dict of str to str
        Facts to show: nixl, ucx, libucp, backends, memory types, live weights, transport.

    Raises
    ------
    NixlError
        NIXL does not load, a backend cannot be created, host memory cannot be registered, or the required transport
        does not work; the message says which and what to do.
    """
    library = load_library()
    transport = restriction(options.require_transport)
    held: list[torch.Tensor] = []  # registered memory outlives its agent
    prefix = f"eplb-probe-{os.getpid()}-{secrets.token_hex(4)}"
    source = _agent(library, f"{prefix}-source", options, transport)
    try:
        facts = {
            "nixl": f"{library.version} ({library.module})",
            **_ucx_facts(),
            "backends": ", ".join(options.backends),
            "memory types": _memory_facts(source, held),
            "live weights": live_weights(options),
        }
        if options.require_transport:
            reader = _agent(library, f"{prefix}-reader", options, transport)
            try:
                facts["transport"] = _read(source, reader, options, held)
            finally:
                reader.close()
    finally:
        source.close()
    return facts


def _agent(library: Library, name: str, options: NixlOptions, transport: str) -> Agent:
    try:
        return Agent(library, name, backends=options.backends, transport=transport)
    except NixlError as error:
        needed = ", ".join(options.require_transport)
        raise NixlError(f"{error} (required transport: {needed})" if needed else str(error)) from error


def _ucx_facts() -> dict[str, str]:
    paths = loaded_ucp()
    if len(paths) > 1:
        logger.warning(
            "Two UCX libraries are loaded in this process, which may mix their state: %s. Keep one: for instance "
            "uninstall ucx-py or libucx, or take HPC-X out of LD_LIBRARY_PATH.",
            " and ".join(paths),
        )
    if not paths:
        return {}
    return {"ucx": ", ".join(ucx_version(path) for path in paths), "libucp": ", ".join(paths)}


def _memory_facts(agent: Agent, held: list[torch.Tensor]) -> str:
    """Register a page of host memory and, where torch has a CUDA or ROCm device, one of its memory."""
    host = torch.zeros(NBYTES, dtype=torch.uint8)
    held.append(host)
    agent.register(_memory(host))
    if not torch.cuda.is_available():
        return "DRAM (torch sees no GPU)"
    try:
        device = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
        held.append(device)
        agent.register(_memory(device))
    except (NixlError, RuntimeError) as error:
        return f"DRAM; VRAM not: {error}"
    return "DRAM, VRAM"


def live_weights(options: NixlOptions, device: str = "cuda", driver: str = "libcuda.so.1") -> str:
    """Say whether peers can read memory as torch allocates it here where it lies, and what comes of it.

    Parameters
    ----------
    options : NixlOptions
        ``mode`` is read.
    device : str
        Where to allocate a little memory; without a GPU there is only host memory, which can always be read.
    driver : str
        See `eplb_nixl.registration.cannot_be_exported`.

    Returns
    -------
    str
    """
    if device == "cpu" or (device == "cuda" and not torch.cuda.is_available()):
        return "in host memory, which is read where it lies"
    try:
        # As large as a block of its own: small ones share a segment that may be of another kind.
        sample = torch.empty(_SAMPLE_NBYTES, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        return f"no device memory to try: {error}"
    hindrance = cannot_be_exported(pieces_of([("torch's memory", sample)]), driver)
    if hindrance is None:
        return "in device memory as torch allocates it here, which can be registered and read where it lies"
    staged = "mode auto copies rows into send buffers first" if options.mode == "auto" else f"mode is {options.mode}"
    return f"cannot be registered for RDMA or NVLink: {hindrance}; {staged}, which staging='cupy_device' keeps off TCP"


def _read(source: Agent, reader: Agent, options: NixlOptions, held: list[torch.Tensor]) -> str:
    given = torch.arange(NBYTES, dtype=torch.int64).to(torch.uint8)
    taken = torch.zeros_like(given)
    held += [given, taken]
    for agent, tensor in ((source, given), (reader, taken)):
        agent.register(_memory(tensor))
    peer = reader.add_peer(source.metadata([_memory(given)]))
    first = np.zeros(1, np.int32)
    local, remote = (
        reader.prepare(whose, blocks_of(np.array([tensor.data_ptr()], np.uint64), np.array([NBYTES]), 1, 0), "DRAM")
        for whose, tensor in ((None, taken), (peer, given))
    )
    read = reader.make_read(local, first, remote, first)
    limit = time.monotonic() + READ_LIMIT_S
    state = reader.post(read)
    while state == "PROC" and time.monotonic() < limit:
        source.progress()
        state = reader.state(read)
    needed = ", ".join(options.require_transport)
    if state != "DONE" or not torch.equal(given, taken):
        raise NixlError(f"a READ over {needed} did not complete within {READ_LIMIT_S:.0f} s (state={state})")
    return f"{needed} (UCX has no other to choose from; a READ of {NBYTES} bytes succeeded)"


def _memory(tensor: torch.Tensor) -> Memory:
    return Memory(tensor.data_ptr(), tensor.numel(), memory_type_of(tensor.device), device_index_of(tensor.device))
