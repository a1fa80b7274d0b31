"""Metadata: sealed messages, a rank's record on the wire, and the comparison of two records."""

from __future__ import annotations

import base64
import json
import pickle
import re
import socket
import struct
import time
import zlib
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import eplb_core
from eplb_core.control import hosts
from eplb_core.control.hosts import node_ids, read_boot_id
from eplb_core.errors import MetadataError, PlanError
from eplb_core.plan.maps import map_digest
from eplb_core.weights.layout import LayoutRecord, build_layout
from eplb_core.weights.tensor import TensorRecord
from eplb_core.wire.compare import difference
from eplb_core.wire.envelope import OVERHEAD_NBYTES, MessageScope
from eplb_core.wire.record import MAX_PAYLOAD_NBYTES, MAX_RECORD_NBYTES, RankRecord

# --- the envelope -----------------------------------------------------------------------------------------------------

OF = {"name": "default", "rank": 3, "epoch": 2, "generation": 7}


def seal(kind, body, **of):
    return MessageScope(**of).seal(kind, body)


def unseal(blob, kind, *, limit, **of):
    return MessageScope(**of).unseal(blob, kind, limit)


def refusal(blob, kind="ballot", *, limit=4096, **changes):
    with pytest.raises(MetadataError) as caught:
        unseal(blob, kind, **(OF | changes), limit=limit)
    assert caught.value.code == "EPLB-M005"
    assert str(caught.value).startswith(f"Refused a message from rank {(OF | changes)['rank']}: ")
    return str(caught.value)


@given(
    st.text("abcdefghijklmnopqrstuvwxyz-_", min_size=1, max_size=15),
    st.binary(max_size=200),
    st.text(),
    st.integers(0, 2**31 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
)
def test_a_sealed_body_comes_out_unchanged(kind, body, name, rank, epoch, generation):
    of = {"name": name, "rank": rank, "epoch": epoch, "generation": generation}
    blob = seal(kind, body, **of)
    assert len(blob) == len(body) + OVERHEAD_NBYTES
    assert unseal(blob, kind, **of, limit=len(body)) == body


@given(st.binary(max_size=80), st.data())
def test_any_single_flipped_bit_is_refused(body, data):
    blob = bytearray(seal("ballot", body, **OF))
    bit = data.draw(st.integers(0, 8 * len(blob) - 1))
    blob[bit // 8] ^= 1 << bit % 8
    refusal(bytes(blob))


def test_every_flipped_bit_of_one_message_is_refused():
    blob = seal("ballot", b"ok", **OF)
    for bit in range(8 * len(blob)):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        refusal(bytes(flipped))


@pytest.mark.parametrize("nbytes", [0, 1, OVERHEAD_NBYTES - 1, OVERHEAD_NBYTES, OVERHEAD_NBYTES + 9])
def test_a_truncated_message_is_refused(nbytes):
    assert "truncated" in refusal(seal("ballot", bytes(10), **OF)[:nbytes])


def test_bytes_after_the_end_are_refused():
    assert "2 bytes follow its end" in refusal(seal("ballot", b"ok", **OF) + b"\0\0")


def test_two_messages_with_swapped_bodies_are_refused():
    first, second = seal("ballot", b"yes", **OF), seal("ballot", b"no!", **OF)
    assert "checksum" in refusal(first[:OVERHEAD_NBYTES] + second[OVERHEAD_NBYTES:])


def test_an_old_body_under_a_new_header_is_refused():
    old, new = seal("ballot", b"yes", **(OF | {"generation": 6})), seal("ballot", b"no!", **OF)
    header_nbytes = OVERHEAD_NBYTES - 16
    assert unseal(old, "ballot", **(OF | {"generation": 6}), limit=9) == b"yes"
    assert "checksum" in refusal(new[:header_nbytes] + old[header_nbytes:])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": "other"}, "of another name than 'other'"),
        ({"rank": 4}, "it was written by rank 3"),
        ({"epoch": 3}, "it is stale, of epoch 2 where 3 was expected"),
        ({"epoch": 1}, "it is ahead, of epoch 2 where 1 was expected"),
        ({"generation": 8}, "it is stale, of generation 7 where 8 was expected"),
        ({"generation": 6}, "it is ahead, of generation 7 where 6 was expected"),
        ({"kind": "record"}, "it is a 'ballot' where a 'record' was expected"),
    ],
)
def test_a_message_that_is_not_the_one_expected_is_refused_saying_which_it_is(change, problem):
    assert problem in refusal(seal("ballot", b"ok", **OF), **change)


