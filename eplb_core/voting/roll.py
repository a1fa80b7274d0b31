"""The messages of a meeting: each rank's post, the roll, and a rank's vote on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from eplb_core.control.process import ProcessIdentity
from eplb_core.errors import EplbError
from eplb_core.voting.vote import Tally, Vote
from eplb_core.wire.ballots import Ballot, decode_error, encode_error


@dataclass(frozen=True)
class Post:
    """What a rank posts when it comes to a meeting.

    Parameters
    ----------
    nonce : str
        Nonce of this attempt to meet.
    members : tuple of int
        Ranks that its host told it to meet.
    epoch : int
        The last epoch that it took part in; 0 for none.
    process : ProcessIdentity
        Identity of the process that posts.
    refusal : EplbError or None
        Reason why it cannot take part, or None.
    """

    nonce: str
    members: tuple[int, ...]
    epoch: int
    process: ProcessIdentity
    refusal: EplbError | None = None

    def to_bytes(self) -> bytes:
        """Encode it."""
        document = {
            "nonce": self.nonce,
            "members": self.members,
            "epoch": self.epoch,
            "process": self.process.to_json(),
            "refusal": encode_error(self.refusal) if self.refusal else None,
        }
        return json.dumps(document).encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> Post:
        """Decode what `to_bytes` made."""
        data = json.loads(body)
        refusal = decode_error(data["refusal"]) if data["refusal"] else None
        members = tuple(int(rank) for rank in data["members"])
        process = ProcessIdentity.from_json(data["process"])
        return cls(str(data["nonce"]), members, int(data["epoch"]), process, refusal)


@dataclass(frozen=True)
class Roll:
    """The members of a meeting, each with the nonce that it posted.

    Parameters
    ----------
    nonces : mapping of int to str
        Nonce that each member posted, by rank.
    epoch : int
        Number of the epoch that begins; higher than any that a member knows.
    refused_by : int or None
        Member whose post is a refusal. Only the lowest member reads all posts, so the roll tells the others.
    """

    nonces: Mapping[int, str]
    epoch: int
    refused_by: int | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks, ascending."""
        return tuple(sorted(self.nonces))

    @property
    def namespace(self) -> str:
        """Prefix of the epoch's keys; it follows from all nonces, so no other epoch has ever used it."""
        text = json.dumps([self.epoch, sorted(self.nonces.items())])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_bytes(self) -> bytes:
        """Encode it."""
        return json.dumps([self.epoch, sorted(self.nonces.items()), self.refused_by]).encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> Roll:
        """Decode what `to_bytes` made."""
        epoch, nonces, refused_by = json.loads(body)
        refused_by = None if refused_by is None else int(refused_by)
        return cls({int(rank): str(nonce) for rank, nonce in nonces}, int(epoch), refused_by)


@dataclass(frozen=True)
class Joining:
    """A rank's vote on a roll that holds it.

    Parameters
    ----------
    vote : Vote
        The vote on entering, in the roll's namespace.
    ballot : Ballot
        Ballot of this rank.
    tally : callable
        Maps all ballots to the decision.
    """

    vote: Vote
    ballot: Ballot
    tally: Tally


def post_key(rank: int) -> str:
    """Return the key of a rank's post."""
    return f"meet/post/{rank}"
