"""Costs on a timeline: ideal times, FLOPs against torch's counter, passes over all weights."""

from __future__ import annotations

import numpy as np
import pytest

from steplab.trace.analyze import analyze
from steplab.trace.roofline import MATMUL_DTYPES, estimate_costs, trace_card, trace_device_name
from tests.costs.calls import BF16, FP32
from tests.trace.traces import call, fill, kernel, op, range_, trace_of

GEMM = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn"
BIG = {"shapes": [[4096, 4096], [4096, 4096]], "dtypes": [BF16, BF16]}
BIG_FLOPS = 2 * 4096**3


def on_device(*events, op_row):
    properties = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
    trace = trace_of(events, properties=properties)
    return estimate_costs(trace, np.array(op_row), trace_card(trace))


def test_the_ideal_is_the_longer_of_compute_and_memory():
    wide = {"shapes": [[8, 4096], [4096, 4096]], "dtypes": [BF16, BF16]}
    found = on_device(
        op("aten::mm", 0, 10, **BIG),
        op("aten::mm", 10, 10, **wide),
        kernel(GEMM, 100, 1_000_000),
        kernel(GEMM, 2_000_000, 1_000_000),
        op_row=[0, 1],
    )
    assert found.flops.tolist() == [BIG_FLOPS, 2 * 8 * 4096**2]
    moved = 2 * (8 * 4096 * 2 + 4096**2)
    assert found.ideal == pytest.approx([BIG_FLOPS / 989.4e3, moved / 4800])
    assert [MATMUL_DTYPES[code] for code in found.matmul_dtype] == ["bf16", "bf16"]


def test_the_cost_of_a_call_is_spread_over_its_kernels():
    found = on_device(
        op("aten::mm", 0, 10, **BIG),
        fill(50, 900_000),
        kernel(GEMM, 1_000_000, 300_000),
        kernel("splitKreduce_kernel", 2_000_000, 100_000),
        op_row=[0, 0, 0],
    )
    assert np.isnan(found.flops[0])  # a fill is no part of the product
    assert found.flops[1:] == pytest.approx([0.75 * BIG_FLOPS, 0.25 * BIG_FLOPS])
    assert found.ideal[1:].sum() == pytest.approx(BIG_FLOPS / 989.4e3)


def test_fp32_that_may_be_tf32_has_an_ideal_only_where_memory_bounds_both():
    big = {"shapes": BIG["shapes"], "dtypes": [FP32, FP32]}
    thin = {"shapes": [[1, 4096], [4096, 4096]], "dtypes": [FP32, FP32]}
    events = [op("aten::mm", 0, 10, **big), op("aten::mm", 10, 10, **thin),
              kernel("some_gemm_kernel", 100, 9_000_000),
              kernel("some_gemm_kernel", 10_000_000, 9_000_000)]  # fmt: skip
    found = on_device(*events, op_row=[0, 1])
    assert np.isnan(found.ideal[0]) and not found.matmul_dtype.any()
    assert found.ideal[1] == pytest.approx(4 * (2 * 4096 + 4096**2) / 4800)
    named = on_device(events[0], kernel("ampere_sgemm_128x64_nn", 100, 9_000_000), op_row=[0])
    assert named.ideal[0] == pytest.approx(BIG_FLOPS / 66.9e3)
    assert MATMUL_DTYPES[named.matmul_dtype[0]] == "fp32"


def test_a_product_above_the_peak_is_a_wrong_model():
    found = on_device(op("aten::mm", 0, 10, **BIG), kernel(GEMM, 100, 100_000), op_row=[0])
    assert np.isnan(found.ideal[0]) and found.flops[0] == BIG_FLOPS


def test_what_comes_from_the_cache_has_lost_nothing():
    add = {"shapes": [[1024, 1024], []], "dtypes": [FP32, "Scalar"]}
    found = on_device(op("aten::add", 0, 10, **add), kernel("add", 100, 500), op_row=[0])
    assert found.ideal[0] == 500 and found.bytes[0] == 8 * 1024**2


def test_an_unknown_card_has_no_ideal():
    events = [op("aten::mm", 0, 10, **BIG), kernel(GEMM, 100, 300_000)]
    for name in ("", "NVIDIA Q1"):
        trace = trace_of(events, properties={"deviceProperties": [{"id": 0, "name": name}]})
        found = estimate_costs(trace, np.array([0]), trace_card(trace))
        assert np.isnan(found.ideal[0]) and found.flops[0] == BIG_FLOPS