def test_another_magic_or_format_version_is_refused_saying_which():
    blob = seal("ballot", b"ok", **OF)
    assert "starts with b'HTTP' where b'EPLB' was expected" in refusal(b"HTTP" + blob[4:])
    assert "it has format version 9 where this release reads 1" in refusal(blob[:4] + b"\x09" + blob[5:])


def test_a_body_beyond_the_limit_is_refused_by_what_it_claims():
    blob = seal("ballot", bytes(100), **OF)
    assert unseal(blob, "ballot", **OF, limit=100) == bytes(100)
    assert "claims 100 bytes where at most 99 are accepted" in refusal(blob, limit=99)
    assert "claims 100 bytes where at most 99 are accepted" in refusal(blob[:-1], limit=99)


@pytest.mark.parametrize("kind", ["", "sixteen-letters-", "ä", "a\n"])
def test_a_kind_that_does_not_fit_the_envelope_is_refused(kind):
    with pytest.raises(ValueError, match="kind"):
        seal(kind, b"", **OF)


def test_sealing_and_unsealing_a_ballot_take_less_than_10_us_each():
    body = bytes(120)
    blob = seal("ballot", body, **OF)
    best = {}
    for _ in range(5):
        for name, call in (
            ("seal", lambda: seal("ballot", body, **OF)),
            ("unseal", lambda: unseal(blob, "ballot", **OF, limit=4096)),
        ):
            start = time.thread_time()
            for _ in range(500):
                call()
            best[name] = min(best.get(name, 1), (time.thread_time() - start) / 500)
    assert best["seal"] < 10e-6
    assert best["unseal"] < 10e-6


# --- records on the wire ----------------------------------------------------------------------------------------------

LAYOUT = build_layout(
    [[torch.zeros(4, 3, 2), torch.zeros(4, 2, 5, dtype=torch.bfloat16), torch.zeros(4)] for _ in range(3)],
    ["w13_weight", "w2_weight", "scale"],
).record()

RECORD = RankRecord(
    rank=1,
    backend="nixl",
    backend_version="0.1.0",
    core_version=eplb_core.__version__,
    api_version=1,
    label="NIXL",
    options={"mode": "zero_copy", "ratio": 0.5, "threads": 2, "eager": True},
    members=(0, 1, 3),
    boot_id="f14f1de9",
    host="127.0.0.1",
    layout=LAYOUT,
    payload=b"\0opaque\xff",
)

texts = st.text(max_size=8)
sizes = st.integers(0, 2**40)


@st.composite
def layouts(draw):
    num_tensors = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    kinds = [
        tuple(
            TensorRecord(
                draw(texts), shape, tuple(draw(sizes) for _ in shape), draw(sizes), draw(st.integers(-1, index - 1))
            )
            for index in range(count)
            for shape in [tuple(draw(st.lists(sizes, max_size=2)))]
        )
        for count in num_tensors
    ]
    picks = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    names = [tuple(draw(st.lists(texts, min_size=len(pick), max_size=len(pick), unique=True))) for pick in picks]
    return LayoutRecord(tuple(draw(st.integers(1, 2**20)) for _ in picks), tuple(names), tuple(picks))


records = st.builds(
    RankRecord,
    rank=st.integers(0, 2**31 - 1),
    backend=texts,
    backend_version=texts,
    core_version=texts,
    api_version=st.integers(0, 99),
    label=texts,
    options=st.dictionaries(
        texts,
        texts | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
    ),
    members=st.sets(st.integers(0, 2**31 - 1), max_size=4).map(lambda ranks: tuple(sorted(ranks))),
    boot_id=texts,
    host=texts,
    layout=layouts(),
    payload=st.binary(max_size=64),
)


@given(records)
@settings(deadline=None)
def test_a_record_comes_back_as_it_was(record):
    back = RankRecord.from_bytes(record.to_bytes(), rank=record.rank)
    assert back == record
    assert repr(back) == repr(record)  # == takes 1 for True
    assert back.payload == record.payload
    assert back.shared_digest() == record.shared_digest()
    assert difference(record, back) is None


