"""Which transports UCX may use when some are required: settled before UCX chooses, for it cannot be asked after."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from eplb_nixl.library import NixlError


def restriction(required: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the one transport to hand to UCX, or nothing when the environment restricts it already.

    NIXL offers no way to ask which transport carried a READ, so the answer is made certain instead: with no other
    transport to choose, UCX either uses what is required or fails.

    Parameters
    ----------
    required : sequence of str
        Names as UCX_TLS takes them; empty requires nothing.
    environment : mapping of str to str
        Read, never written.

    Returns
    -------
    str
        For UCX's setting ``TLS``; empty to leave it alone.

    Raises
    ------
    NixlError
        UCX would be free to use another transport; the message says what to set.
    """
    if not required:
        return ""
    remedy = f"start every rank with UCX_TLS={','.join(required)}"
    given = environment.get("UCX_TLS")
    if given is None:
        if len(required) == 1:
            return required[0]
        raise NixlError(f"require_transport names several, and UCX takes a list from the environment only: {remedy}")
    others = [name for name in given.split(",") if name not in required]
    if others:
        raise NixlError(f"UCX_TLS={given} allows {', '.join(others)}, which require_transport does not name: {remedy}")
    return ""
