"""FLOPs and least bytes of ATen calls and Inductor kernels, against formulas written out."""

from __future__ import annotations

import pytest

from steplab.costs.op_call import read_call
from steplab.trace.roofline import cost_of_call
from tests.costs.calls import BF16, FP32, INT, called, cost

MM = 2 * 8 * 32 * 16


@pytest.mark.parametrize(
    ("name", "shapes", "flops", "elements"),
    [
        ("aten::mm", [[8, 16], [16, 32]], MM, 8 * 16 + 16 * 32 + 8 * 32),
        ("aten::mm", [[8, 16], [16, 32], [8, 32]], MM, 8 * 16 + 16 * 32 + 8 * 32),  # out=
        ("aten::bmm", [[3, 8, 16], [3, 16, 32]], 3 * MM, 3 * (8 * 16 + 16 * 32 + 8 * 32)),
        ("aten::matmul", [[5, 3, 8, 16], [16, 32]], 15 * MM, 15 * (128 + 256) + 512),
        ("aten::matmul", [[5, 1, 8, 16], [3, 16, 32]], 15 * MM, 5 * 128 + 3 * 512 + 15 * 256),
        ("aten::mv", [[8, 16], [16]], 2 * 8 * 16, 8 * 16 + 16 + 8),
        ("aten::linear", [[3, 8, 16], [32, 16]], 3 * MM, 3 * 128 + 512 + 3 * 256),
        ("aten::addmm", [[32], [8, 16], [16, 32]], MM, 32 + 128 + 512 + 256),
        (
            "aten::baddbmm_",
            [[3, 8, 32], [3, 8, 16], [3, 16, 32]],
            3 * MM,
            3 * (256 * 2 + 128 + 512),
        ),
        ("aten::_grouped_mm", [[8, 16], [4, 16, 32], [4]], MM, 128 + 4 * 512 + 256),
        ("aten::_grouped_mm", [[4, 8, 16], [4, 16, 32]], 4 * MM, 4 * (128 + 512 + 256)),
        ("aten::_grouped_mm", [[8, 16], [16, 32], [4]], MM, 128 + 512 + 4 * 256),
        ("aten::_grouped_mm", [[4, 8, 16], [16, 32], [4]], MM, 4 * 128 + 512 + 256),
    ],
)
def test_products(name, shapes, flops, elements):
    assert cost(name, shapes, [BF16] * len(shapes)) == (flops, 2 * elements)


def test_a_product_that_adds_nothing_does_not_read_it():
    shapes, types = [[8, 32], [8, 16], [16, 32], [], []], [BF16] * 3 + ["Scalar"] * 2
    full = cost("aten::addmm", shapes, types, ["", "", "", "1", "1"])
    assert full[1] - cost("aten::addmm", shapes, types, ["", "", "", "0", "1"])[1] == 2 * 8 * 32


CONV = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]


def test_convolutions():
    shapes = [[10, 6, 14, 14], [12, 3, 3, 3], [], [], [], [], [], [], []]  # two groups
    types = [BF16, BF16, "", *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"]
    flops = 2 * 10 * 12 * 7 * 7 * 27
    moved = 2 * (10 * 6 * 14 * 14 + 12 * 27 + 10 * 12 * 49)
    assert cost("aten::convolution", shapes, types, CONV) == (flops, moved)
    values = ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "2"]
    found = cost("aten::cudnn_convolution", shapes[:6], [BF16] * 2 + ["ScalarList"] * 4, values)
    assert found == (flops, moved)


@pytest.mark.parametrize(
    ("asked", "times"), [("[False, True, True]", 1), ("[True, True, False]", 2)]
)
def test_convolution_gradients(asked, times):
    shapes = [[10, 12, 7, 7], [10, 6, 14, 14], [12, 3, 3, 3], *[[]] * 8]
    types = [BF16, BF16, BF16, *["ScalarList"] * 8]
    values = ["", "", "", "[12]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2", asked]
    flops, _ = cost("aten::convolution_backward", shapes, types, values)
    assert flops == times * 2 * 10 * 12 * 7 * 7 * 27


B, H, T, D = 2, 4, 16, 8
PAIRS = {"False": T * T, "True": T * (T + 1) // 2}


def attention(name, query, causal, layout, value):
    shape = [B, H, T, D] if layout == "BHTD" else [B, T, H, D]
    shapes = [shape if i < query + 3 else [] for i in range(causal + 1)]
    types = [BF16 if i < query + 3 else "Scalar" for i in range(causal + 1)]
    values = [""] * causal + [value]
    return cost(f"aten::{name}", shapes, types, values)


@pytest.mark.parametrize("causal", ["False", "True"])
@pytest.mark.parametrize(
    ("name", "query", "position", "layout"),
    [
        ("_scaled_dot_product_flash_attention", 0, 4, "BHTD"),
        ("_scaled_dot_product_flash_attention_for_cpu", 0, 4, "BHTD"),
        ("_scaled_dot_product_efficient_attention", 0, 6, "BHTD"),
        ("_scaled_dot_product_cudnn_attention", 0, 6, "BHTD"),
        ("_cudnn_attention_forward", 0, 10, "BHTD"),
        ("_flash_attention_forward", 0, 8, "BTHD"),
        ("_scaled_dot_product_flash_attention_backward", 1, 11, "BHTD"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", 1, 7, "BHTD"),
        ("_scaled_dot_product_efficient_attention_backward", 1, 11, "BHTD"),
        ("_scaled_dot_product_cudnn_attention_backward", 1, 14, "BHTD"),
        ("_flash_attention_backward", 1, 11, "BTHD"),
    ],
)
def test_attention(name, query, position, layout, causal):
    products = 5 if query else 2  # a gradient has four products and computes the scores again
    flops = 2 * products * B * H * PAIRS[causal] * D
    tensors = 8 if query else 4
    found = attention(name, query, position, layout, causal)
    assert found == (flops, tensors * 2 * B * H * T * D)


@pytest.mark.parametrize(("mask", "causal"), [("0", "False"), ("1", "True"), ("2", "True")])
def test_attention_by_mask_type(mask, causal):
    flops, _ = attention("_efficient_attention_forward", 0, 9, "BTHD", mask)
    assert flops == 4 * B * H * PAIRS[causal] * D
    flops, _ = attention("_efficient_attention_backward", 1, 14, "BTHD", mask)
    assert flops == 10 * B * H * PAIRS[causal] * D


def test_attention_positions_are_those_of_the_schemas():
    torch = pytest.importorskip("torch")
    from steplab.costs.aten import MATRIX_COSTS

    for name in [name for name in MATRIX_COSTS if "attention" in name]:
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        if packet is None:
            continue  # this version of torch does not have it
        arguments = [argument.name for argument in packet.default._schema.arguments]
        model = MATRIX_COSTS[name]
        query, causal = (
            model.__closure__[i].cell_contents for i in _free(model, "query", "causal")
        )
        assert arguments[query] == "query", name
        assert arguments[causal] in ("is_causal", "custom_mask_type"), name


def test_attention_counts_as_torch_does_where_every_pair_is_visible():
    counter = pytest.importorskip("torch.utils.flop_counter")
    shape = (B, H, T, D)
    forward, _ = attention("_scaled_dot_product_flash_attention", 0, 4, "BHTD", "False")
    assert forward == counter.sdpa_flop_count(shape, shape, shape)
    backward, _ = attention("_scaled_dot_product_flash_attention_backward", 1, 11, "BHTD", "False")
    assert backward == counter.sdpa_backward_flop_count(shape, shape, shape, shape)


def _free(function, *names):
    return [function.__code__.co_freevars.index(name) for name in names]


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