def test_a_record_of_real_tensors_comes_back_as_it_was():
    assert RankRecord.from_bytes(RECORD.to_bytes(), rank=1) == RECORD


def test_equal_layers_are_one_object_after_decoding():
    tensors = RankRecord.from_bytes(RECORD.to_bytes(), rank=1).layout.tensors
    assert tensors[0] is tensors[1] is tensors[2]


def malformed(blob, rank=1):
    with pytest.raises(MetadataError) as caught:
        RankRecord.from_bytes(blob, rank=rank)
    assert caught.value.code == "EPLB-M005"
    assert str(caught.value).startswith(f"Refused a message from rank {rank}: ")
    assert len(str(caught.value)) < 1500
    return str(caught.value)


def split(blob):
    (nbytes,) = struct.unpack_from("<I", blob)
    return json.loads(zlib.decompress(blob[4 : 4 + nbytes])), blob[4 + nbytes :]


def join(document, payload=RECORD.payload):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    packed = zlib.compress(text)
    return struct.pack("<I", len(packed)) + packed + payload


def test_the_wire_format_is_packed_json_with_the_payload_as_it_is_and_no_pickle():
    blob = RECORD.to_bytes()
    document, payload = split(blob)
    assert payload == RECORD.payload
    assert document["names"] == [["w13_weight", "w2_weight", "scale"]]
    assert document["layers"] == [[0, 0, 4]] * 3
    assert document["tensors"][0][0] == ["float32", [3, 2], [2, 1], 24, -1]
    assert RankRecord.from_bytes(join(document), rank=1) == RECORD
    assert "not a dict" in malformed(join([document]))
    with pytest.raises(MetadataError):
        RankRecord.from_bytes(pickle.dumps(RECORD), rank=1)


@pytest.mark.parametrize("name", sorted(split(RECORD.to_bytes())[0]))
def test_a_record_without_one_of_its_keys_is_refused_naming_it(name):
    document, _ = split(RECORD.to_bytes())
    del document[name]
    assert f"lacks ['{name}']" in malformed(join(document))


def test_a_record_with_an_unknown_key_is_refused_naming_it_and_the_release_it_comes_from():
    document, _ = split(RECORD.to_bytes())
    text = malformed(join(document | {"shards": 1}))
    assert "unknown keys ['shards']" in text
    assert "comes from" not in text
    text = malformed(join(document | {"shards": 1, "core_version": "9.9.9"}))
    assert f"it comes from eplb-core '9.9.9', this is '{eplb_core.__version__}'" in text


def test_a_key_that_stands_twice_is_refused():
    document, _ = split(RECORD.to_bytes())
    text = json.dumps(document)[:-1] + ', "rank": 1}'
    assert "twice" in malformed(join(text.encode()))


@pytest.mark.parametrize("name", sorted(split(RECORD.to_bytes())[0]))
@pytest.mark.parametrize("value", [None, True, 1.5, [[]], {"a": []}, "text", [1, "x"], [None]], ids=repr)
def test_a_value_of_another_type_is_refused_naming_its_key(name, value):
    document, _ = split(RECORD.to_bytes())
    if type(value) is type(document[name]) is str:
        return
    document[name] = value
    text = malformed(join(document))
    assert name in text or name in {"options", "layers", "names", "tensors"}


