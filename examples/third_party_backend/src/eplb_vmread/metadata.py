"""What a rank tells its peers: which process it is, on which host, how to know it again, and where its rows are."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_core.backend import Buffers, PeerMetadata
from eplb_core.errors import MetadataError
from eplb_vmread.hooks import NAME
from eplb_vmread.memory import ProcessMemory, Token
from eplb_vmread.permission import boot_id, pid_namespace


@dataclass(frozen=True, eq=False)
class Peer:
    """A peer's memory, and where the rows of each layer and tensor begin in it.

    Parameters
    ----------
    memory : ProcessMemory
        Of the process that it said it is.
    rows : list of array
        ``[num_layers]`` of ``[num_tensors]``, addresses.
    """

    memory: ProcessMemory
    rows: list[npt.NDArray[np.int64]]


def pack(buffers: Buffers, token: Token) -> bytes:
    """Return this rank's payload; OSError where /proc cannot be read."""
    identity = {"boot": boot_id(), "namespace": pid_namespace(), "pid": os.getpid()}
    known_by = {"token": token.value.hex(), "token_at": token.address}
    rows = {"rows": [[tensor.data_ptr() for tensor in layer] for layer in buffers.rows]}
    return json.dumps({**identity, **known_by, **rows}).encode()


def unpack(peer: PeerMetadata, own: bytes, buffers: Buffers) -> Peer:
    """Read a peer's payload; nothing of its memory is read yet.

    Parameters
    ----------
    peer : PeerMetadata
        From whom.
    own : bytes
        This rank's payload.
    buffers : Buffers
        What is registered here, and must be there.

    Raises
    ------
    MetadataError
        EPLB-M005, `pack` did not write it, or of other rows; EPLB-M004, it is of another host or PID namespace.
    """
    here = json.loads(own)
    try:
        theirs = json.loads(peer.payload)
        facts = {"host (boot id)": str(theirs["boot"]), "PID namespace": str(theirs["namespace"])}
        token = bytes.fromhex(theirs["token"])
        memory = ProcessMemory(int(theirs["pid"]), int(theirs["token_at"]), token)
        rows = [np.array(layer, np.int64) for layer in theirs["rows"]]
        if [len(layer) for layer in rows] != [len(layer) for layer in buffers.rows] or not token:
            raise ValueError("it lists other rows than are registered, or no token")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        problem = f"its metadata is not {NAME}'s ({error})"
        raise MetadataError("EPLB-M005", peer=peer.rank, problem=problem) from error
    for (field, remote), local in zip(facts.items(), (here["boot"], here["namespace"]), strict=True):
        if remote != local:
            raise MetadataError(
                "EPLB-M004",
                label=NAME,
                field=field,
                peer=peer.rank,
                local=local,
                remote=remote,
                detail=f"{NAME} reads processes by their number, which means nothing there: run the ranks on one host "
                "and in one PID namespace, or use another backend.",
            )
    return Peer(memory, rows)
