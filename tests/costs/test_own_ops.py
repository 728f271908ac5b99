"""Work of steplab's own kernels: positions by the ops' schemas, bytes counted by hand."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from steplab.costs.own_ops import OWN_OPS, find_own_op
from steplab.trace.roofline import cost_of_call, estimate_costs, trace_card
from tests.costs.calls import BF16, FP32, INT, called
from tests.trace.traces import kernel, op, trace_of

T, K, E, D, F = 32, 2, 4, 16, 24
R = T * K
INT32 = "int"
ROUTED = [[T, D], [T, K], [E, 2 * F, D], [E, D, F], [T, K], [R], [E]]
ROUTED_TYPES = [BF16, FP32, BF16, BF16, INT32, INT32, INT32]
WANTED = ["True", "True", "True"]
FORWARD = (
    "fused_experts",
    {"shapes": [*ROUTED, [], []], "dtypes": [*ROUTED_TYPES, "", ""], "values": [""] * 9},
)
BACKWARD = (
    "fused_experts_backward",
    {
        "shapes": [[T, D], *ROUTED, [R, 2 * F], [], [], [], [], []],
        "dtypes": [BF16, *ROUTED_TYPES, BF16, "", "", *["Scalar"] * 3],
        "values": [*[""] * 11, *WANTED],
    },
)
WEIGHTS = 4 * R + 4 * R  # of the rows, and whose they are


@pytest.fixture(scope="module")
def registered() -> dict[str, list[str]]:
    """The arguments of every op that is registered once all kernels are imported."""
    import steplab.kernels

    for module in pkgutil.walk_packages(steplab.kernels.__path__, "steplab.kernels."):
        importlib.import_module(module.name)
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    ours = sorted(name.partition("::")[2] for name in names if name.startswith("steplab::"))
    schemas = {name: getattr(torch.ops.steplab, name).default._schema for name in ours}
    return {name: [arg.name for arg in schema.arguments] for name, schema in schemas.items()}


def test_arguments_stand_where_the_costs_look(registered):
    listed = {name: op.args.split() for name, op in OWN_OPS.items() if name in registered}
    assert len(listed) > 25
    assert listed == {name: registered[name][: len(args)] for name, args in listed.items()}


def test_every_op_has_costs_or_is_known_to_have_none(registered):
    unknown = {name for name in registered if find_own_op(name) is None}
    assert unknown == {"tiled_attention", "tiled_attention_backward"}


def test_kernels_with_costs_of_their_own_exist():
    import steplab.kernels

    sources = Path(steplab.kernels.__path__[0]).rglob("*.py")
    defined = set(
        re.findall(r"^def (\w+)\(", "\n".join(map(Path.read_text, sources)), re.MULTILINE)
    )
    several = [op.kernels for op in OWN_OPS.values() if isinstance(op.kernels, dict)]
    assert several and {name for kernels in several for name in kernels} <= defined


def test_a_new_implementation_has_the_costs_of_its_op():
    assert find_own_op("rms_norm_split") is OWN_OPS["rms_norm"]
    assert find_own_op("rms_norm_split_backward") is OWN_OPS["rms_norm_backward"]
    assert find_own_op("attention_hopper_backward") is OWN_OPS["triton_flash_attention_backward"]
    assert find_own_op("grouped_mm_aten") is OWN_OPS["grouped_mm"]
    assert find_own_op("grouped_mm_aten_weight_gradient") is OWN_OPS["grouped_mm_weight_gradient"]
    loss = "triton_chunked_cross_entropy_tokens_backward"
    assert find_own_op("cross_entropy_split_tokens_backward") is OWN_OPS[loss]
    assert find_own_op("rms_normal") is None and find_own_op("") is None


def bytes_of(name, args, kernel_name="", prefix="steplab::", suffix=""):
    call = called(f"{prefix}{name}{suffix}", args["shapes"], args["dtypes"], args["values"])
    return cost_of_call(call, kernel_name).bytes


@pytest.mark.parametrize(
    ("op_args", "kernel_name", "moved"),
    [
        (FORWARD, "gather_rows_kernel", 2 * T * D + 4 * R + 2 * R * D),
        (FORWARD, "activation_forward_kernel", 2 * R * (2 * F + F) + WEIGHTS),
        (FORWARD, "gather_sum_kernel", 2 * R * D + 4 * R + 2 * T * D),
        (BACKWARD, "gather_rows_kernel", 2 * (2 * T * D + 4 * R + 2 * R * D)),
        (BACKWARD, "activation_backward_kernel", 2 * 2 * R * (2 * F + F) + WEIGHTS + 4 * R),
        (BACKWARD, "gather_sum_kernel", 2 * R * D + 4 * R + 2 * T * D),
        (BACKWARD, "add_segments_kernel", 2 * 2 * (E * 2 * F * D + E * D * F)),
    ],
)
def test_kernels_around_the_experts(op_args, kernel_name, moved):
    assert bytes_of(*op_args, kernel_name) == moved


def test_gradients_that_nobody_needs_are_not_computed():
    name, args = BACKWARD
    fixed = {**args, "values": [*[""] * 11, "True", "False", "True"]}
    assert bytes_of(name, fixed, "gather_rows_kernel") == 2 * T * D + 4 * R + 2 * R * D
    assert bytes_of(name, fixed, "add_segments_kernel") == 2 * 2 * E * D * F


def case(shapes, dtypes, values=()):
    return {"shapes": shapes, "dtypes": dtypes, "values": list(values)}


HEADS = [2, 8, 4, 16]  # B, T, H, D
QKV = case([[2, 8, 3, 4, 16], [8, 16], [8, 16]], [BF16, FP32, FP32])
LOGITS = 2 * T * 100
SINGLE = {
    "rms_norm": (
        case([[T, D], [D], [], []], [FP32, FP32, "Scalar", "Scalar"], ["", "", "1e-6", "15"]),
        4 * T * D + 4 * D + 2 * T * D + 4 * T,
    ),
    "add_rms_norm": (
        case([[T, D], [T, D], [D], [], []], [FP32, BF16, FP32, "Scalar", ""]),
        (4 + 2) * T * D + 4 * D + (4 + 4) * T * D + 4 * T,
    ),
    "rms_norm_backward": (
        case([[T, D], [], [T, D], [D], [T]], [BF16, "", FP32, FP32, FP32]),
        2 * T * D + 4 * T * D + 4 * D + 4 * T + 4 * T * D + 4 * D,
    ),
    "stream_norm": (
        case(
            [[2, T, D], [2, K, D], [2, T], [D], [D], [D], [], []],
            [BF16, BF16, INT, BF16, BF16, BF16, "Scalar", ""],
        ),
        2 * 2 * (T + K) * D + 8 * 2 * T + 2 * 3 * D + 2 * 2 * T * D + 2 * 4 * 2 * T,
    ),
    "stream_norm_rows": (
        case(
            [[2, T, D], [2, T], [2, K], [D], [D], []],
            [BF16, FP32, INT, BF16, BF16, "Scalar"],
            ["", "", "", "", "", "15"],
        ),
        2 * K * (2 * 2 * D + 4) + 8 * 2 * K + 2 * 2 * D,
    ),
    "stream_norm_backward": (
        case(
            [[2, K, D], [2, T], [2, T], [2, T, D], [2, T, D], [2, T], [D], [D], [D]],
            [BF16, INT, FP32, BF16, BF16, FP32, BF16, BF16, BF16],
        ),
        2 * 2 * K * D + (8 + 4 + 4) * 2 * T + 3 * 2 * 2 * T * D + 2 * 3 * D + 4 * 3 * D,
    ),
    "rotary": (QKV, 2 * 2 * 2 * np.prod(HEADS) + 2 * 4 * 8 * 16),
    "rotary_backward": (
        case([HEADS, HEADS, HEADS, [8, 16], [8, 16]], [BF16, BF16, BF16, FP32, FP32]),
        2 * 3 * 2 * np.prod(HEADS) + 2 * 4 * 8 * 16,
    ),
    "router": (
        case([[T, D], [E, D], [1, D], []], [BF16, FP32, FP32, "Scalar"], ["", "", "", str(K)]),
        2 * T * D + 4 * (E + 1) * D + 4 * T * (E + K + 1) + 8 * T * K,
    ),
    "triton_chunked_cross_entropy_mean": (
        case([[T, D], [100, D], [T], [], [], []], [BF16, BF16, INT, *["Scalar"] * 3]),
        2 * LOGITS + 8 * T,
    ),
    "triton_chunked_cross_entropy_tokens": (
        case([[T, D], [100, D], [T]], [BF16, BF16, INT]),
        LOGITS + 8 * T,
    ),
    "triton_chunked_cross_entropy_tokens_backward": (
        case([[T], [T, D], [100, D], [T]], [FP32, BF16, BF16, INT]),
        2 * LOGITS + 8 * T,
    ),
    "ema_scan": (case([[2, 64, D]], [FP32]), 2 * 4 * 2 * 64 * D),
    "ema_scan_backward": (
        case([[2, 64, D], [], [2, 64, D]], [FP32, "", FP32]),
        3 * 4 * 2 * 64 * D,
    ),
}


@pytest.mark.parametrize("name", SINGLE)
def test_ops_of_one_kernel(name):
    args, moved = SINGLE[name]
    assert bytes_of(name, args) == moved


def test_other_kernels_of_few_bytes():
    experts = case([[T, K], []], [INT, "Scalar"], ["", str(E)])
    assert bytes_of("place_assignments", experts, "routing_count_kernel") == 8 * R
    assert bytes_of("place_assignments", experts, "routing_place_kernel") == 8 * R + 2 * 4 * R
    scores = case([[T, K], []], [FP32, "Scalar"], ["", "2"])
    assert bytes_of("top_rows_triton_rank", scores, "rank_rows_kernel") == (
        4 * T * K + 8 * T * K + 8 * T * 2 + 4 * T
    )
    table = case([[E, D], [T], []], [BF16, INT, "Scalar"], ["", "", "2.0"])
    assert bytes_of("embedding_triton_sorted", table) == 8 * T + 2 * T * 2 * D
    rows = case([[T, D], [T], [], []], [BF16, INT, "Scalar", "Scalar"], ["", "", "2.0", str(E)])
    found = bytes_of("embedding_triton_sorted_backward", rows, "row_sums_kernel")
    assert found == 8 * T + 2 * 4 * E + 2 * (T + E) * D
    weights = case([[R, D], [R, F], [E]], [BF16, BF16, INT32])
    name = "grouped_mm_aten_weight_gradient"
    assert bytes_of(name, weights, "add_segments_kernel") == 2 * 2 * E * D * F
    shared = case([[T, D], [2 * F, D], [D, F], [T, 1], [], []], [BF16, BF16, BF16, FP32, "", ""])
    found = bytes_of("fused_feed_forward", shared, "activation_forward_kernel")
    assert found == 2 * T * (2 * F + F) + 4 * T


@pytest.mark.parametrize("z", [F, 2 * F], ids=["gelu", "swiglu"])
def test_a_product_with_the_activation_inside_stores_no_dh(z):
    network = [[T, D], [z, D], [D, F], [T, 1]]
    dtypes = [BF16, BF16, BF16, FP32]
    forward = called("steplab::fused_feed_forward", [*network, [], []], [*dtypes, "", ""])
    backward, kept = (
        called(
            "steplab::fused_feed_forward_backward",
            [[T, D], *network, [T, z], h, *[[]] * 4], [BF16, *dtypes, BF16, dtype, *[""] * 4],
        )
        for h, dtype in (([], ""), ([T, F], BF16))
    )  # fmt: skip
    # z and h are written; z is read, dz and h are written; where h was kept, only dz
    cases = ((forward, z, z + F), (backward, F, 2 * z + F), (kept, F, 2 * z))
    for call, columns, wide in cases:
        cost = cost_of_call(call, "matmul_activation_kernel")
        assert cost.flops == 2 * T * D * columns
        assert cost.bytes == 2 * (D * columns + T * D + T * wide)


def test_attention_counts_the_pairs_that_are_seen():
    heads = [2, 4, 8, 16]
    dtypes = [BF16, BF16, BF16, "Scalar", "", ""]
    plain = called("steplab::triton_flash_attention", [heads] * 3 + [[]] * 3, dtypes,
                   ["", "", "", "True", "", ""])  # fmt: skip
    assert cost_of_call(plain, "attention_forward_kernel").flops == 2 * 4 * 4 * (8 * 9 / 2) * 16
    ragged = called("steplab::triton_flash_attention", [heads] * 3 + [[], [2, 8], [2, 8]],
                    [*dtypes[:4], INT, INT], ["", "", "", "True", "", ""])  # fmt: skip
    assert cost_of_call(ragged, "attention_forward_kernel") is None


def test_packed_attention_has_the_costs_of_its_views():
    place = "[2, 4, 8, 16, 1536, 16, 192, 1, 0]"
    places, packed = [place] * 3, [2, 8, 3, 4, 16]
    forward = called("steplab::packed_attention", [packed, *[[]] * 4], [BF16, *[""] * 3, "Scalar"],
                     ["", *places, "True"])  # fmt: skip
    cost = cost_of_call(forward, "attention_forward_kernel")
    assert cost.flops == 2 * 4 * 4 * (8 * 9 / 2) * 16 and cost.bytes == 4 * 2 * 2 * 8 * 4 * 16
    heads = [2, 4, 8, 16]
    backward = called("steplab::packed_attention_backward",
                      [heads, packed, [], [], [], heads, heads[:3], []],
                      [BF16, BF16, "", "", "", BF16, FP32, "Scalar"],
                      ["", "", *places, "", "", "True"])  # fmt: skip
    assert cost_of_call(backward, "attention_dq_kernel").flops == 2.5 * cost.flops
    assert find_own_op("packed_attention").call_flops(forward) == cost.flops


def test_each_kernel_of_an_op_has_its_own_ideal():
    """The autograd frame is innermost; two launches of one kernel share what they move."""
    name, args = BACKWARD
    events = [
        op(f"steplab::{name}", 0, 100, **args),
        op("aten::_grouped_mm", 10, 10, shapes=[[R, D], [E, D, F]], dtypes=[BF16, BF16]),
        *(kernel("gather_rows_kernel", 1000 * i, 300) for i in (1, 2)),
        kernel("gather_sum_kernel", 3000, 300),
        kernel("nobody_knows_kernel", 4000, 300),
        kernel("nvjet_tst_128x256_TNN", 5000, 300),
    ]
    properties = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
    trace = trace_of(events, properties=properties)
    found = estimate_costs(trace, np.array([0, 0, 0, 0, 1]), trace_card(trace))
    gathered = bytes_of(name, args, "gather_rows_kernel")
    assert found.bytes[:3] == pytest.approx(
        [gathered / 2, gathered / 2, bytes_of(name, args, "gather_sum_kernel")]
    )
    assert np.isnan(found.bytes[3]) and found.flops[4] == 2 * R * D * F


def test_the_frame_that_autograd_puts_around_a_forward_has_the_same_cost():
    frame = {"prefix": "GeneratedBackwardFor_steplab_", "suffix": "_default"}
    name, args = FORWARD
    for kernel_name in ("gather_rows_kernel", "gather_sum_kernel"):
        assert bytes_of(name, args, kernel_name, **frame) == bytes_of(name, args, kernel_name)