@pytest.mark.parametrize(
    "changes",
    [
        {"members": [-1]},
        {"members": [1 << 63]},
        {"members": [True]},
        {"layers": [[0, 0, 0]]},
        {"layers": [[0, 0, 1 << 63]]},
        {"layers": [[0, 1, 4]]},
        {"layers": [[1, 0, 4]]},
        {"layers": [[-1, 0, 4]]},
        {"layers": [[0, 0]]},
        {"layers": [[0]]},
        {"names": [["a", "b"]]},
        {"names": [["a", "b", "b"]]},
        {"names": [[]], "tensors": [[]]},
        {"tensors": [[["float32", [3, 2], [2], 24, -1]] * 3]},
        {"tensors": [[["float32", [3, 2], [2, 1], -1, -1]] * 3]},
        {"tensors": [[["float32", [3, 2], [2, 1], 1 << 63, -1]] * 3]},
        {"tensors": [[["float32", [3, 2], [2, 1], 24, 0]] * 3]},
        {"tensors": [[["float32", [3, 2], [2, 1], 24, -2]] * 3]},
        {"tensors": [[["float32", [3, -2], [2, 1], 24, -1]] * 3]},
        {"tensors": [[["float32", [3, 2], [2, 1], 24]] * 3]},
        {"tensors": [[[32, [3, 2], [2, 1], 24, -1]] * 3]},
        {"options": {"a": None}},
        {"options": {"a": [1]}},
        {"options": {"a": 1 << 63}},
        {"payload_nbytes": 7},
        {"payload_nbytes": 9},
        {"rank": 2},
    ],
    ids=str,
)
def test_a_record_that_contradicts_itself_is_refused(changes):
    document, _ = split(RECORD.to_bytes())
    malformed(join(document | changes))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_an_option_that_equals_nothing_is_refused(constant):
    document, _ = split(RECORD.to_bytes())
    text = json.dumps(document | {"options": {"ratio": "HERE"}}).replace('"HERE"', constant)
    malformed(join(text.encode()))


def test_the_record_of_another_rank_is_refused():
    assert "that of rank 1" in malformed(RECORD.to_bytes(), rank=2)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\0",
        b"\x05\0\0\0abc",
        b"\xff\xff\xff\xff" + bytes(100),
        b"\x05\0\0\0abcde",
        join(b"not json"),
        join(b"\xff\xfe"),
        join(b"[" * 200_000),
        join(b"1" * 6000),
        join(b'{"rank": 1'),
    ],
    ids=range(11),
)
def test_bytes_that_are_no_record_are_refused(blob):
    malformed(blob)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(blob):
    malformed(blob)


@given(st.data())
@settings(deadline=None)
def test_a_record_cut_anywhere_is_refused(data):
    blob = RECORD.to_bytes()
    malformed(blob[: data.draw(st.integers(0, len(blob) - 1))])


@given(st.data())
@settings(deadline=None)
def test_a_record_with_random_json_in_place_of_a_part_is_refused_or_is_a_record(data):
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=8,
    )
    document, _ = split(RECORD.to_bytes())
    document[data.draw(st.sampled_from(sorted(document)))] = data.draw(junk)
    blob = join(document)
    try:
        record = RankRecord.from_bytes(blob, rank=1)
    except MetadataError:
        malformed(blob)
    else:
        assert RankRecord.from_bytes(record.to_bytes(), rank=1) == record


def test_json_that_unpacks_beyond_its_bound_is_refused_unread():
    bomb = join(b'{"rank": "' + bytes(64 << 20) + b'"}')
    assert len(bomb) < MAX_RECORD_NBYTES
    assert "unpacks to more than" in malformed(bomb)


def test_a_record_beyond_the_size_of_any_record_is_refused():
    assert "at most" in malformed(RECORD.to_bytes() + bytes(MAX_RECORD_NBYTES))


def test_packed_json_that_ends_early_or_late_is_refused():
    document, payload = split(RECORD.to_bytes())
    packed = zlib.compress(json.dumps(document).encode())
    for wrong in (packed + b"more", packed[:-4]):  # without its last four bytes all of the text is there, unchecked
        assert "does not end where it says" in malformed(struct.pack("<I", len(wrong)) + wrong + payload)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"options": {"a": None}}, "shared option 'a' is a NoneType"),
        ({"options": {"a": [1]}}, "shared option 'a' is a list"),
        ({"options": {"a": np.float64(1)}}, "shared option 'a' is a float64"),
        ({"options": {1: 1}}, "shared option 1 is a int"),
        ({"options": {"a": float("nan")}}, "shared option 'a' is nan"),
        ({"options": {"a": 10**5000}}, "shared option 'a' does not fit 64 bits"),
        ({"payload": bytes(MAX_PAYLOAD_NBYTES + 1)}, "payload takes 1048577 bytes where at most 1048576 are accepted"),
        (
            {"layout": LayoutRecord((1,) * 300_000, (("w",),) * 300_000, (LAYOUT.tensors[0][:1],) * 300_000)},
            "300000 tensors are registered",
        ),
    ],
    ids=range(8),
)
def test_what_no_peer_would_accept_cannot_become_a_record(changes, problem):
    with pytest.raises(MetadataError, match=problem) as caught:
        replace(RECORD, **changes)
    assert caught.value.code == "EPLB-M005"


