"""Ranks that do not fit together say so at connect, all of them, with what differs, and live on."""

from __future__ import annotations

import pytest
import torch

import eplb_core as eplb
from eplb_core.errors import EplbError, MetadataError
from eplb_core.testing.model import Model, shuffles
from eplb_core.testing.ranks import Rank, run_ranks
from eplb_core.voting.members import Members
from tests.support.backends import BackendCase, case_config, case_options, device_group, every_backend


def config(backend: str, **fields) -> eplb.EPLBConfig:
    return case_config(backend, **{"timeout_s": 20, **fields})


def with_weights_of_its_own(rank: Rank, backends, weights, names, fields):
    """Try to rearrange with what this rank was given; return the error's code and text."""
    old, new = shuffles(2, 1, rank.world_size, 4)
    try:
        comm = eplb.Communicator(
            config(backends[rank.rank], **fields[rank.rank]),
            weights[rank.rank],
            rank.control(),
            device_group(rank, backends[rank.rank]),
            options=case_options(),
            tensor_names=names[rank.rank],
        )
    except EplbError as error:
        return "built", error.code, str(error)
    with comm, pytest.raises(EplbError) as caught:
        comm.rearrange(old, new)
    return "connected", caught.value.code, str(caught.value)


def attempt(world_size, backend, weights, *, backends=None, names=None, fields=None, env=None):
    return run_ranks(
        world_size,
        with_weights_of_its_own,
        backends or [backend] * world_size,
        weights,
        names or [None] * world_size,
        fields or [{}] * world_size,
        env=env,
    )


def label_of(backend: BackendCase) -> str:
    info = eplb.discover().backends[backend.name]
    return info.label or info.name


@every_backend
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)], ids=["sends less", "sends more"])
def test_rows_of_different_sizes_are_refused_on_both_ranks_before_bytes_move(backend: BackendCase, sizes) -> None:
    """Cases 1 and 2, and I9: gloo would take the short one in silence, and abort the process on the long one."""
    weights = [[[torch.zeros(4, n, dtype=torch.uint8)]] for n in sizes]
    first, second = attempt(2, backend.name, weights, names=[["w13"]] * 2, env=backend.env)
    start = f"{label_of(backend)} EPLB nbytes_per_expert mismatch for (0, 'w13') with rank "
    assert first[:2] == second[:2] == ("connected", "EPLB-M003")
    assert first[2].startswith(f"{start}1: local={sizes[0]}, peer={sizes[1]}")
    assert second[2].startswith(f"{start}0: local={sizes[1]}, peer={sizes[0]}")


@every_backend
def test_different_keys_are_refused_on_every_rank_with_the_difference(backend: BackendCase) -> None:
    weights = [[[torch.zeros(4, 8), torch.zeros(4, 8)]]] * 3
    names = [["w13", "w2"], ["w13", "w2"], ["w13", "down"]]
    results = attempt(3, backend.name, weights, names=names, env=backend.env)
    assert {result[:2] for result in results} == {("connected", "EPLB-M002")}
    assert results[0][2].startswith(
        f"{label_of(backend)} EPLB metadata key mismatch with rank 2: "
        "local=[(0, 'w13'), (0, 'w2')], peer=[(0, 'down'), (0, 'w13')]"
    )


def test_a_permuted_tensor_does_not_meet_a_plain_one() -> None:
    plain, permuted = torch.zeros(4, 6, 8), torch.zeros(4, 8, 6).transpose(1, 2)
    results = attempt(2, "torch_gloo", [[[plain]], [[permuted]]])
    assert {result[1] for result in results} == {"EPLB-M004"}
    assert all(" EPLB stride mismatch with rank " in result[2] for result in results)


def test_dtypes_of_one_size_do_not_meet() -> None:
    results = attempt(2, "torch_gloo", [[[torch.zeros(4, 8, dtype=torch.bfloat16)]], [[torch.zeros(4, 8).half()]]])
    assert all(" EPLB dtype mismatch with rank " in result[2] for result in results)


def test_options_that_must_be_shared_are_compared() -> None:
    results = attempt(2, "torch_gloo", [[[torch.zeros(4, 8)]]] * 2, fields=[{}, {"max_ops_per_batch": 7}])
    assert all("max_ops_per_batch" in result[2] and result[1] == "EPLB-M004" for result in results)


def test_ranks_that_chose_different_backends_learn_of_each_other() -> None:
    names = [name for name, info in eplb.discover().backends.items() if info.available is None or not info.available()]
    if len(names) < 2:
        pytest.skip("needs two usable backends")
    results = attempt(2, "", [[[torch.zeros(4, 8)]]] * 2, backends=sorted(names)[:2])
    assert all(" EPLB backend mismatch with rank " in result[2] for result in results)


@every_backend
def test_the_peers_learn_which_rank_refused_which_tensor(backend: BackendCase) -> None:
    """Case 4: one rank's tensor is strided."""
    good, bad = torch.zeros(4, 8), torch.zeros(4, 16)[:, ::2]
    results = attempt(3, backend.name, [[[good]], [[bad]], [[good]]], names=[["w2"]] * 3, env=backend.env)
    assert results[1][:2] == ("built", "EPLB-M001")
    for result in (results[0], results[2]):
        assert result[:2] == ("connected", "EPLB-M006")
        assert result[2].startswith("Rank 1 could not take part: ")
        assert "'w2'" in result[2]


def whose_record_is_swapped(rank: Rank, backend: str):
    old, new = shuffles(2, 1, 2, 4)
    model = Model(rank.rank, 4, [[8]])
    model.fill(old)
    if rank.rank == 1:
        seal = Members.seal
        Members.seal = lambda self, kind, body, **bound: seal(
            self, kind, body, **({"rank": 0} if kind == "record" else bound)
        )
    group = device_group(rank, backend)
    with (
        eplb.Communicator(config(backend), model.weights, rank.control(), group, options=case_options()) as comm,
        pytest.raises(MetadataError) as caught,
    ):
        comm.rearrange(old, new)
    return caught.value.code, str(caught.value), model.wrong_rows(old)


@every_backend
def test_a_record_that_belongs_to_another_rank_is_refused_on_both(backend: BackendCase) -> None:
    """I7."""
    results = run_ranks(2, whose_record_is_swapped, backend.name, env=backend.env)
    assert {result[0] for result in results} == {"EPLB-M005"}
    assert all("rank 1" in result[1] and result[2] == [] for result in results)


def who_is_late(rank: Rank):
    old, new = shuffles(2, 1, 2, 4)
    model = Model(rank.rank, 4, [[8]])
    model.fill(old)
    if rank.rank == 1:
        rank.listen()
        return None
    with (
        eplb.Communicator(config("torch_gloo", timeout_s=1.5), model.weights, rank.control()) as comm,
        pytest.raises(EplbError) as caught,
    ):
        comm.rearrange(old, new)
    rank.tell("done")
    return str(caught.value)


def test_a_rank_that_never_comes_is_named_within_the_limit() -> None:
    from eplb_core.testing.ranks import Ranks

    with Ranks(2, who_is_late) as ranks:
        assert ranks.hear(0, 20) == "done"
        ranks.tell(1, "go home")
        text, _ = ranks.values(20)
    assert text.startswith("Endpoint not ready after 1.5s: rank 1 (not seen at the store 127.0.0.1:")
