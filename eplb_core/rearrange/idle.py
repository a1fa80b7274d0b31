"""In the place of a backend, where there are no layers: a pipeline stage without MoE layers moves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from eplb_core.backend import Buffers, ConnectReceipt, LocalMetadata, PeerMetadata, TransferPlan, TransferReceipt
from eplb_core.hookspecs import hookimpl


class IdleBackend:
    """Registers nothing and connects to nobody; the members meet and agree as everywhere, on nothing.

    Notes
    -----
    So a rank that has no layers by mistake is named by the comparison of records, and the chosen backend's library is
    not loaded where nothing moves.
    """

    landing_layout: ClassVar[str] = "rows"
    landing_device: ClassVar[str] = "weights"
    needs_progress: ClassVar[bool] = False

    def __init__(self, options: Any, context: object) -> None: ...

    @hookimpl
    def register_buffers(self, buffers: Buffers) -> LocalMetadata:
        del buffers
        return LocalMetadata(b"")

    @hookimpl
    def exchange_metadata(self, local: LocalMetadata, peers: Sequence[PeerMetadata]) -> ConnectReceipt:
        del local
        return ConnectReceipt(tuple(peer.rank for peer in peers))

    @hookimpl
    def transfer(self, plan: TransferPlan) -> object:
        return plan

    @hookimpl
    def wait(self, handle: object, timeout_s: float) -> TransferReceipt:
        del handle, timeout_s
        return TransferReceipt(0, 0)

    def progress(self) -> None:
        """There is none to make."""

    def abort(self, handle: object, reason: str) -> bool:
        """Nothing is in flight."""
        del handle, reason
        return True

    def close(self, force: bool = False) -> bool:
        """Nothing is held."""
        del force
        return True
