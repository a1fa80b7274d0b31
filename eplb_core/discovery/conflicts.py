"""Names that more than one distribution claims: how they are found, and the error for one (EPLB-D002)."""

from __future__ import annotations

from collections.abc import Iterable

from eplb_core.discovery.catalog import Origin, same_release
from eplb_core.discovery.load import Info
from eplb_core.errors import DiscoveryError

Claims = dict[tuple[str, str], list[tuple[Origin, Info]]]
"""By (kind, name): every origin that offers it, and its descriptor."""


def claim(claims: Claims, kind: str, info: Info, origin: Origin) -> None:
    """Add an offer, once for a hook module that stands behind two entry points of one release."""
    others = claims.setdefault((kind, info.name), [])
    if not any(same_release(known, origin) and offer == info for known, offer in others):
        others.append((origin, info))


def conflicts_of(claims: Claims) -> dict[tuple[str, str], tuple[Origin, ...]]:
    """Return the names with more than one claimant, ascending, and their claimants."""
    return {key: tuple(origin for origin, _ in offers) for key, offers in sorted(claims.items()) if len(offers) > 1}


def conflict_error(kind: str, name: str, claimants: Iterable[Origin]) -> DiscoveryError:
    """Build EPLB-D002, the error of a name that more than one distribution claims."""
    title = {"backend": "Backend", "staging": "Staging allocator", "policy": "Policy"}[kind]
    listed = " and ".join(str(claimant) for claimant in claimants)
    return DiscoveryError("EPLB-D002", kind=title, name=name, claimants=listed, detail="pip uninstall all but one.")