def test_the_name_of_the_device():
    cards = [{"id": 0, "name": "NVIDIA A10"}, {"id": 1, "name": "NVIDIA H200"}]
    trace = trace_of([kernel("k", 0, 1, device=1)], properties={"deviceProperties": cards})
    assert trace_device_name(trace) == "NVIDIA H200"
    masked = trace_of([kernel("k", 0, 1, device=5)], properties={"deviceProperties": cards[1:]})
    assert trace_device_name(masked) == "NVIDIA H200"
    assert trace_card(masked, "NVIDIA A10").name == "A10"
    assert trace_device_name(trace_of([call("cudaMalloc", 0, 1)])) == ""


def test_no_operator_at_all():
    assert np.isnan(on_device(kernel("k", 0, 10), op_row=[-1]).flops).all()


def test_flops_of_a_real_trace_are_those_of_the_flop_counter(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    from steplab.trace.load import load_trace

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3, stride=2, padding=1),
        torch.nn.Flatten(2),
        torch.nn.Linear(16, 32),
        torch.nn.LayerNorm(32),
        torch.nn.Linear(32, 24, bias=False),
    )
    x = torch.randn(6, 4, 8, 8, requires_grad=True)

    def step():
        h = model(x)
        scores = torch.softmax(h @ h.transpose(1, 2), -1)
        torch.baddbmm(h, scores, h).square().mean().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step()
    path = tmp_path / "trace.json"
    seen.export_chrome_trace(str(path))
    trace = load_trace(path)
    found = estimate_costs(trace, np.arange(len(trace.ops)), None)
    assert np.nansum(found.flops) == counter.get_total_flops() > 0
    assert np.isnan(found.ideal).all()
    products = [trace.text(n) for n in trace.ops.name[found.matmul_dtype > 0]]
    assert {"aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm"} <= set(products)
    assert not {"aten::linear", "aten::matmul"} & set(products)


H200 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
WEIGHTS = 1_000_000
APPLY = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, "
ADAM = APPLY + "at::native::FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>, double>"
NORM, NORM16 = (APPLY + f"LpNormFunctor<{t}, (NormType)1, float>>" for t in ("float", "c10::Half"))


def analyzed(phase: str, kernels: list[tuple[str, int]], weights: int | None = WEIGHTS):
    events = [range_("ProfilerStep#1", 0, 1_000_000), range_(phase, 0, 900_000)]
    for i, (name, ns) in enumerate(kernels, 1):
        at = 20_000 * i
        empty = {"shapes": [[], []], "dtypes": ["TensorList", "TensorList"]}
        events += [op("aten::_fused_adamw_", at, 5_000, **empty)]
        events += [call("cudaLaunchKernel", at, 1_000, i), kernel(name, at + 2_000, ns, i)]
    return analyze(trace_of(events, properties=H200), weights=weights).work


def test_a_fused_update_moves_seven_numbers_per_weight():
    work = analyzed("optimizer", [(ADAM, 9_000), (ADAM, 3_000)])
    assert work.bytes == pytest.approx([0.75 * 28 * WEIGHTS, 0.25 * 28 * WEIGHTS])
    assert work.ideal == pytest.approx([0.75 * 28e6 / 4800, 0.25 * 28e6 / 4800])


def test_an_update_that_no_operator_surrounds():
    assert analyzed("optimizer", [("adamw_kernel", 9_000)]).bytes.tolist() == [28 * WEIGHTS]
    both = analyzed("optimizer", [("adamw_kernel", 9_000), ("small_adamw_kernel", 1_000)])
    assert both.bytes == pytest.approx([0.9 * 28 * WEIGHTS, 0.1 * 28 * WEIGHTS])


def test_what_is_quicker_than_memory_has_lost_nothing():
    assert analyzed("optimizer", [("adamw_kernel", 900)]).ideal.tolist() == [900]


def test_gradients_of_two_dtypes_share_the_weights():
    work = analyzed("clip", [(NORM, 6_000), (NORM16, 6_000)])
    assert work.bytes == pytest.approx([4 * WEIGHTS / 2, 2 * WEIGHTS / 2])


@pytest.mark.parametrize(
    ("phase", "name", "weights"),
    [("forward", NORM, WEIGHTS), ("optimizer", ADAM, None), ("optimizer", "other", WEIGHTS)],
)
def test_everything_else_stays_unknown(phase, name, weights):
    assert np.isnan(analyzed(phase, [(name, 9_000)], weights).ideal).all()
