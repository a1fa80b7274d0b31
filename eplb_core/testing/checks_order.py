"""Kit tests: what may happen before `wait` returns, and what after it."""

from __future__ import annotations

from eplb_core.testing import scenarios_order
from eplb_core.testing.gate import Gated
from eplb_core.testing.kit_test import kit_test
from eplb_core.testing.pool import RankPool, Subject


class OrderChecks(Gated):
    """What may happen before `wait` returns, and what may not happen after."""

    @kit_test
    def test_transfer_does_not_wait(self, ranks: RankPool, subject: Subject) -> None:
        """`transfer` waits for a peer, or returns no handle: layers cannot overlap, and ranks may wait in a circle."""
        ranks.run(scenarios_order.returns_from_transfer_at_once, subject)

    @kit_test
    def test_wait_returns_with_the_rows(self, ranks: RankPool, subject: Subject) -> None:
        """`wait` returns before the rows are in landing memory; the commit then copies whatever lay there."""
        ranks.run(scenarios_order.waits_for_a_late_source, subject)

    @kit_test
    def test_two_layers_in_flight_keep_their_slots(self, ranks: RankPool, subject: Subject) -> None:
        """The next layer overwrites landing memory of a layer that is not committed yet."""
        ranks.run(scenarios_order.keeps_two_layers_apart, subject)

    @kit_test
    def test_live_rows_are_never_written(self, ranks: RankPool, subject: Subject) -> None:
        """Rows are written to the live weights before the vote: an abort then leaves a mixed layer."""
        ranks.run(scenarios_order.writes_landing_memory_alone, subject)

    @kit_test
    def test_the_plan_is_left_alone(self, ranks: RankPool, subject: Subject) -> None:
        """The plan's arrays are modified, although the core and observers still read them."""
        ranks.run(scenarios_order.leaves_the_plan_alone, subject)

    @kit_test
    def test_nothing_happens_after_wait(self, ranks: RankPool, subject: Subject) -> None:
        """Live rows are read, or landing memory is written, after `wait` has returned: commits get mixed bytes."""
        ranks.run(scenarios_order.is_done_when_wait_returns, subject)

    @kit_test
    def test_progress_does_not_wait(self, ranks: RankPool, subject: Subject) -> None:
        """`progress` blocks, and with it every vote of the core."""
        ranks.run(scenarios_order.returns_from_progress_at_once, subject)
