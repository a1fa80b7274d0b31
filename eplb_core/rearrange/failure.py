"""A step of a layer failed: all members abort the layer, drain transfers in flight, and raise one error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from eplb_core.control.store import StoreGone
from eplb_core.errors import EplbError, StoreLostError, error_for
from eplb_core.errors.texts import describe
from eplb_core.voting.departure import vanish
from eplb_core.voting.vote import all_agree
from eplb_core.wire.ballots import Ballot, Decision

if TYPE_CHECKING:
    from eplb_core.rearrange.epoch import Epoch
    from eplb_core.rearrange.layers import MovingLayer, MovingLayers
    from eplb_core.rearrange.state import CommunicatorState

_DRAIN_LIMIT_S = 5.0


class FailurePath:
    """Leaves a rearrangement that failed.

    Parameters
    ----------
    epoch : Epoch
        The epoch of the rearrangement.
    state : CommunicatorState
        Told which placement holds, and whether the communicator stays usable.
    moving : MovingLayers
        Layers in flight.
    tell : callable
        ``tell(layer=, ok=, reason=)`` tells observers of the abort.
    """

    def __init__(self, epoch: Epoch, state: CommunicatorState, moving: MovingLayers, tell: Callable[..., None]) -> None:
        self._epoch = epoch
        self._state = state
        self._moving = moving
        self._tell = tell
        self._members, self._watch = epoch.entered

    @contextmanager
    def guard(self, layer: MovingLayer, following: int | None) -> Iterator[None]:
        """Turn any exception in a step of a layer into the layer's abort on every rank.

        Parameters
        ----------
        layer : MovingLayer
            The layer whose step is guarded.
        following : int or None
            The next layer; it is aborted instead when this one turns out to be committed.
        """
        try:
            yield
        except StoreGone as gone:
            self.store_lost(gone, layer.where)
        except Exception as error:
            number, decision = self._aborting(layer, following, error)
            self.abandon(number, decision, error)
        except BaseException as interrupt:  # Ctrl-C: the members must not wait for this rank
            self.interrupted(layer, interrupt)
            raise

    def _aborting(self, layer: MovingLayer, following: int | None, error: Exception) -> tuple[int, Decision]:
        """Abort the layer, or the following one where this one is committed; return its number and the decision."""
        where = layer.where
        try:
            refusal = self._watch.diagnose(error, layer.vote, where)
            decision = layer.vote.abort(refusal.error, fatal=refusal.fatal)
            if not decision.commit:
                return layer.number, decision
            # Every ballot was set before, this rank's too, so the layer is committed. The failure aborts the next one.
            self._moving.note_decided(layer)
            if following is None:
                self._leave(refusal.error, where, undrained=False, poisoned=True)
                raise refusal.error from error
            vote = self._members.vote(str(following), f"layer {following}, phase vote")
            return following, vote.abort(refusal.error, fatal=refusal.fatal)
        except StoreGone as gone:
            self.store_lost(gone, where)
        except Exception as second:
            if self._state.poisoned is None:  # for instance EPLB-T016: nothing may stay half open
                named = refusal_of(second, self._epoch.rank, where)
                self._leave(named, where, undrained=not self._moving.drain(str(second)), poisoned=True)
            raise

    def interrupted(self, layer: MovingLayer, interrupt: BaseException) -> None:
        """Leave on Ctrl-C and the like: tell the others, so that they do not wait for this rank."""
        reason = type(interrupt).__name__
        stopped = error_for("EPLB-T007", rank=self._epoch.rank, where=layer.where, reason=reason)
        try:
            with suppress(StoreGone):  # then the others find out for themselves
                if layer.vote.abort(stopped, fatal=True).commit:
                    self._moving.note_decided(layer)
                    vanish(self._members)  # the vote did not tell them
        finally:
            self._leave(stopped, layer.where, undrained=not self._moving.drain(reason), poisoned=True)

    def abandon(self, number: int, decision: Decision, cause: Exception | None) -> NoReturn:
        """Leave the rearrangement: drain what is in flight, and raise the common error."""
        reason = str(decision.error or "no reason given")
        where = f"layer {number}, generation {self._members.generation}"
        error = decision.error or error_for("EPLB-T007", rank=decision.by, where=where, reason=reason)
        drained, usable = False, False
        try:
            drained = self._moving.drain(reason)
            usable = not decision.fatal and self._all_drained(number, drained)
        except StoreGone:
            usable = False
        except Exception as second:  # for instance from the backend's progress(): nothing may stay half open
            self._state.note(f"draining after a failure raised {second!r}")
            usable = False
            vanish(self._members)  # the others may have voted that all is drained
        except BaseException:  # Ctrl-C
            self._leave(error, where, undrained=not drained, poisoned=True)
            raise
        self._leave(error, where, undrained=not drained, poisoned=not usable)
        self._tell(layer=number, ok=False, reason=reason)
        raise error from cause

    def store_lost(self, gone: StoreGone, where: str) -> NoReturn:
        """Leave without the store: layers whose outcome is unknown stay in doubt until the members meet again."""
        doubtful = self._moving.in_doubt()
        drained = self._moving.drain("the store is lost")
        for layer in doubtful:
            self._state.held.doubt(layer.number, layer.copies)
        dead = ", ".join(f"rank {rank}" for rank in self._members.dead)
        detail = f"Gone: {dead}." if dead else ""
        layers = [layer.number for layer in doubtful] or "none"
        error = StoreLostError("EPLB-T005", where=where, problem=str(gone), layers=layers, detail=detail)
        self._leave(error, where, undrained=not drained, poisoned=True)
        raise error from gone

    def _leave(self, error: EplbError, where: str, *, undrained: bool, poisoned: bool) -> None:
        if poisoned:
            self._state.poison(error, where, undrained=undrained)
        self._members.keys.forget_later(self._moving.votes)
        self._state.ended(self._state.open)

    def _all_drained(self, number: int, drained: bool) -> bool:
        """Ask all members whether every transfer is stopped."""
        vote = self._members.vote(f"{number}/drain", f"layer {number}, phase drain")
        self._moving.votes.append(vote)
        self._watch.attend(vote)
        vote.cast(Ballot(drained), all_agree(self._epoch.rank))
        limit_s = min(_DRAIN_LIMIT_S, self._epoch.timeout_s)
        return self._watch.decide(vote, timeout_s=limit_s, progress=self._epoch.backend.progress).commit


def refusal_of(error: Exception, rank: int, where: str) -> EplbError:
    """Make a typed error of any exception that is none yet."""
    if isinstance(error, EplbError):
        return error
    return error_for("EPLB-T007", rank=rank, where=where, reason=describe(error))