def test_a_record_too_long_for_the_wire_is_refused_where_it_is_made():
    def record(*names):
        return replace(
            RECORD,
            layout=LayoutRecord(
                (1,) * len(names), tuple((name,) for name in names), (LAYOUT.tensors[0][:1],) * len(names)
            ),
        )

    with pytest.raises(MetadataError, match="of JSON where at most") as caught:
        record("w" * (3 << 20)).to_bytes()
    assert caught.value.code == "EPLB-M005"
    noise = base64.b64encode(np.random.default_rng(0).bytes(1_300_000)).decode()
    with pytest.raises(MetadataError, match="bytes where at most") as caught:
        record(*(noise[i : i + 400] for i in range(0, len(noise), 400))).to_bytes()
    assert "JSON" not in str(caught.value)


def test_the_largest_payload_travels():
    record = replace(RECORD, payload=bytes(MAX_PAYLOAD_NBYTES))
    assert RankRecord.from_bytes(record.to_bytes(), rank=1).payload == record.payload


def test_options_are_a_copy_that_the_backend_cannot_change_later():
    options = {"mode": "staged"}
    record = replace(RECORD, options=options)
    digest = record.shared_digest()
    options["mode"] = "zero_copy"
    assert record.options == {"mode": "staged"}
    assert record.shared_digest() == digest


@pytest.mark.parametrize(("num_tensors", "num_experts"), [(4, 256), (6, 16)])
@pytest.mark.parametrize("named_by_layer", [False, True])
def test_metadata_of_61_layers_takes_less_than_64_kib_and_100_ms(num_tensors, num_experts, named_by_layer):
    """Case 17."""
    weights = [[torch.zeros(num_experts, 4, 2 + t) for t in range(num_tensors)] for _ in range(61)]
    names = [[f"model.layers.{layer}.mlp.experts.w{t}" for t in range(num_tensors)] for layer in range(61)]
    layout = build_layout(weights, names if named_by_layer else None)
    addresses = np.array([[row.data_ptr() for row in rows] for rows in layout.rows], np.int64).tobytes()
    members = tuple(range(256))
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        local = replace(RECORD, layout=layout.record(), payload=addresses, members=members)
        blob = local.to_bytes()
        peer = RankRecord.from_bytes(blob, rank=1)
        same = difference(local, peer) is None and local.shared_digest() == peer.shared_digest()
        seconds.append(time.thread_time() - start)
        assert same
    assert len(blob) < 64 << 10
    assert min(seconds) < 0.100


# --- comparison -------------------------------------------------------------------------------------------------------


def changed(**changes):
    return replace(RECORD, rank=2, **changes)


def relayout(*, num_experts=4, names=LAYOUT.names, tensors=LAYOUT.tensors, layer=None, index=0, **of_a_tensor):
    if layer is not None:
        records = list(tensors[layer])
        records[index] = replace(records[index], **of_a_tensor)
        tensors = (*tensors[:layer], tuple(records), *tensors[layer + 1 :])
    return changed(layout=LayoutRecord((num_experts,) * len(names), names, tensors))


def mismatch(peer, code, local=RECORD):
    error = difference(local, peer)
    assert isinstance(error, MetadataError)
    assert error.code == code
    assert local.shared_digest() != peer.shared_digest()
    return error


def test_ranks_that_differ_only_in_what_is_their_own_have_no_difference():
    peer = changed(boot_id="other", host="10.0.0.2", payload=b"else", label="X")
    assert difference(RECORD, peer) is None
    assert RECORD.shared_digest() == peer.shared_digest()


@pytest.mark.parametrize(
    ("changes", "name", "local", "remote"),
    [
        ({"core_version": "0.2.0"}, "eplb-core version", eplb_core.__version__, "0.2.0"),
        ({"api_version": 2}, "API version", 1, 2),
        ({"backend": "torch_gloo"}, "backend", "nixl", "torch_gloo"),
        ({"backend_version": "0.1.1"}, "backend version", "0.1.0", "0.1.1"),
        ({"members": (0, 1)}, "members", (0, 1, 3), (0, 1)),
    ],
)
def test_versions_backend_and_members_must_be_equal(changes, name, local, remote):
    error = mismatch(changed(**changes), "EPLB-M004")
    assert str(error).startswith(f"NIXL EPLB {name} mismatch with rank 2: local={local}, peer={remote}")
    assert error.fields["field"] == name


