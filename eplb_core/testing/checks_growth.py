"""Kit tests: nothing grows and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eplb_core.testing import scenarios_growth
from eplb_core.testing.expectation import expect
from eplb_core.testing.gate import Gated
from eplb_core.testing.kit_test import kit_test
from eplb_core.testing.pool import RankPool, Subject

_MIB = 1 << 20
_SLACK_NBYTES = 24 * _MIB  # what a library, and malloc, may take once


class GrowthChecks(Gated):
    """Nothing grows with rearrangements, communicators or rows, and nothing is left behind."""

    def _rounds(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> Sequence[dict[str, Any]]:
        if "rounds" not in measured:
            measured["rounds"] = ranks.run(scenarios_growth.goes_round_and_round, subject, timeout_s=60)
        rounds: Sequence[dict[str, Any]] = measured["rounds"]
        return rounds

    def _grows(self, what: str, slack: int, rounds: Sequence[dict[str, Any]]) -> None:
        for rank, story in enumerate(rounds):
            before, after = story["before"][what], story["after"][what]
            made = scenarios_growth.ROUNDS - scenarios_growth.WARM_UP
            expect(after <= before + slack, f"rank {rank}: {what} went from {before} to {after} in {made} rounds")

    @kit_test
    def test_descriptors_do_not_grow(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """Every rearrangement leaves a file, socket or pipe open; after some days the engine can open none."""
        self._grows("descriptors", 2, self._rounds(ranks, subject, measured))

    @kit_test
    def test_threads_do_not_grow(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """Every rearrangement leaves a thread behind; the process ends up with thousands."""
        self._grows("threads", 1, self._rounds(ranks, subject, measured))

    @kit_test
    def test_memory_does_not_grow(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """Every rearrangement keeps memory: handles or copies that nobody releases."""
        self._grows("memory KiB", 4 << 10, self._rounds(ranks, subject, measured))

    @kit_test
    def test_store_keys_do_not_grow(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """Every rearrangement leaves keys in the store that all ranks share."""
        self._grows("store keys", 12, self._rounds(ranks, subject, measured))

    @kit_test
    def test_no_process_is_started(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """The backend starts processes: daemonic engine workers may not start any, and nobody ends them."""
        for rank, story in enumerate(self._rounds(ranks, subject, measured)):
            expect(story["after"]["children"] == 0, f"rank {rank} has {story['after']['children']} child process(es)")

    @kit_test
    def test_the_environment_is_left_alone(self, ranks: RankPool, subject: Subject, measured: dict[str, Any]) -> None:
        """Environment variables change, under the host and everything else in its process."""
        for rank, story in enumerate(self._rounds(ranks, subject, measured)):
            expect(not story["environment"], f"rank {rank}: changed {story['environment']}")

    @kit_test
    def test_close_returns_everything(self, ranks: RankPool, subject: Subject) -> None:
        """Every communicator leaves descriptors or threads behind: engines that reload models run out of them."""
        for rank, seen in enumerate(ranks.run(scenarios_growth.lives_many_times, subject, timeout_s=60)):
            for what in ("descriptors", "threads"):
                numbers = [footprint[what] for footprint in seen]
                expect(max(numbers[4:]) <= max(numbers[1:3]), f"rank {rank}: {what} after each life: {numbers}")

    @kit_test
    def test_staging_is_bounded(self, ranks: RankPool, subject: Subject) -> None:
        """More than `staging_layers` layers are staged: the engine runs out of memory while it serves."""
        for story in ranks.run(scenarios_growth.takes_memory, subject, 12, _MIB):
            limit = story["landing"] + 2 * story["layer"] + _SLACK_NBYTES
            text = f"{story['grown'] // _MIB} MiB came, landing {story['landing'] // _MIB} MiB of it"
            expect(story["grown"] <= limit, f"{text}; 2 layers of {story['layer'] // _MIB} MiB may be staged")
