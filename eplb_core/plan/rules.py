"""The rules that both ends of a move share: how moves are cut into messages and batches, and where they land."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from eplb_core.errors import PlanError

if TYPE_CHECKING:
    from eplb_core.backend import Backend, BackendInfo
    from eplb_core.config import EPLBConfig


@dataclass(frozen=True)
class TransferRules:
    """The rules by which every rank works out the same `TransferPlan` of a layer.

    Parameters
    ----------
    landing_layout : {"rows", "packed_by_peer"}
        ``"rows"``: a row lands at ``geometry.offsets[tensor] + row * nbytes``, every row is a message.
        ``"packed_by_peer"``: per receiver, sources and their messages follow one another, each message 64-byte
        aligned. Of each (source, destination) pair the packed rows are one message, number 0, and every other row
        is one of its own. A row is packed when it is small and its source still has room: one slot of
        ``geometry.nbytes_rows`` holds each distinct row once, what then remains goes to small rows that leave
        for a further receiver, in canonical order, until one does not fit.
    coalesce_nbytes : int
        Rows of fewer bytes are small ("packed_by_peer" only); 0 packs nothing.
    max_ops_per_batch : int or None
        Cut the moves into batches: each one goes, in canonical order, into the first batch in which both its ends
        have fewer sends and receives than this. None puts all into batch 0.
    one_peer_per_batch : bool
        Where moves are cut into batches, at most one peer per rank and batch.

    Raises
    ------
    PlanError
        EPLB-P007, a value is out of range.

    Examples
    --------
    >>> TransferRules("packed_by_peer", coalesce_nbytes=1 << 18).max_ops_per_batch is None
    True
    """

    landing_layout: Literal["rows", "packed_by_peer"]
    coalesce_nbytes: int = 0
    max_ops_per_batch: int | None = None
    one_peer_per_batch: bool = False

    def __post_init__(self) -> None:
        if self.landing_layout not in {"rows", "packed_by_peer"}:
            raise PlanError("EPLB-P007", problem=f"landing_layout is {self.landing_layout!r}")
        if self.max_ops_per_batch is not None and self.max_ops_per_batch < 1:
            raise PlanError("EPLB-P007", problem=f"max_ops_per_batch is {self.max_ops_per_batch}")

    @classmethod
    def of(cls, backend: Backend, info: BackendInfo, config: EPLBConfig) -> TransferRules:
        """Return the rules of a backend as it declares itself, with the batches of a configuration.

        Parameters
        ----------
        backend : Backend
            For its landing layout and the rows that it packs.
        info : BackendInfo
            Declaration of the backend; it says whether batches are needed.
        config : EPLBConfig
            How large batches are.

        Returns
        -------
        TransferRules
            Of every layer.
        """
        return cls(
            backend.landing_layout,
            int(getattr(backend, "coalesce_nbytes", 0)),
            config.max_ops_per_batch if info.batched else None,
            config.enable_migration_batching,
        )
