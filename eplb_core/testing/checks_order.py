"""Kit tests: what happens before `wait` returns, and what after."""

from __future__ import annotations

from eplb_core.testing import scenarios_order
from eplb_core.testing.gate import Gated
from eplb_core.testing.kit_test import kit_test
from eplb_core.testing.pool import RankPool, Subject


class OrderChecks(Gated):
    """What may happen before `wait` returns, and what may not happen after."""

    @kit_test
    def test_transfer_does_not_wait(self, ranks: RankPool, subject: Subject) -> None:
        """`transfer` waits for a peer, or returns no handle: layers cannot overlap, ranks may wait in a circle."""
        ranks.run(scenarios_order.returns_from_transfer_at_once, subject)

    @kit_test
    def test_wait_returns_with_the_rows(self, ranks: RankPool, subject: Subject) -> None:
        """`wait` returns before the rows are in landing memory; what is committed then is whatever lay there."""
        ranks.run(scenarios_order.waits_for_a_late_source, subject)

    @kit_test
    def test_two_layers_in_flight_keep_their_slots(self, ranks: RankPool, subject: Subject) -> None:
        """The next layer lands where the last one still waits for its commit."""
        ranks.run(scenarios_order.keeps_two_layers_apart, subject)

    @kit_test
    def test_live_rows_are_never_written(self, ranks: RankPool, subject: Subject) -> None:
        """Rows arrive in the live weights before anyone has voted: an abort then leaves a mixed layer."""
        ranks.run(scenarios_order.writes_landing_memory_alone, subject)

    @kit_test
    def test_the_plan_is_left_alone(self, ranks: RankPool, subject: Subject) -> None:
        """The plan's arrays are written, although the core and every observer still read them."""
        ranks.run(scenarios_order.leaves_the_plan_alone, subject)

    @kit_test
    def test_nothing_happens_after_wait(self, ranks: RankPool, subject: Subject) -> None:
        """Live rows are read, or landing memory is written, after `wait` has returned: commits tear the bytes."""
        ranks.run(scenarios_order.is_done_when_wait_returns, subject)

    @kit_test
    def test_progress_does_not_wait(self, ranks: RankPool, subject: Subject) -> None:
        """`progress` blocks, and with it every vote of the core."""
        ranks.run(scenarios_order.returns_from_progress_at_once, subject)
