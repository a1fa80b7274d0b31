"""Kit tests: capabilities that only some backends declare."""

from __future__ import annotations

from eplb_core.testing import scenarios_bytes, scenarios_failure, scenarios_growth, scenarios_order
from eplb_core.testing.expectation import expect
from eplb_core.testing.gate import Gated
from eplb_core.testing.kit_test import kit_test, needs
from eplb_core.testing.model import shuffles
from eplb_core.testing.pool import RankPool, Subject

_MIB = 1 << 20
_SLACK_NBYTES = 24 * _MIB  # what a library, and malloc, may take once


class ClaimChecks(Gated):
    """Capabilities that a backend may declare; each is tested if it is declared."""

    @kit_test
    @needs("async_safe")
    def test_async_safe_a_worker_thread_may_transfer(self, ranks: RankPool, subject: Subject) -> None:
        """async_safe is declared, but a thread other than the one that built the communicator cannot transfer."""
        ranks.run(scenarios_order.runs_beside_the_engine, subject)

    @kit_test
    @needs("async_safe")
    def test_async_safe_the_engine_goes_on(self, ranks: RankPool, subject: Subject) -> None:
        """async_safe is declared, but a `wait` in a worker thread stops the engine's own thread."""
        ranks.run(scenarios_order.lets_the_engine_run, subject)

    @kit_test
    @needs("zero_copy")
    def test_zero_copy_takes_no_memory_for_rows(self, ranks: RankPool, subject: Subject) -> None:
        """zero_copy is declared, but rows are copied on their way: memory grows by a layer."""
        for story in ranks.run(scenarios_growth.takes_memory, subject, 2, 12 * _MIB):
            limit = story["landing"] + _SLACK_NBYTES
            text = f"{story['grown'] // _MIB} MiB came, landing {story['landing'] // _MIB} MiB of it"
            expect(story["grown"] <= limit, f"{text}, and a layer has {story['layer'] // _MIB} MiB")

    @kit_test
    @needs("zero_copy")
    def test_zero_copy_the_source_stays_frozen(self, ranks: RankPool, subject: Subject) -> None:
        """zero_copy is declared, but rows are read before the host's last write to them or after the vote."""
        ranks.run(scenarios_bytes.follows_the_hosts_changes, subject)
        ranks.run(scenarios_order.is_done_when_wait_returns, subject)

    @kit_test
    @needs("elastic_safe")
    def test_elastic_safe_a_rank_may_join_late(self, ranks: RankPool, subject: Subject) -> None:
        """elastic_safe is declared, but a rank that comes later cannot join ranks that already move weights."""
        ranks.run(scenarios_failure.joins_late, subject, world_size=3, timeout_s=60)

    @kit_test
    @needs("batched")
    def test_batched_every_batch_is_moved(self, ranks: RankPool, subject: Subject) -> None:
        """Batched is declared, but rows beyond the first ``max_ops_per_batch`` are lost or come in other batches."""
        maps = shuffles(3, 2, 3, 8, seed=15)
        for fields in ({"max_ops_per_batch": 3}, {"max_ops_per_batch": 4, "enable_migration_batching": True}):
            ranks.run(scenarios_bytes.rearranges, subject, maps, [[64, 24]] * 2, fields, world_size=3)
