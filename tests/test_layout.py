"""Layout: which tensors are registered as rows of bytes, which are refused, and how much memory landing takes."""

from __future__ import annotations

import gc
import pickle
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.errors import ConfigError, MetadataError
from eplb_core.weights.host_landing import check_landing
from eplb_core.weights.layout import LayoutRecord, build_layout

SUPPORT = Path(__file__).parent / "support"
if str(SUPPORT) not in sys.path:
    sys.path.insert(0, str(SUPPORT))

import fake_device  # noqa: E402

FLOATS = ["float64", "float32", "bfloat16", "float16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]
FLOATS += ["float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
DTYPES = [getattr(torch, name) for name in FLOATS + INTEGERS if hasattr(torch, name)]


@pytest.fixture
def device():
    yield fake_device.require()
    if fake_device.why_not() is None:
        fake_device.reset()


def filled(shape, dtype):
    """A tensor whose bytes count up, whatever its dtype."""
    tensor = torch.empty(shape, dtype=dtype)
    nbytes = tensor.untyped_storage().nbytes()
    counting = torch.arange(nbytes).to(torch.uint8)
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (nbytes,)).copy_(counting)
    return tensor


def one(tensor):
    return build_layout([[tensor]])


def refusal(tensor, **names):
    with pytest.raises(MetadataError) as caught:
        build_layout([[torch.zeros(4, 2), torch.zeros(4)], [torch.zeros(4, 2), tensor]], **names)
    assert caught.value.code == "EPLB-M001"
    return str(caught.value)


# --- what is accepted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_is_seen_as_its_own_bytes(dtype):
    tensor = filled((3, 2, 4), dtype)
    (view,) = one(tensor).rows[0]
    assert view.dtype == torch.uint8
    assert view.shape == (3, 8 * dtype.itemsize)
    assert view.is_contiguous()
    assert view.data_ptr() == tensor.data_ptr()
    assert view.flatten().tolist() == torch.arange(24 * dtype.itemsize).to(torch.uint8).tolist()


def test_the_fp8_and_fp4_types_that_models_use_are_among_those_tested():
    assert {torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.uint16, torch.bool} <= set(DTYPES)
    if torch.__version__ >= "2.13":
        assert {torch.float8_e8m0fnu, torch.float4_e2m1fn_x2} <= set(DTYPES)


def test_a_row_written_through_the_view_is_that_expert_and_no_other():
    tensor = torch.zeros(4, 3, 5).transpose(1, 2)
    (view,) = one(tensor).rows[0]
    view[2] = torch.ones(5, 3).view(torch.uint8).flatten()
    assert torch.equal(tensor[2], torch.ones(5, 3))
    assert tensor[[0, 1, 3]].count_nonzero() == 0


@pytest.mark.parametrize(
    ("tensor", "shape", "stride", "nbytes"),
    [
        (torch.zeros(4, 2, 3), (2, 3), (3, 1), 24),
        (torch.zeros(4, 2, 3).transpose(1, 2), (3, 2), (1, 3), 24),
        (torch.zeros(4, 2, 3, 5).permute(0, 3, 1, 2), (5, 2, 3), (1, 15, 5), 120),
        (torch.zeros(4), (), (), 4),
        (torch.zeros(4, 1, 1), (1, 1), (1, 1), 4),
        (torch.zeros(1, 2, 3), (2, 3), (3, 1), 24),
        (torch.zeros(2, 2, 3)[1:], (2, 3), (3, 1), 24),
        (torch.zeros(8, 2, 3)[2:6], (2, 3), (3, 1), 24),
        (torch.zeros(4, 0), (0,), (1,), 0),
        (torch.zeros(4, 2, 0).transpose(1, 2), (0, 2), (2, 1), 0),
        (torch.zeros(24).as_strided((4, 1, 6), (6, 99, 1)), (1, 6), (1, 1), 24),
        (torch.zeros(24).as_strided((4, 6, 1), (6, 1, 0)), (6, 1), (1, 1), 24),
        (torch.zeros(9).as_strided((1, 3, 2), (1, 1, 3)), (3, 2), (1, 3), 24),
        (torch.zeros(9).as_strided((1, 3), (0, 1)), (3,), (1,), 12),
    ],
)
def test_dense_rows_are_accepted_however_their_axes_lie(tensor, shape, stride, nbytes):
    layout = one(tensor)
    (record,) = layout.record().tensors[0]
    assert (record.shape, record.stride, record.nbytes) == (shape, stride, nbytes)
    assert layout.rows[0][0].shape == (len(tensor), nbytes)
    if nbytes:
        assert layout.rows[0][0].data_ptr() == tensor.data_ptr()


@st.composite
def dense_tensors(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    num_experts = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64]))
    order = draw(st.permutations(range(len(sizes))))
    inverse = [order.index(axis) for axis in range(len(sizes))]
    return filled([num_experts, *(sizes[axis] for axis in order)], dtype).permute(0, *(1 + axis for axis in inverse))


