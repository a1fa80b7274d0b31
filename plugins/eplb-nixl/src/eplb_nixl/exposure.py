"""What of this rank's memory its peers may read: live weights or send buffers, registered, and described to them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from eplb_core.backend import BackendContext, Buffers, RowList
from eplb_core.errors import MetadataError
from eplb_nixl.agent import Agent
from eplb_nixl.landing import Landing
from eplb_nixl.memory import live_tensors
from eplb_nixl.metadata import AddressArray, SourceRecord
from eplb_nixl.outbox import Outbox
from eplb_nixl.registration import cannot_be_exported, memory_type_of, pieces_of, register
from eplb_nixl.warmup import WarmUp

logger = logging.getLogger(__name__)

_MOST_PIECES = 1000

Mode = Literal["zero_copy", "staged"]


@dataclass(frozen=True, eq=False)
class Exposure:
    """The result of `expose`.

    Parameters
    ----------
    mode : {"zero_copy", "staged"}
        How rows are read.
    reason : str
        Why so.
    outbox : Outbox or None
        Send buffers of a staged source.
    warm_up : WarmUp
        What first READs read, and those of this rank.
    record : SourceRecord
        For the peers.
    """

    mode: Mode
    reason: str
    outbox: Outbox | None
    warm_up: WarmUp
    record: SourceRecord


def expose(
    agent: Agent,
    context: BackendContext,
    wanted: Literal["auto", "zero_copy", "staged"],
    buffers: Buffers,
    landing: Landing,
) -> Exposure:
    """Register what peers read and where this rank lands what it reads.

    Parameters
    ----------
    agent : Agent
        Agent that registers the memory.
    context : BackendContext
        Gives the memory, and the allocator of send buffers.
    wanted : {"auto", "zero_copy", "staged"}
        Mode that the options ask for.
    buffers : Buffers
        Live rows.
    landing : Landing
        Landing memory.

    Returns
    -------
    Exposure

    Raises
    ------
    MetadataError
        EPLB-M001, naming a tensor that cannot be registered, or of weights too scattered for zero-copy.
    NixlError
        NIXL fails otherwise.
    """
    live = list(live_tensors(buffers))
    by_row = any(isinstance(rows, RowList) for layer in buffers.rows for rows in layer)
    scattered = _too_scattered(live) if by_row else ""
    if scattered and wanted == "zero_copy":
        raise MetadataError("EPLB-M001", key=live[0][0], problem=f"with mode zero_copy, {scattered}")
    mode, reason = (wanted, "asked for") if wanted != "auto" else _choose(agent, live, scattered)
    outbox = Outbox(context, buffers.rows) if mode == "staged" else None
    if outbox is None:
        exported = live
        bases = _addresses(buffers)
    else:
        exported = [(f"send buffer {slot}", buffer) for slot, buffer in enumerate(outbox.buffers)]
        bases = outbox.bases()
    device = exported[0][1].device
    warm_up = WarmUp(agent, context.world_size, device)
    pieces = pieces_of(
        [*exported, ("the warm-up buffer", warm_up.shown)],
        [*landing.tensors(), ("the warm-up landing", warm_up.landing)],
    )
    register(agent, pieces)
    slow = cannot_be_exported(piece for piece in pieces if piece.exported)
    if slow:
        logger.warning(
            "nixl rank %d will be read over TCP where RDMA or NVLink would do: %s. Set staging to an allocator of "
            "plain device memory (cupy_device of eplb-cupy), with mode auto or staged.",
            context.rank,
            slow,
        )
    readable = [piece.memory for piece in pieces if piece.exported]
    record = SourceRecord(
        rank=context.rank,
        agent_name=agent.name,
        library_version=agent.library.version,
        mode=mode,
        memory_type=memory_type_of(device),
        device_index=readable[0].device_index,
        bases=bases,
        warm_address=warm_up.shown.data_ptr(),
        agent_metadata=agent.metadata(readable),
        by_row=by_row and outbox is None,
    )
    using = f", send buffers from {type(context.staging).__name__}" if outbox is not None else ""
    logger.info("nixl rank %d: mode %s (%s)%s", context.rank, mode, reason, using)
    return Exposure(mode, reason, outbox, warm_up, record)


def _addresses(buffers: Buffers) -> AddressArray:
    """Return where each tensor's rows start, ``[1, num_tensors]``; where rows lie apart, each of them, by tensor."""
    tensors = [rows for layer in buffers.rows for rows in layer]
    if not any(isinstance(rows, RowList) for rows in tensors):
        return np.array([[rows.data_ptr() for rows in tensors]], np.uint64)
    return np.array([[row.data_ptr() for rows in tensors if rows.shape[1] for row in rows.unbind(0)]], np.uint64)


def _too_scattered(live: list[tuple[str, torch.Tensor]]) -> str:
    """Say so where NIXL's description of the memory, some 45 bytes a piece, would not fit metadata any more."""
    num_pieces = len(pieces_of(live))
    if num_pieces <= _MOST_PIECES:
        return ""
    return f"experts in tensors of their own make {num_pieces} pieces of memory, more than {_MOST_PIECES}"


def _choose(agent: Agent, live: list[tuple[str, torch.Tensor]], scattered: str = "") -> tuple[Mode, str]:
    """Choose zero-copy where the live weights can be registered and read where they lie."""
    if scattered:
        return "staged", scattered
    pieces = pieces_of(live)
    hindrance = cannot_be_exported(pieces)
    if hindrance:
        return "staged", hindrance
    try:
        register(agent, pieces)
    except MetadataError as error:
        return "staged", str(error)
    finally:
        agent.deregister_all()
    return "zero_copy", "the live weights can be registered"
