"""Least bytes of the calls that memory bounds, counted by hand."""

from __future__ import annotations

import pytest

from steplab.costs.op_call import read_call
from steplab.trace.roofline import cost_of_call
from tests.costs.calls import BF16, FP32, INT, called, cost


def test_an_expanded_dimension_is_in_memory_once():
    shapes, types = [[4, 8], [4, 8]], [FP32, FP32]
    assert cost("aten::add", shapes, types, strides=[[8, 1], [0, 1]]) == (0, 4 * (32 + 8 + 32))


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "values", "moved"),
    [
        ("aten::add", [[4, 8], [4, 8]], [BF16, BF16], [], 2 * 96),
        ("aten::add", [[4, 1], [8], []], [BF16, FP32, "Scalar"], [], 2 * 4 + 4 * 8 + 4 * 32),
        ("aten::add_", [[4, 8], [4, 8]], [FP32, FP32], [], 4 * 96),
        ("aten::mul", [[4, 8], []], [BF16, FP32], [], 2 * 64 + 4),  # a 0-d factor widens nothing
        ("aten::mul", [[4, 8], [4, 8], [4, 8]], [BF16] * 3, [], 2 * 96),  # out=
        ("aten::lt", [[4, 8], []], [FP32, "Scalar"], [], 4 * 32 + 32),
        ("aten::where", [[4, 8], [4, 8], []], ["bool", BF16, FP32], [], 32 + 64 + 4 + 64),
        ("aten::gelu_backward", [[4, 8], [4, 8]], [BF16] * 2, [], 2 * 96),
        ("aten::copy_", [[4, 8], [4, 8]], [BF16, FP32], [], 32 * 6),
        ("aten::zero_", [[4, 8]], [FP32], [], 128),
        ("aten::sum", [[4, 8], []], [FP32, "ScalarList"], ["", "[0]"], 128),
        ("aten::_softmax", [[4, 8], [], []], [BF16, "Scalar", "Scalar"], [], 128),
        ("aten::_log_softmax_backward_data", [[4, 8], [4, 8], [], []],
         [FP32, FP32, "Scalar", "Scalar"], ["", "", "1", "15"], 32 * (4 + 4 + 2)),
        ("aten::native_layer_norm", [[4, 8], [], [8], [8]], [BF16, "ScalarList", FP32, FP32], [],
         2 * 64 + 64),
        ("aten::_fused_rms_norm", [[4, 8], [], [8]], [BF16, "ScalarList", BF16], [], 2 * 64 + 16),
        ("aten::native_dropout", [[4, 8]], [BF16], [], 2 * 64 + 32),
        ("aten::embedding", [[50, 8], [4, 2]], [FP32, INT], [], 8 * 8 + 2 * 8 * 8 * 4),
        ("aten::index_select", [[50, 8], [], [6]], [FP32, "Scalar", INT], ["", "0", ""],
         6 * 8 + 2 * 6 * 8 * 4),
        ("aten::gather", [[4, 8], [], [4, 2]], [FP32, "Scalar", INT], [], 8 * 8 + 2 * 8 * 4),
        ("aten::nll_loss_forward", [[6, 10], [6]], [FP32, INT], [], 6 * 8 + 6 * 4),
    ],
)  # fmt: skip
def test_traffic(name, shapes, dtypes, values, moved):
    assert cost(name, shapes, dtypes, values) == (0, moved)


LISTS = [[[8, 4], [16]]] * 4  # 48 elements each
MULTI = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, Functor<{}, 4>, double>"


@pytest.mark.parametrize(
    ("name", "lists", "moves"),
    [
        ("aten::_fused_adamw_", 4, 7),  # p, g, m, v read; p, m, v written
        ("aten::_fused_sgd_", 3, 5),
        ("aten::_foreach_add_", 2, 3),
        ("aten::_foreach_sqrt", 1, 2),
        ("aten::_foreach_norm", 1, 1),
        ("aten::_foreach_zero_", 1, 1),
        ("aten::_foreach_copy_", 2, 2),
        ("aten::cat", 1, 2),
    ],
)
@pytest.mark.parametrize(("dtype", "item"), [("float", 4), ("c10::BFloat16", 2)])
def test_lists_of_tensors(name, lists, moves, dtype, item):
    shapes = [*LISTS[:lists], *[[]] * (6 - lists)]
    types = ["TensorList"] * lists + ["Scalar"] * (6 - lists)
    assert cost(name, shapes, types, kernel_name=MULTI.format(dtype)) == (0, moves * 48 * item)


def test_lists_without_a_telling_kernel_have_no_model():
    assert (
        cost_of_call(called("aten::cat", [LISTS[0], []], ["TensorList", "Scalar"]), "cat") is None
    )


def test_inductor_kernels_read_each_argument_once():
    types = [BF16, BF16, BF16, "Scalar", "Scalar"]
    shapes, values = [[8, 64, 32], [32], [8, 64, 32], [], []], ["", "", "", "512", "32"]
    found = cost("triton_red_fused_add_mean_0", shapes, types, values)
    assert found == (0, 2 * (2 * 8 * 64 * 32 + 32))


def test_inductor_kernels_that_look_up_read_no_whole_table():
    shapes, values = [[64], [5000, 32], [64, 32], []], ["", "", "", "2048"]
    found = cost("triton_poi_fused_embedding_0", shapes, [INT, FP32, FP32, "Scalar"], values)
    assert found == (0, 64 * 8 + 2 * 2048 * 4)


def test_inductor_products():
    shapes = [[8, 16], [16, 32], [8, 32]]
    assert cost("triton_tem_fused_mm_3", shapes, [BF16] * 3) == (
        2 * 8 * 32 * 16,
        2 * (128 + 512 + 256),
    )
    assert cost_of_call(called("triton_tem_fused_addmm_relu_3", shapes, [BF16] * 3), "") is None


def test_unknown_calls_have_no_model():
    assert cost_of_call(called("aten::_unheard_of", [[8]], [FP32]), "") is None
    assert read_call("aten::mm", "", "", "", "") is None
