"""Kit tests: nothing of one epoch, or of an aborted layer, reaches the next."""

from __future__ import annotations

from eplb_core.backend import Cancelled
from eplb_core.testing import scenarios_lives
from eplb_core.testing.expectation import expect
from eplb_core.testing.gate import Gated
from eplb_core.testing.kit_test import kit_test
from eplb_core.testing.pool import RankPool, Subject

_CANCELLED = (
    Cancelled("rank 1 is gone", peer_lost=True),
    Cancelled("the other end was killed", peer_lost=True),
    Cancelled("", peer_lost=True),
    Cancelled("nobody answers", store_lost=True),
    Cancelled("the others have given up"),
)


class LifeChecks(Gated):
    """Nothing that an epoch or an aborted layer leaves behind reaches the next."""

    @kit_test
    def test_epoch_and_store_come_with_the_meeting(self, ranks: RankPool, subject: Subject) -> None:
        """The constructor or `register_buffers` uses ``context.epoch`` or ``context.store``, which do not exist yet.

        Ranks build their backends minutes apart and meet later. Names made of epoch 0 are the same in every epoch, so
        keys and agents of one epoch are taken for those of another.
        """
        ranks.run(scenarios_lives.waits_for_the_meeting, subject)

    @kit_test
    def test_only_the_plan_is_counted(self, ranks: RankPool, subject: Subject) -> None:
        """Transfers are told apart by a counter of the backend: after an abort peers have counted differently.

        Take what both ends must agree on from the plan (``generation``, ``layer``, and ``sequence``, which may jump):
        one rank may have started, and drained, one more transfer than another.
        """
        for across in (False, True):
            ranks.run(scenarios_lives.counts_what_the_plan_counts, subject, across, timeout_s=60)

    @kit_test
    def test_close_knows_what_abort_left(self, ranks: RankPool, subject: Subject) -> None:
        """`close` returns that memory is safe while a transfer still writes: freed memory is overwritten."""
        for aborted in (True, False):
            ranks.run(scenarios_lives.is_quiet_once_closed, subject, aborted)

    @kit_test
    def test_cancelled_is_no_text(self, ranks: RankPool, subject: Subject) -> None:
        """`wait` decides by the words of ``context.cancelled()``, or goes on with a peer that is lost.

        It returns a `Cancelled`: decide by ``peer_lost`` and ``store_lost``; ``reason`` is for people and may be any
        text. In each case `wait` must end at once with a typed error, and must not use a lost peer again.
        """
        for cancelled in _CANCELLED:
            story, peer = ranks.run(scenarios_lives.gives_up_when_told, subject, cancelled, timeout_s=30)
            told = f"cancelled() returned {cancelled!r}"
            expect("outlasted" not in peer, f"{told}: {peer.get('outlasted')}")
            seconds = story["seconds"]
            expect(seconds < scenarios_lives.PROMPT_S, f"{told}, and wait went on for {seconds:.1f} s")
            expect(story["typed"], f"{told}, and wait raised {story['error']}")
            expect("afterwards" not in story, f"{told}; then abort or progress raised {story.get('afterwards')}")
            missing = story.get("missing")
            expect(not missing, f"{told}, and wait returned a receipt without (tensor, row) {(missing or [])[:8]}")