def test_a_key_mismatch_has_the_text_users_search_for_and_then_only_the_difference():
    names = (("w13_weight", "w2_weight", "scale"),) * 2 + (("w13_weight", "w2", "scale"),)
    error = mismatch(relayout(names=names), "EPLB-M002")
    mine = sorted((layer, name) for layer in range(3) for name in ("w13_weight", "w2_weight", "scale"))
    theirs = sorted({*mine} - {(2, "w2_weight")} | {(2, "w2")})
    text = f"NIXL EPLB metadata key mismatch with rank 2: local={mine}, peer={theirs}"
    after = " Missing on rank 1: [(2, 'w2')]. Missing on rank 2: [(2, 'w2_weight')]. [EPLB-M002]"
    assert str(error) == text + after


def test_a_peer_with_fewer_layers_lacks_their_keys():
    error = mismatch(relayout(names=LAYOUT.names[:2], tensors=LAYOUT.tensors[:2]), "EPLB-M002")
    assert "Missing on rank 2: [(2, 'scale'), (2, 'w13_weight'), (2, 'w2_weight')]." in str(error)
    assert "Missing on rank 1" not in str(error)


def test_keys_in_another_order_are_refused_because_messages_carry_indices():
    swapped = (("w2_weight", "w13_weight", "scale"), *LAYOUT.names[1:])
    error = mismatch(relayout(names=swapped), "EPLB-M002")
    assert "order is not: first (0, 'w13_weight') here where the peer has (0, 'w2_weight')" in str(error)


def test_keys_that_are_distributed_otherwise_over_layers_are_refused():
    def of(*layers):
        return relayout(names=layers, tensors=tuple(LAYOUT.tensors[0][: len(names)] for names in layers))

    assert "Missing on rank" in str(mismatch(of(("a", "b"), ("c",)), "EPLB-M002", local=of(("a",), ("b", "c"))))


def test_long_lists_of_keys_are_cut_and_the_difference_is_not_lost_in_them():
    many = tuple((f"w{layer}", "scale") for layer in range(100))
    local = replace(relayout(names=many, tensors=(LAYOUT.tensors[0][:2],) * 100), rank=1)
    peer = relayout(names=(*many[:99], ("w99", "scales")), tensors=(LAYOUT.tensors[0][:2],) * 100)
    text = str(mismatch(peer, "EPLB-M002", local=local))
    assert text.count("... 136 more]") == 2
    assert text.endswith("Missing on rank 1: [(99, 'scales')]. Missing on rank 2: [(99, 'scale')]. [EPLB-M002]")
    assert len(text) < 5000


def test_experts_per_rank_must_be_equal_in_every_layer():
    error = mismatch(relayout(num_experts=8), "EPLB-M004")
    assert str(error).startswith(
        "NIXL EPLB num_local_physical_experts mismatch with rank 2: local=4, peer=8 in layer 0"
    )
    assert "2 more layer(s)" in str(error)


def test_a_size_mismatch_has_the_text_users_search_for_and_the_kind_of_both_tensors():
    error = mismatch(relayout(layer=1, dtype="float64", nbytes=48), "EPLB-M003")
    assert str(error) == (
        "NIXL EPLB nbytes_per_expert mismatch for (1, 'w13_weight') with rank 2: local=24, peer=48"
        " One expert is float32 (3, 2) with strides (2, 1) here, float64 (3, 2) with strides (2, 1) on rank 2."
        " [EPLB-M003]"
    )
    assert error.fields["key"] == (1, "w13_weight")


def test_the_first_key_of_a_size_mismatch_is_named_and_the_others_listed():
    wide = relayout(layer=0, nbytes=48).layout.tensors[0]
    text = str(mismatch(relayout(tensors=(LAYOUT.tensors[0], wide, wide)), "EPLB-M003"))
    assert "for (1, 'w13_weight') with" in text
    assert "Likewise [(2, 'w13_weight')]." in text


