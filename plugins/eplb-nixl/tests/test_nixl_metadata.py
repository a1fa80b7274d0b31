"""The payload: what is written is what is read, and nothing else is believed."""

from __future__ import annotations

import re
import time
import zlib
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_nixl.metadata import SourceRecord

RECORD = SourceRecord(
    rank=3,
    agent_name="eplb-default-3-7-0123456789abcdef",
    library_version="1.5.1",
    mode="zero_copy",
    memory_type="VRAM",
    device_index=5,
    bases=np.arange(12, dtype=np.uint64).reshape(1, 12) + np.uint64(2**63),
    warm_address=2**47,
    agent_metadata=bytes(range(256)),
)


def same(first: SourceRecord, second: SourceRecord) -> bool:
    return all(np.array_equal(getattr(first, each.name), getattr(second, each.name)) for each in fields(first))


@given(
    rank=st.integers(0, 2**32 - 1),
    name=st.text(max_size=80).filter(lambda text: "\ud800" not in ascii(text)),
    mode=st.sampled_from(["zero_copy", "staged"]),
    memory=st.sampled_from(["DRAM", "VRAM"]),
    shape=st.tuples(st.integers(1, 2), st.integers(0, 9)),
    metadata=st.binary(max_size=300),
    address=st.integers(0, 2**64 - 1),
)
def test_every_record_comes_back_as_it_was(rank, name, mode, memory, shape, metadata, address):
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    bases = np.full(shape, address, np.uint64)
    record = SourceRecord(rank, name, "1", mode, memory, 1, bases, address, metadata)
    assert same(SourceRecord.from_bytes(record.to_bytes()), record)


@given(st.integers(0), st.integers(1, 255))
def test_no_flipped_byte_is_believed(position, flip):
    payload = bytearray(RECORD.to_bytes())
    payload[position % len(payload)] ^= flip
    with pytest.raises(ValueError, match="its NIXL metadata"):
        SourceRecord.from_bytes(bytes(payload))


@given(st.integers(0, len(RECORD.to_bytes()) - 1), st.binary(min_size=1, max_size=9))
def test_neither_a_shorter_nor_a_longer_payload_is_believed(length, more):
    payload = RECORD.to_bytes()
    for wrong in (payload[:length], payload + more):
        with pytest.raises(ValueError, match="its NIXL metadata"):
            SourceRecord.from_bytes(wrong)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(payload):
    with pytest.raises(ValueError, match="its NIXL metadata"):
        SourceRecord.from_bytes(payload)


@pytest.mark.parametrize(
    ("offset", "value", "problem"),
    [
        (4, b"\x03\x00", "format 3"),
        (6, b"\x09", "does not exist"),
        (7, b"\x02", "does not exist"),
        (16, b"\xff\xff\xff\xff", "addresses"),
        (20, b"\x00\x00\x00\x00", "header promises"),
    ],
)
def test_a_field_out_of_its_bounds_is_refused_even_with_the_right_checksum(offset, value, problem):
    body = bytearray(RECORD.to_bytes()[:-4])
    body[offset : offset + len(value)] = value
    with pytest.raises(ValueError, match=re.escape(problem)):
        SourceRecord.from_bytes(bytes(body) + zlib.crc32(body).to_bytes(4, "little"))


def test_a_name_that_is_no_text_is_refused():
    start = RECORD.to_bytes().index(b"eplb-")
    body = bytearray(RECORD.to_bytes()[:-4])
    body[start] = 0xFF
    with pytest.raises(ValueError, match="no text"):
        SourceRecord.from_bytes(bytes(body) + zlib.crc32(body).to_bytes(4, "little"))


def test_base_addresses_of_61_layers_of_6_tensors_take_under_three_KiB_and_no_time():
    record = replace(RECORD, bases=np.arange(61 * 6, dtype=np.uint64).reshape(1, -1))
    start = time.perf_counter()
    for _ in range(100):
        payload = record.to_bytes()
        SourceRecord.from_bytes(payload)
    assert time.perf_counter() - start < 1.0
    assert len(payload) - len(record.agent_metadata) < 3072