@given(dense_tensors())
@settings(deadline=None)
def test_every_permutation_of_dense_rows_has_each_experts_bytes_in_its_row(tensor):
    (view,) = one(tensor).rows[0]
    for expert, row in zip(tensor, view, strict=True):
        assert sorted(row.tolist()) == sorted(expert.contiguous().view(-1).view(torch.uint8).tolist())


@given(dense_tensors(), st.data())
@settings(deadline=None)
def test_a_strided_slice_of_dense_rows_is_accepted_only_when_it_is_dense_itself(tensor, data):
    axis = data.draw(st.integers(0, tensor.dim() - 1))
    sliced = tensor.narrow(axis, 0, data.draw(st.integers(1, tensor.shape[axis])))
    reached = {sliced[index].data_ptr() for index in np.ndindex(*sliced.shape)}
    rows_apart = sliced.stride(0) * sliced.element_size() if len(sliced) > 1 else None
    # The definition, by brute force: addresses of each expert are one run, and runs follow one another.
    itemsize = sliced.element_size()
    dense = reached == {sliced.data_ptr() + i * itemsize for i in range(sliced.numel())}
    expert = {sliced[(0, *index)].data_ptr() for index in np.ndindex(*sliced.shape[1:])}
    dense &= expert == {sliced.data_ptr() + i * itemsize for i in range(len(expert))}
    dense &= rows_apart in {None, len(expert) * itemsize}
    if dense:
        assert one(sliced).rows[0][0].data_ptr() == sliced.data_ptr()
    else:
        with pytest.raises(MetadataError):
            one(sliced)


def test_a_parameter_that_requires_grad_is_held_as_it_is_and_its_rows_share_its_memory():
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    layout = one(parameter)
    layout.rows[0][0][1] = torch.tensor([1.0, 2.0]).view(torch.uint8)
    assert parameter[1].tolist() == [1.0, 2.0]
    assert layout.weights[0][0] is parameter  # to see whether it still has the memory that was registered
    assert not layout.rows[0][0].requires_grad


def test_rows_registered_in_inference_mode_can_be_written_outside_of_it():
    with torch.inference_mode():
        tensor = torch.zeros(2, 2)
        layout = one(tensor)
    layout.rows[0][0].fill_(255)
    assert tensor.isnan().all()


def test_layers_may_hold_different_tensors():
    layout = build_layout([[torch.zeros(2, 3)], [torch.zeros(2, 3), torch.zeros(2)]], [["w"], ["w", "scale"]])
    assert layout.keys == ((0, "w"), (1, "w"), (1, "scale"))
    assert layout.num_layers == 2
    assert [geometry.nbytes.tolist() for geometry in layout.geometries] == [[12], [12, 4]]


def test_names_default_to_numbers_and_one_list_serves_all_layers():
    weights = [[torch.zeros(2), torch.zeros(2)] for _ in range(2)]
    assert build_layout(weights).keys == ((0, "0"), (0, "1"), (1, "0"), (1, "1"))
    assert build_layout(weights, ["w13", "w2"]).keys == ((0, "w13"), (0, "w2"), (1, "w13"), (1, "w2"))