@pytest.mark.parametrize(
    ("changes", "name", "local", "remote"),
    [
        ({"dtype": "int32"}, "dtype", "float32", "int32"),
        ({"shape": (2, 3)}, "shape", "(3, 2)", "(2, 3)"),
        ({"stride": (1, 3)}, "stride", "(2, 1)", "(1, 3)"),
        ({"alias": 0, "index": 2, "nbytes": 4}, "alias", "-1", "0"),
    ],
)
def test_tensors_of_equal_size_must_be_equal_in_kind_too(changes, name, local, remote):
    error = mismatch(relayout(layer=2, **changes), "EPLB-M004")
    assert str(error).startswith(f"NIXL EPLB {name} mismatch with rank 2: local={local}, peer={remote}")
    assert f"for (2, '{LAYOUT.names[2][changes.get('index', 0)]}')" in str(error)


def test_a_plain_tensor_on_one_rank_and_a_permuted_one_on_the_other_are_refused_by_stride():
    plain = build_layout([[torch.zeros(4, 3, 2)]]).record()
    permuted = build_layout([[torch.zeros(4, 2, 3).transpose(1, 2)]]).record()
    error = mismatch(changed(layout=permuted), "EPLB-M004", local=replace(RECORD, layout=plain))
    assert error.fields["field"] == "stride"
    assert (error.fields["local"], error.fields["remote"]) == ((2, 1), (1, 3))


def test_aliases_on_one_rank_alone_are_refused():
    weight = torch.zeros(4, 2)
    tied = build_layout([[weight, weight]]).record()
    apart = build_layout([[weight, weight.clone()]]).record()
    error = mismatch(changed(layout=apart), "EPLB-M004", local=replace(RECORD, layout=tied))
    assert error.fields["field"] == "alias"
    assert "the same memory as tensor 0 of its layer here" in str(error)


def test_only_the_options_that_differ_are_shown():
    peer = changed(options={"mode": "staged", "ratio": 0.5, "eager": True, "pages": 4})
    error = mismatch(peer, "EPLB-M004")
    assert str(error).startswith(
        "NIXL EPLB options mismatch with rank 2: local={'mode': 'zero_copy', 'threads': 2},"
        " peer={'mode': 'staged', 'pages': 4}"
    )


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ("1", 1)], ids=repr)
def test_options_of_another_type_differ(one, other):
    error = mismatch(changed(options={"a": other}), "EPLB-M004", local=replace(RECORD, options={"a": one}))
    assert error.fields["field"] == "options"


def test_checks_come_in_the_order_in_which_one_explains_the_next():
    wrong_all = {
        "core_version": "2",
        "api_version": 2,
        "backend": "b",
        "backend_version": "2",
        "members": (1,),
        "options": {},
    }
    layout = relayout(num_experts=8, layer=0, nbytes=1, dtype="int8", shape=(1,), stride=(1,)).layout
    seen = []
    peer = changed(**wrong_all, layout=replace(layout, names=(("a", "b", "c"),) * 3))
    right = {name: getattr(RECORD, name) for name in wrong_all}
    for name in ("core_version", "api_version", "backend", "backend_version", "members"):
        seen.append(difference(RECORD, peer).fields["field"])
        peer = replace(peer, **{name: right[name]})
    seen.append(difference(RECORD, peer).code)
    peer = replace(peer, layout=layout)
    seen.append(difference(RECORD, peer).fields["field"])
    peer = replace(peer, layout=replace(layout, num_experts=LAYOUT.num_experts))
    seen.append(difference(RECORD, peer).code)
    for name in ("nbytes", "dtype", "shape", "stride"):
        records = peer.layout.tensors[0]
        first = replace(records[0], **{name: getattr(LAYOUT.tensors[0][0], name)})
        peer = replace(peer, layout=replace(peer.layout, tensors=((first, *records[1:]), *peer.layout.tensors[1:])))
        seen.append(difference(RECORD, peer).fields["field"])
    assert seen == [
        *("eplb-core version", "API version", "backend", "backend version", "members"),
        *("EPLB-M002", "num_local_physical_experts", "EPLB-M003"),
        *("dtype", "shape", "stride", "options"),
    ]
    assert difference(RECORD, replace(peer, options=RECORD.options)) is None


