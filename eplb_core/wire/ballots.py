"""Ballots and decisions on the wire."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eplb_core.errors import EplbError, MetadataError, error_for

MAX_EVIDENCE_NBYTES = 64 << 10
MAX_TEXT_NCHARS = 4 << 10
"""Characters of each text of an error that is sent; longer ones are cut."""


@dataclass(frozen=True)
class Ballot:
    """What one rank says in a vote.

    Parameters
    ----------
    ok : bool
        True for commit.
    error : EplbError or None
        Why this rank votes for abort; every rank then raises this error.
    content : Mapping
        JSON-able facts for the rank that decides (node, drained ...).
    evidence : Mapping[str, bytes]
        What observers attached, by observer name; at most 64 KiB in all.
    cast_at_s : float
        Wall clock of the caster, for "last seen" texts.
    """

    ok: bool
    error: EplbError | None = None
    content: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, bytes] = field(default_factory=dict)
    cast_at_s: float = 0.0


@dataclass(frozen=True)
class Decision:
    """What stands in the decision key.

    Parameters
    ----------
    commit : bool
        The outcome.
    by : int
        The rank that wrote it.
    error : EplbError or None
        Why it was aborted.
    fatal : bool
        A peer is dead or stalled and will not answer again, so no rank is asked whether it drained.
    content : Mapping
        Facts merged from the ballots, by rank.
    """

    commit: bool
    by: int
    error: EplbError | None = None
    fatal: bool = False
    content: Mapping[str, Any] = field(default_factory=dict)


def encode_error(error: EplbError) -> dict[str, Any]:
    """Return an error as JSON-able data: code, values, fields and detail, each text cut to `MAX_TEXT_NCHARS`."""
    return {
        "code": error.code,
        "values": [_plain(value) for value in error.values],
        "fields": {key: _plain(value) for key, value in error.fields.items()},
        "detail": _cut(error.detail),
    }


def decode_error(data: Mapping[str, Any]) -> EplbError:
    """Build the error that `encode_error` wrote, in its class."""
    return error_for(data["code"], *data["values"], detail=data["detail"], **data["fields"])


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, bool)) or value is None else _cut(str(value))


def _cut(text: str) -> str:
    # A library's text may have any length; it must not keep the reason for an abort from being sent.
    left_out = len(text) - MAX_TEXT_NCHARS
    return text if left_out <= 0 else f"{text[:MAX_TEXT_NCHARS]} ... ({left_out} characters more)"


def encode_ballot(ballot: Ballot) -> bytes:
    """Encode a ballot: a line of JSON, then the evidence as it is."""
    evidence = b"".join(ballot.evidence.values())
    if len(evidence) > MAX_EVIDENCE_NBYTES:
        raise MetadataError(
            "EPLB-M005", peer="this rank", problem=f"evidence of {len(evidence)} bytes, {MAX_EVIDENCE_NBYTES} allowed"
        )
    head = {
        "ok": ballot.ok,
        "at": ballot.cast_at_s or time.time(),
        "error": encode_error(ballot.error) if ballot.error else None,
        "content": dict(ballot.content),
        "evidence": {name: len(value) for name, value in ballot.evidence.items()},
    }
    return json.dumps(head).encode() + b"\n" + evidence


def decode_ballot(body: bytes) -> Ballot:
    """Decode what `encode_ballot` made; anything else is refused (EPLB-M005)."""
    raw, _, evidence = body.partition(b"\n")
    with _Refusing("ballot"):
        head = json.loads(raw)
        parts, start = {}, 0
        for name, size in head["evidence"].items():
            parts[str(name)] = evidence[start : start + int(size)]
            start += int(size)
        error = decode_error(head["error"]) if head["error"] else None
        return Ballot(bool(head["ok"]), error, dict(head["content"]), parts, float(head["at"]))


def encode_decision(decision: Decision) -> bytes:
    """Encode a decision as JSON."""
    return json.dumps(
        {
            "commit": decision.commit,
            "by": decision.by,
            "error": encode_error(decision.error) if decision.error else None,
            "fatal": decision.fatal,
            "content": dict(decision.content),
        }
    ).encode()


def decode_decision(body: bytes) -> Decision:
    """Decode what `encode_decision` made; anything else is refused (EPLB-M005)."""
    with _Refusing("decision"):
        data = json.loads(body)
        error = decode_error(data["error"]) if data["error"] else None
        return Decision(bool(data["commit"]), int(data["by"]), error, bool(data["fatal"]), dict(data["content"]))


class _Refusing:
    """Turns any exception that a malformed body causes into the typed refusal."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KeyError, ValueError, TypeError, AttributeError, IndexError)):
            problem = f"malformed {self._kind}: {error!r}"
            raise MetadataError("EPLB-M005", peer="unknown", problem=problem) from error
