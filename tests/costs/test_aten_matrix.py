"""FLOPs and bytes of products, convolutions and attention against formulas written out."""

from __future__ import annotations

import pytest

from tests.costs.calls import BF16, cost

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
