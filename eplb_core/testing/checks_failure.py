"""Kit tests: failures end within their limits and cost no weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eplb_core.testing import scenarios_failure
from eplb_core.testing.expectation import PREFIX, NotReached, expect
from eplb_core.testing.gate import Gated
from eplb_core.testing.kit_test import kit_test
from eplb_core.testing.pool import RankPool, Subject


class FailureChecks(Gated):
    """Every failure ends within its limit, typed, and costs no weight."""

    @kit_test
    def test_wait_keeps_its_limit(self, ranks: RankPool, subject: Subject) -> None:
        """`wait` outlasts its `timeout_s`: when a peer hangs, the engine hangs with it."""
        story, peer = ranks.run(scenarios_failure.waits_for_nobody, subject, True, timeout_s=25)
        limit_s = scenarios_failure.LIMIT_S
        expect("outlasted" not in peer, peer.get("outlasted", ""))
        expect(story["seconds"] < limit_s + 2, f"wait(timeout_s={limit_s}) took {story['seconds']:.1f} s")

    @kit_test
    def test_wait_never_swallows_a_failure(self, ranks: RankPool, subject: Subject) -> None:
        """`wait` returns a receipt for rows that never came: garbage is committed on every rank."""
        runs: tuple[tuple[str, Callable[..., Any], int, tuple[int, ...]], ...] = (
            ("the peer never started", scenarios_failure.waits_for_nobody, 2, ()),
            ("the peer never started and another rank died", scenarios_failure.waits_beside_a_death, 3, (2,)),
        )
        for what, scenario, world_size, without in runs:
            story, peer = ranks.run(scenario, subject, world_size=world_size, timeout_s=25, without=without)[:2]
            if "outlasted" in peer:
                raise NotReached(f"{PREFIX}{peer['outlasted']}")
            missing = story.get("missing", [])
            expect(not missing, f"{what}, and wait returned without an error and without (tensor, row) {missing[:8]}")

    @kit_test
    def test_failures_are_typed(self, ranks: RankPool, subject: Subject) -> None:
        """A failure is no typed error: hosts cannot tell what it is, and 'eplb explain' does not know it."""
        story, peer = ranks.run(scenarios_failure.waits_for_nobody, subject, timeout_s=25)
        if "outlasted" in peer:
            raise NotReached(f"{PREFIX}{peer['outlasted']}")
        if story.get("missing"):
            raise NotReached(f"{PREFIX}the peer never started, and wait raised nothing")
        expect(story.get("typed", True), f"the limit ran out, and wait raised {story['error']}: {story.get('text')}")

    @kit_test
    def test_wait_ends_when_a_peer_gives_up(self, ranks: RankPool, subject: Subject) -> None:
        """Another rank's failure is noticed only at the time-out: `wait` does not consult ``context.cancelled()``."""
        ranks.run(scenarios_failure.hears_that_a_peer_gave_up, subject)

    @kit_test
    def test_an_abort_costs_no_weight(self, ranks: RankPool, subject: Subject) -> None:
        """The backend leaves something behind after an aborted layer, and the next rearrangement goes wrong."""
        ranks.run(scenarios_failure.stays_usable_after_an_abort, subject, timeout_s=60)

    @kit_test
    def test_abort_drains_what_it_says(self, ranks: RankPool, subject: Subject) -> None:
        """`abort` returns that memory is no longer touched, but it is; or `abort` takes more than a second."""
        ranks.run(scenarios_failure.drains_what_it_says_it_drained, subject)

    @kit_test
    def test_a_dead_rank_is_survived(self, ranks: RankPool, subject: Subject) -> None:
        """After a rank's death the others learn it late, cannot rebuild without it, or hold wrong bytes."""
        for story in ranks.run(scenarios_failure.loses_a_rank, subject, world_size=3, timeout_s=60, without=(2,))[:2]:
            expect(bool(story["error"]), "rank 2 was killed in the middle of a layer, and rearrange succeeded")
            expect(story["seconds"] < 5, f"it took {story['seconds']:.1f} s to learn that a rank is dead")
            expect("ank 2" in story["text"], f"the error does not name the dead rank: {story['text']}")
            expect(not story["mixed"], f"after the death (layer, tensor, row) {story['mixed'][:8]} are mixed")
            expect(not story["after"], f"after rebuild: wrong bytes in (layer, tensor, row) {story['after'][:8]}")

    @kit_test
    def test_a_forced_close_is_prompt(self, ranks: RankPool, subject: Subject) -> None:
        """`close(force=True)` waits for a peer or a thread: an engine that must go down hangs."""
        ranks.run(scenarios_failure.closes_at_once, subject)

    @kit_test
    def test_later_peers_are_added(self, ranks: RankPool, subject: Subject) -> None:
        """A second `exchange_metadata`, which names only new peers, loses the peers of the first."""
        ranks.run(scenarios_failure.meets_peers_one_by_one, subject, world_size=3)
