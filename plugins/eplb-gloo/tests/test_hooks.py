"""What the plugin declares, and what it refuses before anything is connected."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

import eplb_core
from eplb_core.backend import LocalMetadata, MoveColumns, PeerMetadata
from eplb_core.errors import ConfigError, MetadataError, TransferError
from eplb_core.rearrange.hooks import BackendHooks
from eplb_core.testing.ranks import Rank, run_ranks
from eplb_gloo.backend import GlooBackend
from eplb_gloo.hooks import eplb_register_backends
from eplb_gloo.options import GlooOptions

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from members import Case, Member  # noqa: E402


def test_discovery_finds_the_backend_under_its_name():
    catalog = eplb_core.discover()
    info = catalog.backends["torch_gloo"]
    assert (info.async_safe, info.device_types, info.auto_priority, info.batched) == (True, ("*",), 50, False)
    assert info.available is not None
    assert info.available() is None
    assert [failure for failure in catalog.failures if failure.entry_point == "torch_gloo"] == []


def test_declaring_the_backend_imports_neither_torch_nor_the_backend():
    code = (
        "import sys, eplb_gloo.hooks\n"
        "info = eplb_gloo.hooks.eplb_register_backends()\n"
        "assert info.available() is None\n"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'eplb_gloo.backend') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_a_build_of_torch_without_gloo_is_not_usable(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert eplb_register_backends().available() == "this build of torch has no gloo"
    with pytest.raises(eplb_core.EplbError, match="EPLB-D004"):
        GlooBackend.probe(GlooOptions())


def test_the_probe_opens_a_device():
    assert GlooBackend.probe(GlooOptions(threads=2)) == {"torch": torch.__version__, "threads": "2"}


@pytest.mark.parametrize("options", [{"thread": 2}, {"threads": 0}, {"coalesce_nbytes": -1}])
def test_unknown_and_senseless_options_are_refused(options):
    with pytest.raises(ValidationError):
        GlooOptions(**options)


def test_options_decide_what_is_packed_and_are_compared_between_ranks():
    assert run_ranks(1, _options_of_a_backend) == [(1234, {"threads": 2, "coalesce_nbytes": 1234})]


def _options_of_a_backend(rank: Rank) -> tuple[int, dict]:
    options = GlooOptions(threads=2, coalesce_nbytes=1234)
    member = Member(rank, Case(((64,),), world_size=1, new_map=((1, 0, 2, 3),), options=options))
    return member.backend.coalesce_nbytes, dict(member.backend.shared_options)


def test_the_class_fits_the_contract():
    run_ranks(1, _hooks_of_the_class)


def _hooks_of_the_class(rank: Rank) -> None:
    member = Member(rank, Case(((64,),), world_size=1, new_map=((1, 0, 2, 3),)))
    hooks = BackendHooks("torch_gloo", member.backend)
    local = hooks.register_buffers(member.buffers)
    assert isinstance(local, LocalMetadata)
    assert hooks.exchange_metadata(local, []).peers == ()
    receipt = hooks.wait(hooks.transfer(member.plan(0)), 1.0)
    assert (receipt.nbytes_received, receipt.nbytes_sent) == (0, 0)


def test_landing_memory_that_it_cannot_receive_into_is_refused():
    run_ranks(1, _wrong_landing_memory)


def _wrong_landing_memory(rank: Rank) -> None:
    case = Case(((64,),))
    for change in (
        {"landing_rows": [[torch.zeros(4, 64, dtype=torch.uint8)]] * 2},
        {"landing": [torch.zeros(256, dtype=torch.uint8)]},
        {"landing": [torch.zeros(256, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8)]},
        {"landing": [torch.zeros(256, dtype=torch.uint8, device="meta")] * 2},
    ):
        member = Member(rank, replace(case, world_size=1, new_map=((1, 0, 2, 3),)))
        with pytest.raises(ConfigError, match="EPLB-C010"):
            member.backend.register_buffers(replace(member.buffers, **change))


def test_metadata_of_a_peer_that_does_not_fit_is_refused_before_connecting():
    run_ranks(1, _wrong_metadata, timeout_s=30)


def _wrong_metadata(rank: Rank) -> None:
    member = Member(rank, Case(((64,),), world_size=3, members=(0, 1), timeout_s=1.0))
    local = member.backend.register_buffers(member.buffers)
    payload = local.payload
    shorter = Member(rank, replace(member.case, row_nbytes=((32,),))).backend
    other_slots = shorter.register_buffers(replace(member.buffers, landing=[member.landing.slots[0][:64]] * 2)).payload
    for wrong, code in (
        ((1, payload[:-1]), "EPLB-M005"),
        ((1, b"x" + payload[1:]), "EPLB-M005"),
        ((2, payload), "EPLB-M005"),
        ((0, payload), "EPLB-M005"),
        ((1, other_slots), "EPLB-M004"),
    ):
        with pytest.raises(MetadataError, match=code):
            member.backend.exchange_metadata(local, [PeerMetadata(*wrong)])
    assert member.backend._group is None


def test_metadata_of_another_process_than_the_one_that_connected_is_refused():
    assert run_ranks(2, _swapped_metadata) == ["EPLB-M005", "EPLB-M005"]


def _swapped_metadata(rank: Rank) -> str:
    member = Member(rank, Case(((64,),)))
    local = member.backend.register_buffers(member.buffers)
    with pytest.raises(MetadataError) as caught:  # its own: of the right form, and drawn by another than the peer
        member.backend.exchange_metadata(local, [PeerMetadata(1 - rank.rank, local.payload)])
    member.meet("refused")  # gloo fails on a rank that still connects when one that is done lets its connections go
    return caught.value.code


def test_a_plan_that_does_not_fit_what_was_registered_is_refused_before_anything_is_posted():
    run_ranks(2, _misfits)


def _misfits(rank: Rank) -> None:
    member = Member(rank, Case(((64, 4096),), num_rows=2, new_map=((2, 3, 0, 1),)))
    member.connect()
    plan = member.plan(0)

    def changed(columns: MoveColumns, **changes: int) -> MoveColumns:
        edited = {name: getattr(columns, name).copy() for name in changes}
        for name, value in changes.items():
            edited[name][-1] = value
        return replace(columns, **edited)

    for change, text in (
        ({"peer": 5}, "there is no rank 5"),
        ({"peer": -1}, "there is no rank -1"),
        ({"peer": rank.rank}, "is not another member"),
        ({"tensor": 2}, "there is no tensor 2"),
        ({"row": 2}, "there is no row 2"),
        ({"nbytes": 64}, "the rows have other sizes"),
        ({"landing_offset": 1 << 20}, "do not follow one another"),
        ({"message": 1, "landing_offset": 1 << 20}, "lies outside the landing slot"),
        ({"message": 1, "landing_offset": -64}, "lies outside the landing slot"),
    ):
        for side in ("sends", "receives"):
            wrong = replace(plan, **{side: changed(getattr(plan, side), **change)})
            with pytest.raises(TransferError, match=text) as caught:
                member.backend.transfer(wrong)
            assert caught.value.code == "EPLB-T001"
    with pytest.raises(TransferError, match="layer 7 is not registered"):
        member.backend.transfer(replace(plan, layer=7))
    assert not member.backend._life.in_flight
    member.meet("refused")
    assert member.rounds(1) > 0
