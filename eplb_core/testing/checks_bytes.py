"""Kit tests: every byte arrives where the plan says."""

from __future__ import annotations

import numpy as np

from eplb_core.testing import scenarios_bytes
from eplb_core.testing.gate import Gated
from eplb_core.testing.kit_test import kit_test
from eplb_core.testing.model import shuffles
from eplb_core.testing.pool import RankPool, Subject

_MIB = 1 << 20


class ByteChecks(Gated):
    """Every byte arrives, where the plan says and as it is now."""

    @kit_test
    def test_a_row_arrives_whole(self, ranks: RankPool, subject: Subject) -> None:
        """A part of a row, often its end, is not copied: the expert computes with stale weights and nobody notices."""
        old, new = [[0, 1]], [[1, 0]]
        for nbytes in (7, 64, 4096, 300_001):
            ranks.run(scenarios_bytes.rearranges, subject, [old, new], [[nbytes]])

    @kit_test
    def test_rows_go_where_the_plan_says(self, ranks: RankPool, subject: Subject) -> None:
        """Rows go to other slots than the plan says: experts take each other's places."""
        old, new = [[0, 1, 2, 3, 4, 5, 6, 7]], [[6, 4, 5, 7, 1, 3, 2, 0]]
        ranks.run(scenarios_bytes.rearranges, subject, [old, new], [[48]])

    @kit_test
    def test_layers_are_not_confused(self, ranks: RankPool, subject: Subject) -> None:
        """Rows come from another layer than the plan's."""
        old, new = [[0, 1, 2, 3]] * 3, [[2, 3, 0, 1]] * 3
        ranks.run(scenarios_bytes.rearranges, subject, [old, new], [[40]] * 3)

    @kit_test
    def test_tensors_are_not_confused(self, ranks: RankPool, subject: Subject) -> None:
        """Rows come from another tensor of the same expert; when sizes are equal, no other check notices."""
        ranks.run(scenarios_bytes.rearranges, subject, [[[0, 1]], [[1, 0]]], [[40, 40, 40]])

    @kit_test
    def test_bits_travel_unread(self, ranks: RankPool, subject: Subject) -> None:
        """Values are converted on the way: NaNs, quantised formats and packed integers change."""
        ranks.run(scenarios_bytes.moves_bits, subject)

    @kit_test
    def test_scalar_and_empty_rows_travel(self, ranks: RankPool, subject: Subject) -> None:
        """A tensor with one element per expert, or with none, shifts the rows of the tensors beside it."""
        ranks.run(scenarios_bytes.moves_scalars_and_empty_rows, subject)

    @kit_test
    def test_one_row_serves_several_peers(self, ranks: RankPool, subject: Subject) -> None:
        """A row that goes to several ranks reaches only one of them."""
        old, new = [[0, 1, 2, 3, 4, 5]], [[0, 1, 0, 3, 0, 5]]
        ranks.run(scenarios_bytes.rearranges, subject, [old, new], [[56, 8]], world_size=3)

    @kit_test
    def test_empty_slots_and_duplicates_are_placements(self, ranks: RankPool, subject: Subject) -> None:
        """Empty slots (-1), or a second copy of an expert on one rank, are treated as rows to receive."""
        maps = [[[7, 1, 2, 3, 4, -1]], [[7, -1, 1, 7, 7, 4]], [[-1, 4, 1, 4, 7, 1]]]
        ranks.run(scenarios_bytes.rearranges, subject, maps, [[32, 8]])

    @kit_test
    def test_many_rows_and_large_ones_travel(self, ranks: RankPool, subject: Subject) -> None:
        """A limit of the transport (a message's size, a vector's length) cuts off many rows, or large ones."""
        ranks.run(scenarios_bytes.rearranges, subject, [[[0, 1]], [[1, 0]]], [[9 * _MIB + 3]])
        old = np.arange(4096)[None]
        ranks.run(scenarios_bytes.rearranges, subject, [old, np.roll(old, 2048, axis=1)], [[8]])

    @kit_test
    def test_any_shuffle_arrives(self, ranks: RankPool, subject: Subject) -> None:
        """Some placement of three ranks goes wrong, where ranks send and receive at once in several layers."""
        for staging_layers in (1, 2):
            maps = shuffles(4, 4, 3, 6, redundant=3, seed=staging_layers)
            fields = {"staging_layers": staging_layers}
            ranks.run(scenarios_bytes.rearranges, subject, maps, [[96, 1, 40]] * 4, fields, world_size=3)

    @kit_test
    def test_a_rank_without_moves_keeps_step(self, ranks: RankPool, subject: Subject) -> None:
        """A rank's steps depend on how much it moved before, so that it and its peers get out of step."""
        maps = [np.arange(6)[None].repeat(2, 0)]
        for first, second in ((0, 2), (0, 2), (1, 4), (0, 3), (5, 2)):
            following = maps[-1].copy()
            following[:, [first, second]] = following[:, [second, first]]
            maps.append(following)
        ranks.run(scenarios_bytes.rearranges, subject, maps, [[64], [64]], None, 1, world_size=3)

    @kit_test
    def test_receipts_count_the_bytes(self, ranks: RankPool, subject: Subject) -> None:
        """Reports and dashboards show wrong amounts of traffic."""
        ranks.run(scenarios_bytes.counts_bytes, subject)

    @kit_test
    def test_the_hosts_landing_rows_are_used(self, ranks: RankPool, subject: Subject) -> None:
        """A host that passes its own ``landing=`` gets an error or wrong bytes ("rows" layout)."""
        ranks.run(scenarios_bytes.lands_in_the_hosts_memory, subject)

    @kit_test
    def test_experts_that_lie_apart_are_moved(self, ranks: RankPool, subject: Subject) -> None:
        """A host that keeps every expert in a tensor of its own gets wrong bytes, although `row_lists` is declared."""
        ranks.run(scenarios_bytes.moves_experts_that_lie_apart, subject)

    @kit_test
    def test_rows_travel_as_they_are_now(self, ranks: RankPool, subject: Subject) -> None:
        """Bytes of an earlier generation are sent again: a copy is kept although the host has written new weights."""
        ranks.run(scenarios_bytes.follows_the_hosts_changes, subject)

    @kit_test
    def test_communicators_of_one_process_are_apart(self, ranks: RankPool, subject: Subject) -> None:
        """State is kept per process or per class, so a second model's communicator reads the rows of the first."""
        ranks.run(scenarios_bytes.keeps_communicators_apart, subject)

    @kit_test
    def test_a_new_communicator_starts_from_nothing(self, ranks: RankPool, subject: Subject) -> None:
        """Addresses or state of a closed communicator outlive it, and its successor reads freed memory."""
        ranks.run(scenarios_bytes.lives_again, subject)
