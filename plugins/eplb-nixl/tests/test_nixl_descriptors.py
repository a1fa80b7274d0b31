"""From base and stride to NIXL's arrays, and from a plan to indices into them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.backend import MoveColumns
from eplb_nixl.descriptors import RowIndex, blocks_of, by_peer, expand


def columns(peers: list[int]) -> MoveColumns:
    peer = np.array(peers, np.int64)
    return MoveColumns(peer, *([np.zeros_like(peer)] * 7))


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=4).filter(
        lambda layers: any(map(any, layers))
    ),
    st.integers(1, 5),
    st.integers(1, 2),
)
def test_a_rows_number_leads_to_its_address_and_size(nbytes, num_experts, num_slots):
    index = RowIndex.of(nbytes, [num_experts] * len(nbytes))
    flat = [size for layer in nbytes for size in layer]
    rng = np.random.default_rng(len(flat))
    bases = rng.integers(1, 2**40, (num_slots, len(flat))).astype(np.uint64)
    rows = expand(index.blocks(bases, 3))
    assert index.num_tensors == len(flat)
    for slot in range(num_slots):
        number = -1
        for layer, sizes in enumerate(nbytes):
            for tensor, size in enumerate(sizes):
                number += 1
                if not size:
                    continue
                every = np.arange(num_experts)
                found = rows[index.rows(layer, slot, np.full(num_experts, tensor), every)]
                expected = int(bases[slot, number]) + every * size
                assert found[:, 0].tolist() == expected.tolist()
                assert set(found[:, 1].tolist()) == {size}
                assert set(found[:, 2].tolist()) == {3}


def test_indices_are_what_nixl_takes():
    index = RowIndex.of([[8, 8]], [4])
    assert index.rows(0, 0, np.array([1]), np.array([2])).dtype == np.int32


def test_strided_blocks_say_where_how_long_how_far_apart_and_how_many():
    assert blocks_of(np.array([4096], np.uint64), np.array([24]), 7, 2).tolist() == [[4096, 24, 2, 24, 7]]


@given(st.lists(st.integers(0, 3)))
def test_columns_are_cut_where_the_peer_changes(peers):
    peers.sort()
    cut = list(by_peer(columns(peers)))
    assert [peer for peer, _ in cut] == sorted(set(peers))
    assert [peers[share] for _, share in cut] == [[peer] * peers.count(peer) for peer, _ in cut]