def test_generators_and_parameter_lists_of_tensors_are_lists_too():
    layers = torch.nn.ParameterList([torch.zeros(2), torch.zeros(2)])
    assert build_layout(layers for _ in range(1)).keys == ((0, "0"), (0, "1"))


def test_memory_stays_valid_when_the_host_deletes_its_tensors():
    tensor = torch.full((64, 1 << 14), 7, dtype=torch.uint8)
    layout = one(tensor)
    layout.weights.clear()  # the rows alone hold it
    del tensor
    gc.collect()
    others = [torch.full((64, 1 << 14), i, dtype=torch.uint8) for i in range(4)]
    assert (layout.rows[0][0] == 7).all()
    del others


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.ones(1).expand(4), "experts overlap"),
        (torch.ones(1, 3).expand(4, 3), "experts overlap"),
        (torch.ones(4, 1).expand(4, 3), "elements of one expert overlap"),
        (torch.zeros(12).unfold(0, 6, 2), "experts overlap"),
        (torch.zeros(13).as_strided((4, 2, 3), (3, 1, 1)), "elements of one expert overlap"),
        (torch.zeros(3, 4).t(), "expert axis is not the slowest"),
        (torch.zeros(2, 4, 3).transpose(0, 1), "expert axis is not the slowest"),
        (torch.zeros(4, 6)[:, :5], "gaps between its experts"),
        (torch.zeros(4, 6)[:, ::2], "gaps between the elements of one expert"),
        (torch.zeros(4, 3, 6)[:, :, :5], "gaps between the elements of one expert"),
        (torch.zeros(8, 6)[::2], "gaps between its experts"),
        (torch.zeros(8)[::2], "gaps between its experts"),
    ],
)
def test_rows_that_are_not_dense_are_refused_by_name_with_shape_and_strides(tensor, problem):
    text = refusal(tensor)
    assert text.startswith("Tensor layer 1 '1' cannot be registered: ")
    assert problem in text
    assert str(tuple(tensor.shape)) in text
    assert str(tensor.stride()) in text


