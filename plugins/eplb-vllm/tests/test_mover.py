"""The part of the adapter that needs no vLLM: what a host's calls, in vLLM's order, do to rows and maps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.testing import FaultInjector
from eplb_core.testing.ranks import Rank, run_ranks
from eplb_vllm.cycle import RearrangeFailedError
from eplb_vllm.mover import Mover

LAYERS, LOCAL = 3, 4


def maps(world: int, same: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    old = np.stack([rng.permutation(world * LOCAL) for _ in range(LAYERS)])
    new = np.stack([row if layer in same else np.roll(row, LOCAL - 1) for layer, row in enumerate(old)])
    return old, new


class Member:
    """One rank: weights whose rows hold the number of their expert."""

    def __init__(self, rank: Rank, observers: tuple[object, ...] = (), same: tuple[int, ...] = ()) -> None:
        self.old, self.new = maps(rank.world_size, same)
        self.mine = slice(rank.rank * LOCAL, (rank.rank + 1) * LOCAL)
        self.weights = [[torch.from_numpy(row[self.mine])[:, None].repeat(1, 500)] for row in self.old]
        config = eplb.EPLBConfig(communicator="torch_gloo", timeout_s=3.0)
        self.comm = eplb.Communicator(config, self.weights, rank.control(), observers=list(observers))
        self.mover = Mover(self.comm, self.weights)

    def stage(self, layer: int, tensors: list[torch.Tensor] | None = None):
        return self.mover.stage(layer, self.old[layer], self.new[layer], tensors or self.weights[layer])

    def holds(self) -> list[list[int]]:
        for layer in self.weights:
            assert (layer[0] == layer[0][:, :1]).all(), "a torn row"
        return [layer[0][:, 0].tolist() for layer in self.weights]

    def expected(self, *new_layers: int) -> list[list[int]]:
        return [(self.new if k in new_layers else self.old)[k, self.mine].tolist() for k in range(LAYERS)]


def every_layer(rank: Rank) -> None:
    member = Member(rank, same=(1,))
    member.mover.begin(member.old, member.new)
    for layer in range(LAYERS):
        transfer = member.stage(layer)
        assert transfer.error is None
        transfer.commit()
    assert member.holds() == member.expected(0, 1, 2)
    member.mover.begin(member.new, member.old)  # all of it was ended
    member.mover.cancel()
    member.comm.close()


def test_layers_are_asked_for_in_turn_also_those_that_do_not_move():
    run_ranks(2, every_layer)


def cancelled(rank: Rank, staged: int) -> None:
    member = Member(rank)
    member.mover.begin(member.old, member.new)
    for layer in range(staged):
        member.stage(layer)
        if layer == 0:
            member.mover.commit(0)
    member.mover.cancel()
    member.mover.cancel()
    assert member.holds() == member.expected(*range(min(staged, 1)))
    held = member.comm.report.physical_to_logical_map
    member.mover.rearrange(held, member.new, member.weights)
    assert member.holds() == member.expected(0, 1, 2)
    member.comm.close()


@pytest.mark.parametrize("staged", range(LAYERS + 1))
def test_what_is_cancelled_leaves_its_rows_and_the_next_one_starts_there(staged):
    run_ranks(2, cancelled, staged)


def fails(rank: Rank, phase: str) -> None:
    fault = FaultInjector(phase, "raise", layer=None if phase == "agree" else 1)
    member = Member(rank, observers=(fault,) if rank.rank == 1 else (), same=(0,) if phase == "agree" else ())
    member.mover.begin(member.old, member.new)
    first = member.stage(0)
    assert first.error is None, "a failure surfaces where rows move, which every rank knows without asking"
    first.commit()
    errors = [str(member.stage(layer).error) for layer in (1, 2)]
    assert errors[0] == errors[1]
    assert f"injected in {phase}" in errors[0]
    assert member.holds() == member.expected(*(() if phase == "agree" else (0,)))
    held = member.comm.report.physical_to_logical_map if phase != "agree" else member.old
    member.mover.begin(held, member.new)  # rebuilt where it has to be
    for layer in range(LAYERS):
        transfer = member.mover.stage(layer, held[layer], member.new[layer], member.weights[layer])
        assert transfer.error is None
        transfer.commit()
    assert member.holds() == member.expected(0, 1, 2)
    member.comm.close()


@pytest.mark.parametrize("phase", ["agree", "transfer", "wait", "landed", "vote"])
def test_a_failure_is_an_answer_and_the_next_rearrangement_goes_on(phase):
    run_ranks(2, fails, phase)


def moved(rank: Rank) -> None:
    member = Member(rank)
    member.mover.begin(member.old, member.new)
    other = [member.weights[0][0].clone()] if rank.rank == 1 else None
    said = str(member.stage(0, other).error)
    assert "other memory" in said
    assert "Rank 1" in said or "rank 1" in said
    assert member.holds() == member.expected()
    member.comm.close()


def test_weights_in_other_memory_are_refused_on_every_rank_by_the_one_that_has_them():
    run_ranks(2, moved)


def synchronous(rank: Rank) -> None:
    fault = FaultInjector("wait", "raise", layer=1)
    member = Member(rank, observers=(fault,) if rank.rank == 1 else ())
    with pytest.raises(RearrangeFailedError) as failed:
        member.mover.rearrange(member.old, member.new, member.weights)
    held = failed.value.physical_to_logical_map
    assert not failed.value.final
    assert held[:, member.mine].tolist() == member.holds() == member.expected(0)
    member.mover.rearrange(held, member.new, member.weights)
    assert member.holds() == member.expected(0, 1, 2)
    member.comm.close()


def test_a_synchronous_failure_says_which_placement_holds():
    run_ranks(2, synchronous)


def one_by_one(rank: Rank) -> None:
    member = Member(rank)
    for layer in range(LAYERS):
        transfer = member.stage(layer)
        assert transfer.error is None
        transfer.commit()
    assert member.holds() == member.expected(0, 1, 2)
    member.comm.close()


def test_a_layer_that_nobody_has_begun_is_one_rearrangement_of_its_own():
    run_ranks(2, one_by_one)