@given(records, st.data())
@settings(deadline=None)
def test_digests_are_equal_exactly_when_there_is_no_difference(record, data):
    other = data.draw(records)
    taken = data.draw(st.sets(st.sampled_from([each.name for each in fields(RankRecord)])))
    peer = replace(record, **{name: getattr(other, name) for name in taken})
    if data.draw(st.booleans()):
        more = tuple(count + data.draw(st.integers(0, 1)) for count in record.layout.num_experts)
        peer = replace(peer, layout=replace(record.layout, num_experts=more))
    if data.draw(st.booleans()):
        layer = data.draw(st.integers(0, len(peer.layout.tensors) - 1))
        tensors = list(peer.layout.tensors)
        name = data.draw(st.sampled_from([each.name for each in fields(TensorRecord)]))
        drawn = getattr(data.draw(st.sampled_from(other.layout.tensors))[0], name)
        tensors[layer] = (replace(tensors[layer][0], **{name: drawn}), *tensors[layer][1:])
        peer = replace(peer, layout=replace(peer.layout, tensors=tuple(tensors)))
    for one, two in ((record, peer), (peer, record)):
        assert (difference(one, two) is None) == (one.shared_digest() == two.shared_digest())


def test_the_error_reaches_another_process_unchanged():
    error = mismatch(relayout(layer=1, nbytes=48), "EPLB-M003")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.fields) == (str(error), error.fields)


# --- digests of maps, hosts -------------------------------------------------------------------------------------------

integer_dtypes = st.sampled_from(
    [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, ">i4"]
)
maps = npst.arrays(np.int64, npst.array_shapes(min_dims=1, max_dims=3, max_side=5), elements=st.integers(0, 127))


@given(maps, integer_dtypes)
def test_a_maps_digest_is_that_of_its_values_whatever_its_dtype_and_strides(array, dtype):
    digest = map_digest(array)
    assert len(digest) == 16
    assert map_digest(array.astype(dtype)) == digest
    assert map_digest(np.asfortranarray(array)) == digest
    assert map_digest(array[..., ::-1][..., ::-1]) == digest
    assert map_digest(array.tolist()) == digest
    assert map_digest(torch.from_numpy(array)) == digest


@given(maps, st.data())
def test_any_other_value_has_another_digest(array, data):
    other = array.copy()
    other[tuple(data.draw(st.integers(0, side - 1)) for side in array.shape)] += data.draw(
        st.integers(-128, 128).filter(bool)
    )
    assert map_digest(other) != map_digest(array)


def test_another_shape_of_the_same_values_has_another_digest():
    array = np.arange(12)
    digests = {map_digest(array.reshape(shape)) for shape in ((12,), (1, 12), (12, 1), (3, 4), (4, 3), (2, 6))}
    assert len(digests) == 6
    assert map_digest(np.zeros((0, 4), int)) != map_digest(np.zeros((4, 0), int))


def test_minus_one_is_not_the_largest_unsigned_value():
    assert map_digest(np.array([-1], np.int8)) == map_digest(np.array([-1], np.int64))
    with pytest.raises(PlanError, match="does not fit int64"):
        map_digest(np.array([2**64 - 1], np.uint64))


@pytest.mark.parametrize("array", [[1.0], [True], ["1"], [None], []], ids=repr)
def test_a_map_of_anything_but_integers_has_no_digest(array):
    with pytest.raises(PlanError, match="not integers") as caught:
        map_digest(array)
    assert caught.value.code == "EPLB-P001"


def test_nodes_are_numbered_by_boot_id_in_order_of_first_appearance():
    assert node_ids(["b", "a", "b", "c", "a"]) == (0, 1, 0, 2, 1)
    assert node_ids([]) == ()


def test_the_boot_id_is_the_kernels_and_the_same_at_every_call():
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", read_boot_id())
    assert read_boot_id() == read_boot_id()


def test_where_the_kernel_offers_no_boot_id_the_hosts_name_stands_for_it(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "BOOT_ID_FILE", tmp_path / "missing")
    assert read_boot_id() == f"host {socket.gethostname()}"
    monkeypatch.setattr(hosts, "BOOT_ID_FILE", tmp_path)
    assert read_boot_id() == f"host {socket.gethostname()}"
    empty = tmp_path / "empty"
    empty.touch()
    monkeypatch.setattr(hosts, "BOOT_ID_FILE", empty)
    assert read_boot_id() == f"host {socket.gethostname()}"