def freed():
    tensor = torch.zeros(4, 8)
    tensor.untyped_storage().resize_(16)
    return tensor


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, _meta, _size, _stride):
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Opaque(torch.Tensor):
    """A wrapper that does not say what it wraps."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (4, 2), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch: sparse CSR and nested are in beta
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.zeros(4, 2).to_sparse(), "layout is torch.sparse_coo"),
        (lambda: torch.zeros(4, 2).to_sparse_csr(), "layout is torch.sparse_csr"),
        (lambda: torch.zeros(4, 2).to_mkldnn(), "layout is torch._mkldnn"),
        (lambda: torch.quantize_per_tensor(torch.zeros(4, 2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.zeros(4, 2, device="meta"), "nothing is allocated"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "nothing is allocated"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "nested"),
        (lambda: torch.zeros(4, 2, dtype=torch.complex64).conj(), "conj bit"),
        (lambda: torch.zeros(4, 2, dtype=torch.complex64).conj().imag, "neg bit"),
        (freed, "its storage has 16 bytes where 128 are needed"),
        (lambda: Wrapper(torch.zeros(4, 2)), "a Wrapper wraps other tensors"),
        (Opaque, "never allocated|no address"),
        (lambda: torch.tensor(1.0), "no experts"),
        (lambda: torch.zeros(0, 4), "no experts"),
        (lambda: np.zeros((4, 2)), "it is a ndarray, not a torch.Tensor"),
        (lambda: None, "it is a NoneType, not a torch.Tensor"),
        (lambda: torch.zeros(3, 2), "it holds 3 experts, layer 1 'w13_weight' 4"),
    ],
)
def test_what_has_no_bytes_of_its_own_to_move_is_refused_by_name(make, problem):
    text = refusal(make(), tensor_names=["w13_weight", "w2_weight"])
    assert text.startswith("Tensor layer 1 'w2_weight' cannot be registered: ")
    assert any(each in text for each in problem.split("|"))


def test_the_resolved_form_of_a_refused_complex_tensor_is_accepted():
    assert one(torch.zeros(4, 2, dtype=torch.complex64).conj().resolve_conj()).rows[0][0].shape == (4, 16)


@pytest.mark.parametrize("weights", [[[]], [[torch.zeros(2)], []], None, 3, "ab", {"w": 1}, torch.zeros(2, 2)])
def test_what_is_no_list_of_lists_of_tensors_is_refused(weights):
    with pytest.raises(MetadataError, match="EPLB-M001"):
        build_layout(weights)


@pytest.mark.parametrize("layer", [torch.zeros(2, 2), {"w": torch.zeros(2)}, "w", 5])
def test_a_layer_that_is_no_list_of_tensors_is_refused_by_number(layer):
    with pytest.raises(MetadataError, match=r"list of layer 1 .* where a list is needed"):
        build_layout([[torch.zeros(2)], layer])


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([], "it is empty"),
        ("ab", "it is a str"),
        (["a"], "there are 1 for 2 tensors"),
        (["a", "b", "c"], "there are 3 for 2 tensors"),
        (["a", "a"], "'a' is given twice"),
        (["a", 1], "1 is not a printable string"),
        (["a", ""], "'' is not a printable string"),
        (["a", "b\n"], "is not a printable string"),
        (["a", "\ud800"], "is not a printable string"),
        ([["a", "b"]], "they are for 1 layers where 2 are registered"),
        ([["a", "b"], ["a"]], "names of layer 1 .* there are 1 for 2 tensors"),
        ([["a", "b"], ["c", "c"]], "names of layer 1 .* 'c' is given twice"),
        ([["a", "b"], "cd"], "names of layer 1 .* it is a str"),
        ([["a", "b"], None], "names of layer 1 .* it is a NoneType"),
        (["a", ["b"]], "is not a printable string"),
    ],
)
def test_names_that_do_not_fit_the_tensors_are_refused(names, problem):
    with pytest.raises(MetadataError, match=problem) as caught:
        build_layout([[torch.zeros(2), torch.zeros(2)] for _ in range(2)], names)
    assert caught.value.code == "EPLB-M001"


def test_one_list_of_names_does_not_serve_layers_of_different_lengths():
    with pytest.raises(MetadataError, match=r"names of layer 1 .* there are 1 for 2 tensors"):
        build_layout([[torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]], ["w"])


def test_memory_shared_between_layers_is_refused_naming_both():
    tied = torch.zeros(4, 2)
    with pytest.raises(MetadataError) as caught:
        build_layout([[tied], [torch.zeros(4, 2)], [tied.view(4, 2)]], ["w"])
    assert "Tensor layer 2 'w' cannot be registered: it shares memory with layer 0 'w'" in str(caught.value)


def test_the_first_of_several_shared_tensors_is_named_wherever_they_lie_in_memory():
    storage = torch.zeros(16)
    low, high = storage[:8].view(4, 2), storage[8:].view(4, 2)
    for first, second in ((low, high), (high, low)):
        with pytest.raises(MetadataError, match=r"layer 1 '0' .* shares memory with layer 0 '0'"):
            build_layout([[first, second], [first, second]])


@pytest.mark.parametrize("offset", [1, 2, 7])
def test_tensors_of_one_layer_that_overlap_in_part_are_refused_naming_both(offset):
    storage = torch.zeros(64)
    first, second = storage[:32].view(8, 4), storage[4 * offset :][:32].view(8, 4)
    for weights in ([first, second], [second, first]):
        with pytest.raises(MetadataError) as caught:
            build_layout([weights], ["a", "b"])
        assert "layer 0 'b' cannot be registered: it shares memory with layer 0 'a'" in str(caught.value)


def test_a_tensor_inside_another_is_refused():
    outer = torch.zeros(8, 4)
    middle = outer[2:6]
    with pytest.raises(MetadataError, match=r"layer 1 '0' .* shares memory with layer 0 '0'"):
        build_layout([[outer.view(4, 8)], [middle]])


def test_tensors_that_touch_but_do_not_overlap_are_accepted():
    storage = torch.zeros(64)
    assert build_layout([[storage[:32].view(8, 4)], [storage[32:].view(8, 4)]]).num_layers == 2


# --- aliases ----------------------------------------------------------------------------------------------------------


def test_the_same_memory_under_two_keys_of_a_layer_moves_once():
    weight, other = torch.zeros(4, 6), torch.zeros(4, 2)
    layout = build_layout([[other, weight, weight.view(torch.int32), weight.view(4, 2, 3)]])
    (geometry,) = layout.geometries
    assert [tensor.alias for tensor in layout.record().tensors[0]] == [-1, -1, 1, 1]
    assert geometry.moving.tolist() == [0, 1]
    assert geometry.offsets.tolist() == [0, 64, 64, 64]
    assert geometry.nbytes.tolist() == [8, 24, 24, 24]
    assert geometry.nbytes_rows == 4 * (24 + 8)
    assert len(layout.keys) == len(layout.rows[0]) == 4


def test_aliases_are_independent_of_where_the_allocator_put_the_tensors():
    storage = torch.zeros(16)
    low, high = storage[:8].view(4, 2), storage[8:].view(4, 2)
    for first, second in ((low, high), (high, low)):
        (records,) = build_layout([[first, second, first, second]]).record().tensors
        assert [record.alias for record in records] == [-1, -1, 0, 1]


# --- geometry ---------------------------------------------------------------------------------------------------------


def test_grids_start_aligned_and_hold_every_row_that_moves():
    layout = build_layout(
        [[torch.zeros(3, 5, dtype=torch.uint8), torch.zeros(3, 0), torch.zeros(3), torch.zeros(3, 40)]]
    )
    (geometry,) = layout.geometries
    assert geometry.nbytes.tolist() == [5, 0, 4, 160]
    assert geometry.moving.tolist() == [0, 2, 3]
    assert geometry.offsets[[0, 2, 3]].tolist() == [0, 64, 128]
    assert geometry.nbytes_grid == 128 + 512
    assert geometry.nbytes_rows == 3 * 169
    assert geometry.nbytes_packed(1) == 3 * (64 + 64 + 192)
    assert geometry.nbytes_packed(0) == 0
    assert geometry.num_local_physical_experts == 3


def test_a_layer_without_bytes_takes_no_landing_memory():
    (geometry,) = one(torch.zeros(3, 0)).geometries
    assert geometry.moving.tolist() == []
    assert (geometry.nbytes_grid, geometry.nbytes_rows, geometry.nbytes_packed(4)) == (0, 0, 0)


def test_layers_of_equal_geometry_share_one_object():
    layout = build_layout([[torch.zeros(2, 3)], [torch.zeros(2, 4)], [torch.zeros(2, 3)]])
    assert layout.geometries[0] is layout.geometries[2]
    assert layout.geometries[0] is not layout.geometries[1]
    assert layout.record().tensors[0] is layout.record().tensors[2]


def test_arrays_of_a_geometry_cannot_be_written():
    (geometry,) = one(torch.zeros(3, 2)).geometries
    for array in (geometry.nbytes, geometry.moving, geometry.offsets):
        assert array.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_record_is_the_same_for_other_memory_of_the_same_kind():
    def weights():
        return [[torch.zeros(2, 3, 4).transpose(1, 2), torch.zeros(2, dtype=torch.bfloat16)] for _ in range(3)]

    first, second = (build_layout(weights(), ["w", "s"]).record() for _ in range(2))
    assert isinstance(first, LayoutRecord)
    assert first == second
    assert first.num_experts == (2, 2, 2)
    assert [tensor.dtype for tensor in first.tensors[0]] == ["float32", "bfloat16"]


def test_a_permuted_tensor_has_another_record_than_a_plain_one_of_its_shape():
    plain, permuted = torch.zeros(2, 3, 4), torch.zeros(2, 4, 3).transpose(1, 2)
    assert plain.shape == permuted.shape
    assert one(plain).record() != one(permuted).record()


def test_arbitrary_strides_of_axes_of_size_one_do_not_show_in_the_record():
    plain = torch.zeros(2, 1, 4)
    odd = torch.zeros(8).as_strided((2, 1, 4), (4, 77, 1))
    assert one(plain).record() == one(odd).record()


def test_registering_61_layers_of_6_tensors_takes_less_than_20_ms():
    def tensors():
        fp8 = torch.float8_e4m3fn
        return [
            torch.zeros(16, 64, 32, dtype=fp8).transpose(1, 2),
            torch.zeros(16, 4, 2),
            torch.zeros(16, 32, 32, dtype=fp8),
            torch.zeros(16, 2, 2),
            torch.zeros(16),
            torch.zeros(16),
        ]

    weights = [tensors() for _ in range(61)]
    names = [
        "w13_weight",
        "w13_weight_scale_inv",
        "w2_weight",
        "w2_weight_scale_inv",
        "w13_input_scale",
        "w2_input_scale",
    ]
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        build_layout(weights, names)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.020


def test_the_refusal_reaches_another_process_unchanged():
    with pytest.raises(MetadataError) as caught:
        one(torch.ones(1).expand(4))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.fields == {"key": "layer 0 '0'", "problem": caught.value.fields["problem"]}


# --- landing memory of the host ---------------------------------------------------------------------------------------


def layout_of(num_layers=3, num_tensors=2):
    return build_layout(
        [[torch.zeros(4, 3, 2), torch.zeros(4)][:num_tensors] for _ in range(num_layers)], ["w", "scale"][:num_tensors]
    )


def landing_of(num_slots=2):
    return [[torch.zeros(4, 3, 2), torch.zeros(4)] for _ in range(num_slots)]


def landing_refusal(landing, layout=None, **limits):
    with pytest.raises(ConfigError) as caught:
        check_landing(landing, layout or layout_of(), **limits)
    assert caught.value.code == "EPLB-C010"
    return str(caught.value)


def test_landing_of_the_host_is_seen_as_rows_of_its_own_memory():
    landing = landing_of()
    views = check_landing(landing, layout_of(), most_slots=2)
    assert [[view.shape for view in slot] for slot in views] == [[(4, 24), (4, 4)]] * 2
    assert [[view.data_ptr() for view in slot] for slot in views] == [[t.data_ptr() for t in slot] for slot in landing]


def test_landing_may_have_any_dtype_and_shape_of_the_same_bytes():
    landing = [[torch.zeros(4, 24, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.bfloat16)]]
    assert check_landing(landing, layout_of())[0][0].shape == (4, 24)


@pytest.mark.parametrize(
    ("landing", "problem"),
    [
        ([], "landing does not fit: it is empty"),
        (torch.zeros(2, 2), "landing does not fit: it is a Tensor"),
        ([[torch.zeros(4, 6)]], "landing slot 0 does not fit: it holds 1 tensors where layer 0 has 2"),
        ([*landing_of(1), []], "landing slot 1 does not fit: it is empty"),
        ([[torch.zeros(4, 6), torch.ones(1).expand(4)]], "landing slot 0 tensor 1 does not fit: its experts overlap"),
        ([[torch.zeros(4, 6), None]], "landing slot 0 tensor 1 does not fit: it is a NoneType"),
        ([[torch.zeros(4, 5), torch.zeros(4)]], "it has 4 rows of 20 bytes, layer 0 'w' 4 of 24"),
        ([[torch.zeros(3, 6), torch.zeros(4)]], "it has 3 rows of 24 bytes, layer 0 'w' 4 of 24"),
    ],
)
def test_landing_that_does_not_fit_is_refused_naming_slot_and_tensor(landing, problem):
    assert problem in landing_refusal(landing)


def test_landing_must_fit_every_layer():
    layout = build_layout([[torch.zeros(4, 2)], [torch.zeros(4, 2)], [torch.zeros(4, 3)]])
    assert "4 rows of 8 bytes, layer 2 '0' 4 of 12" in landing_refusal([[torch.zeros(4, 2)]], layout)
    layout = build_layout([[torch.zeros(4, 2)], [torch.zeros(4, 2), torch.zeros(4)]])
    assert "it holds 1 tensors where layer 1 has 2" in landing_refusal([[torch.zeros(4, 2)]], layout)


def test_landing_has_at_most_as_many_slots_as_layers_are_staged():
    assert "it has 2 slots where staging_layers is 1" in landing_refusal(landing_of(2), most_slots=1)
    assert len(check_landing(landing_of(1), layout_of(), most_slots=2)) == 1


def test_landing_that_is_a_live_weight_is_refused():
    weight = torch.zeros(4, 3, 2)
    layout = build_layout([[torch.zeros(4, 3, 2)], [weight]], ["w"])
    assert "landing slot 0 tensor 0 does not fit: it shares memory with layer 1 'w'" in landing_refusal(
        [[weight]], layout
    )


def test_landing_slots_that_share_memory_are_refused():
    (slot,) = landing_of(1)
    assert "landing slot 1 tensor 0 does not fit: it shares memory with landing slot 0 tensor 0" in landing_refusal(
        [slot, slot]
    )


def test_landing_of_a_tensor_that_never_moves_may_be_shared():
    weight = torch.zeros(4, 2)
    layout = build_layout([[weight, weight]])
    buffer = torch.zeros(4, 2)
    assert len(check_landing([[buffer, buffer]], layout)[0]) == 2
    apart = build_layout([[torch.zeros(4, 2), torch.zeros(4, 2)]])
    assert "shares memory" in landing_refusal([[buffer, buffer]], apart)


# --- on a device ------------------------------------------------------------------------------------------------------


def test_rows_of_device_tensors_are_views_of_device_memory(device):
    weight = torch.zeros(4, 3, 5, device=device).transpose(1, 2)
    layout = build_layout([[weight, torch.zeros(4, dtype=torch.bfloat16, device=device)]])
    assert layout.device == layout.rows[0][0].device == device
    layout.rows[0][0][2].fill_(255)
    assert weight.cpu().isnan().sum(dim=(1, 2)).tolist() == [0, 0, 15, 0]


def test_tensors_on_different_devices_are_refused_naming_both(device):
    with pytest.raises(MetadataError, match=r"layer 1 '0' .* it is on eplbdev:1, layer 0 '0' on eplbdev:0"):
        build_layout([[torch.zeros(2, device=device)], [torch.zeros(2, device=f"{device.type}:1")]])
    with pytest.raises(MetadataError, match=r"layer 0 '1' .* it is on cpu, layer 0 '0' on eplbdev:0"):
        build_layout([[torch.zeros(2, device=device), torch.zeros(2)]])


def test_landing_may_lie_with_the_weights_or_on_the_host_but_all_of_it_in_one_place(device):
    layout = build_layout([[torch.zeros(2, 4, device=device), torch.zeros(2, device=device)]])
    here = [torch.zeros(2, 4, device=device), torch.zeros(2, device=device)]
    host = [torch.zeros(2, 4), torch.zeros(2)]
    assert check_landing([here], layout)[0][0].device == device
    assert check_landing([host], layout)[0][0].device == torch.device("cpu")
    with pytest.raises(
        Exception, match="landing slot 1 tensor 0 does not fit: it is on cpu, landing slot 0 tensor 0 on"
    ):
        check_landing([here, host], layout)
    with pytest.raises(ConfigError, match="it is on eplbdev:1, the weights are on eplbdev:0"):
        check_landing([[torch.zeros(2, 4, device=f"{device.type}:1"), here[1]]], layout)
