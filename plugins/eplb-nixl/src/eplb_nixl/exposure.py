"""What of this rank's memory its peers may read: live weights or send buffers, registered, and described to them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from eplb_core.backend import BackendContext, Buffers
from eplb_core.errors import MetadataError
from eplb_nixl.agent import Agent
from eplb_nixl.landing import Landing
from eplb_nixl.metadata import SourceRecord
from eplb_nixl.outbox import Outbox
from eplb_nixl.registration import cannot_be_exported, memory_type_of, pieces_of, register
from eplb_nixl.warmup import WarmUp

logger = logging.getLogger(__name__)

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
        EPLB-M001, naming a tensor that cannot be registered.
    NixlError
        NIXL fails otherwise.
    """
    live = [
        (f"layer {layer} tensor {number}", rows)
        for layer, tensors in enumerate(buffers.rows)
        for number, rows in enumerate(tensors)
    ]
    mode, reason = (wanted, "asked for") if wanted != "auto" else _choose(agent, live)
    outbox = Outbox(context, buffers.rows) if mode == "staged" else None
    if outbox is None:
        exported = live
        bases = np.array([[rows.data_ptr() for _, rows in live]], np.uint64)
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
    )
    using = f", send buffers from {type(context.staging).__name__}" if outbox is not None else ""
    logger.info("nixl rank %d: mode %s (%s)%s", context.rank, mode, reason, using)
    return Exposure(mode, reason, outbox, warm_up, record)


def _choose(agent: Agent, live: list[tuple[str, torch.Tensor]]) -> tuple[Mode, str]:
    """Choose zero-copy where the live weights can be registered and read where they lie."""
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
