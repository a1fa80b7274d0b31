"""What is registered: every byte once, and device memory that cannot be read from outside found out."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.errors import MetadataError
from eplb_nixl.agent import Agent, Memory
from eplb_nixl.exposure import _choose
from eplb_nixl.library import NixlError, load_library
from eplb_nixl.registration import Piece, cannot_be_exported, pieces_of, register


def spans(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [(piece.memory.start, piece.memory.nbytes) for piece in pieces]


def test_an_alias_is_registered_once():
    tensor = torch.zeros(4, 8)
    assert spans(pieces_of([("a", tensor), ("b", tensor)])) == [(tensor.data_ptr(), 128)]


def test_views_of_one_storage_become_one_piece_from_the_first_to_the_last():
    flat = torch.zeros(1000, dtype=torch.uint8)
    pieces = pieces_of([("b", flat[500:600]), ("a", flat[100:200])], [("c", flat[700:750])])
    assert spans(pieces) == [(flat.data_ptr() + 100, 650)]
    assert pieces[0].key == "b"
    assert pieces[0].exported


def test_storages_that_overlap_become_one_piece_and_neighbours_stay_apart():
    held = bytearray(300)
    whole = torch.frombuffer(held, dtype=torch.uint8)
    left, right = (
        torch.frombuffer(held, dtype=torch.uint8, count=150),
        torch.frombuffer(held, dtype=torch.uint8, offset=100),
    )
    start = whole.data_ptr()
    assert left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr()
    assert spans(pieces_of([("left", left), ("right", right)])) == [(start, 300)]
    apart = [torch.frombuffer(held, dtype=torch.uint8, count=100), right]
    assert spans(pieces_of([("left", apart[0]), ("right", apart[1])])) == [(start, 100), (start + 100, 200)]


def test_tensors_without_bytes_are_left_out():
    assert pieces_of([("empty", torch.zeros(4, 0))]) == []


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 10)), min_size=1, max_size=12), st.data())
def test_pieces_cover_every_tensor_and_share_no_byte(views, data):
    flat = torch.zeros(100, dtype=torch.uint8)
    tensors = [(str(number), flat[start : start + size]) for number, (start, size) in enumerate(views)]
    half = data.draw(st.integers(0, len(tensors)))
    pieces = pieces_of(tensors[:half], tensors[half:])
    ends = [(piece.memory.start, piece.memory.start + piece.memory.nbytes) for piece in pieces]
    assert all(before[1] <= after[0] for before, after in pairwise(ends))
    for _, tensor in tensors:
        start = tensor.data_ptr()
        assert any(low <= start and start + tensor.numel() <= high for low, high in ends)
    assert any(piece.exported for piece in pieces) == (half > 0)


@pytest.fixture
def agent():
    made = Agent(load_library(), "eplb-test-registration")
    yield made
    made.close()


def test_nixl_takes_aliases_and_views_and_gives_them_back(agent):
    flat = torch.zeros(4, 4096, dtype=torch.uint8)
    tensors = [("a", flat), ("b", flat), ("c", flat[1:3]), ("d", flat[3])]
    register(agent, pieces_of(tensors))
    agent.deregister_all()
    register(agent, pieces_of(tensors))
    agent.close()
    assert not agent.is_open


def test_trying_the_live_weights_leaves_nothing_registered(agent):
    assert _choose(agent, [("a", torch.zeros(4096, dtype=torch.uint8))])[0] == "zero_copy"
    assert agent._registered == []


def test_a_refusal_names_the_tensor(agent):
    host = torch.zeros(4096, dtype=torch.uint8)
    (good,) = pieces_of([("layer 0 tensor 0", host)])
    # Host memory passed off as a device's: what NIXL finds out about.
    bad = Piece(replace(good.memory, memory_type="VRAM"), "layer 3 tensor 1")
    with pytest.raises(
        MetadataError, match=r"Tensor layer 3 tensor 1 cannot be registered: NIXL could not register 4096"
    ):
        register(agent, [good, bad])


def test_a_closed_agent_says_so():
    made = Agent(load_library(), "eplb-test-closed")
    made.close()
    made.close()
    with pytest.raises(NixlError, match="the agent is closed"):
        made.progress()


DRIVER = """
#include <stdint.h>
#include <string.h>
int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
    int capable = pointer != 0x2000 && pointer != 0x3000;
    uint64_t handles = pointer == 0x3000 ? 8 : 1;
    if (pointer == 0x9000) return 1;
    if (attribute == 10) memcpy(data, &capable, sizeof capable);
    if (attribute == 14) memcpy(data, &handles, sizeof handles);
    return 0;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder: Path = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libdriver.so", folder / "driver.c"], check=True)
    return str(folder / "libdriver.so")


def on_device(start: int, key: str = "layer 2 tensor 0") -> Piece:
    return Piece(Memory(start, 64, "VRAM", 0), key, True)


def test_memory_without_an_ipc_handle_is_found_out_and_named(driver):
    reason = cannot_be_exported([on_device(0x1000, "layer 0 tensor 0"), on_device(0x2000)], driver)
    assert reason is not None
    assert reason.startswith("layer 2 tensor 0 lies in memory without a CUDA IPC handle")


@pytest.mark.parametrize("address", [0x1000, 0x3000, 0x9000], ids=["plain", "fabric", "unknown to the driver"])
def test_other_device_memory_is_taken(driver, address):
    assert cannot_be_exported([on_device(address)], driver) is None


def test_host_memory_asks_no_driver():
    assert cannot_be_exported(pieces_of([("a", torch.zeros(8))]), "/nonexistent/libcuda.so.1") is None


def test_without_a_driver_nothing_is_held_against_device_memory():
    assert cannot_be_exported([on_device(0x2000)], "/nonexistent/libcuda.so.1") is None
