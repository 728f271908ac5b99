"""`bench attention`: its cells, its check against fp64, and what becomes of wrong results."""

import os
import subprocess
import sys

import pytest
import torch

from steplab.bench.op_accuracy import AccuracyCheck
from steplab.bench.op_cell import measure_cell
from steplab.bench.op_results import cell_result
from steplab.bench.ops import attention_fp64
from steplab.bench.ops.attention import BENCH, AttentionInstance
from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.kernels import attention as op
from steplab.kernels.attention import math as math_impl
from tests.bench.op_runs import specs

CPU = torch.device("cpu")


def cells(**changes):
    asked = {"batch": [1], "heads": [2], "context": [64], "head_width": [16]}
    asked |= {"dtype": ["fp32"], "causal": [True], "impl": ["flash"]}
    template = RunSpec("attention", device="cpu", steps=7)
    return BENCH.cells({**asked, **changes}, template, 0.5)


def test_a_cell_for_every_combination_and_tile():
    found = cells(
        context=[128, 512], dtype=["fp32", "bf16"], impl=["flash", "triton_flash"],
        tiles=["64x32x4x2"],
    )  # fmt: skip
    assert len(found) == 2 * 2 * 3
    variants = [BENCH.variant_text(spec.config) for spec in found[:3]]
    assert variants == ["flash", "triton_flash", "triton_flash 64x32x4x2"]
    assert {spec.steps for spec in found} == {7} and found[0].config["seconds"] == 0.5
    shape = "batch 1, heads 2, context 128, head width 16, causal, fp32"
    assert BENCH.shape_text(found[0].config) == shape


def test_flops_of_the_flagship():
    """4 x pairs x width forward; at 0.957 ms that is cuDNN's 431 TFLOP/s on an H200."""
    config = {"batch": 16, "heads": 12, "context": 4096, "head_width": 64, "causal": True}
    forward, backward = BENCH.flops(config)
    assert forward / 0.957e-3 / 1e12 == pytest.approx(431, abs=0.5)
    assert backward == 2.5 * forward


@pytest.mark.parametrize(("context", "count"), [(128, 6), (1024, 7), (4096, 8), (65536, 8)])
def test_all_tiles_are_those_of_the_context(context, count):
    specs = cells(context=[context], dtype=["bf16"], impl=["triton_flash"], tiles=["all"])
    found = [spec.config["tiles"] for spec in specs]
    assert found[0] == "" and len(found) == count + 1
    assert all(tile.count("x") == 3 for tile in found[1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": [8]}, "--context must be at least 16"),
        ({"batch": [0]}, "--batch must be at least 1"),
        ({"impl": ["flahs"]}, "Did you mean 'flash'"),
        ({"impl": ["compiled-nothing"]}, "no implementation 'nothing'"),
        ({"tiles": ["64x64x4x2"]}, "--tiles belongs to triton_flash"),
        ({"tiles": ["64x64"], "impl": ["triton_flash"]}, "is not a tile"),
        ({"tiles": ["60x64x4x2"], "impl": ["triton_flash"]}, "powers of two"),
        ({"tiles": ["8x64x4x2"], "impl": ["triton_flash"]}, "at least 16 rows"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        cells(**changes)


def test_compiled_and_flex_are_known():
    assert len(cells(impl=["compiled-reference", "flex", "math"])) == 3


def config(**changes):
    options = {"batch": 2, "heads": 2, "context": 40, "head_width": 8, "causal": True}
    return {**options, "dtype": "fp32", "impl": "math", "tiles": "", **changes}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scores", [40 * 7, 2**22])
def test_the_truth_in_pieces_is_that_of_the_whole(monkeypatch, causal, scores):
    monkeypatch.setitem(attention_fp64.MAX_SCORES, "cpu", scores)
    instance = AttentionInstance(config(causal=causal), 0, CPU)
    tensors = {**instance.call.leaves, "dout": instance.call.dout}
    exact = {name: x.detach().double() for name, x in tensors.items()}
    leaves = [exact[name].requires_grad_() for name in ("q", "k", "v")]
    out = op.attention("reference", *leaves, causal)
    whole = [out.detach(), *torch.autograd.grad(out, leaves, exact["dout"])]
    flat = {name: x.detach().flatten(0, 1) for name, x in exact.items()}
    found = attention_fp64.gradients(flat, causal, torch.float64)
    for name, expected in zip(("out", "dq", "dk", "dv"), whole, strict=True):
        torch.testing.assert_close(found[name], expected.flatten(0, 1))


def test_coverage_shrinks_with_the_work():
    assert attention_fp64.coverage(192, 4096, 64, "cuda") == attention_fp64.Coverage(192, 4096)
    some = attention_fp64.coverage(192, 16384, 128, "cuda")
    assert 1 < some.heads < 192 and some.context == 16384
    assert attention_fp64.coverage(8, 65536, 128, "cpu").context < 65536


def test_how_much_was_checked_is_reported(monkeypatch):
    instance = AttentionInstance(config(), 0, CPU)
    assert instance.check()[1] == "all heads"
    per_head = attention_fp64.PRODUCTS * 8 * 40 * 40
    monkeypatch.setitem(attention_fp64.MAX_FLOPS, "cpu", 2.5 * per_head)
    found, checked = instance.check()
    assert checked == "2 of 4 heads" and max(d.of_budget for d in found) <= 1
    monkeypatch.setitem(attention_fp64.MAX_FLOPS, "cpu", per_head / 4)
    assert instance.check()[1] == "one head at context 20 instead"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("impl", ["math", "flash", "tiled", "reference"])
def test_right_implementations_are_within_their_budget(impl, dtype):
    found, _ = AttentionInstance(config(impl=impl, dtype=dtype), 0, CPU).check()
    assert [d.name for d in found] == ["out", "dq", "dk", "dv"]
    assert max(d.of_budget for d in found) <= 1, found


def planted(monkeypatch, attention):
    monkeypatch.setattr(math_impl, "attention", lambda inputs: attention(*inputs[:4]))
    (spec,) = specs(["math"], contexts=(200,))
    return measure_cell(spec)


def test_a_mask_that_only_the_backward_applies_is_wrong(monkeypatch):
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return op.attention("reference", q, k, v, False)

        @staticmethod
        def backward(ctx, dout):
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                out = op.attention("reference", *leaves, True)
            return torch.autograd.grad(out, leaves, dout)

    run = planted(monkeypatch, lambda q, k, v, causal: Careless.apply(q, k, v))
    assert run.status == "failed" and run.reason.startswith("wrong: out is")
    assert run.clock is not None and cell_result(run).status == "wrong"
    assert cell_result(run).errors["dq"] < 1e-6 < cell_result(run).errors["out"]


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("roundings", "right"), [(0.8, True), (4.0, False)])
def test_a_long_sum_may_drift_by_its_root_and_no_further(name, causal, roundings, right):
    T = 1024
    inputs = {name: torch.randn(1, 1, T, 8) for name in ("q", "k", "v", "dout")}
    flat = {name: x.flatten(0, 1) for name, x in inputs.items()}
    truth = attention_fp64.gradients(flat, causal, torch.float64)
    actual = {name: x[None].float() for name, x in truth.items()}
    terms = torch.arange(1, T + 1) if causal else torch.full((T,), T)
    terms = terms.flip(0) if name in ("dk", "dv") else terms
    off = 1 + roundings * terms.sqrt()[:, None] * torch.finfo(torch.float32).eps / 2
    actual[name] = (truth[name] * off)[None].float()
    found = attention_fp64.check_heads(inputs, actual, causal, heads=1)
    assert all((a.of_budget <= 1) == (right or a.name != name) for a in found), found


class LongSums:
    """Sixteen tiles of queries, evenly over `T` causal positions: out and dq as sums over keys."""

    def __init__(self, T: int) -> None:
        D, tiles = 16, 16
        draw = torch.Generator().manual_seed(T)
        self.k, self.v = (torch.randn(T, D, generator=draw) for _ in range(2))
        starts = torch.arange(tiles) * (T // tiles) + T // tiles // 2
        rows = (starts[:, None] + torch.arange(16)).flatten()
        self.q, self.dout = (torch.randn(len(rows), D, generator=draw) for _ in range(2))
        self.unseen = torch.arange(T) > rows[:, None]
        self.drift = {n: attention_fp64.sum_slack(T, True, n)[rows] for n in ("out", "dq")}

    def terms(self, dtype):
        """Return both sums as (factors over keys, vectors of keys, what the sum is divided by)."""
        q, k, v, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        scale = k.shape[1] ** -0.5
        scores = (q @ k.T * scale).masked_fill(self.unseen, -torch.inf)
        w = (scores - scores.amax(1, keepdim=True)).exp()
        total = w.sum(1, keepdim=True)
        delta = ((w / total) @ v * dout).sum(1, keepdim=True)
        return {"out": (w, v, total), "dq": (w / total * (dout @ v.T - delta), k, 1 / scale)}

    def check(self, name, fault=lambda w: w):
        """Return the accuracy of a sum that adds one key after the other in fp32."""
        w, x, total = self.terms(torch.float32)[name]
        actual = torch.zeros_like(self.q)
        for w_R, x_D in zip(fault(w.clone()).T.contiguous(), x, strict=True):
            actual.addcmul_(w_R[:, None], x_D)
        peer = (w @ x) / total
        w, x, divisor = self.terms(torch.float64)[name]
        comparison = AccuracyCheck(name)
        comparison.add(actual / total, peer, w @ x / divisor, self.drift[name])
        return comparison.result()


@pytest.mark.parametrize("name", ["out", "dq"])
@pytest.mark.parametrize("T", [16384, 32768, 65536])
def test_sums_over_many_keys_one_after_the_other_are_right(T, name):
    """An honest kernel is not called wrong, though its peer, which adds blocks, loses less."""
    sums = LongSums(T)
    assert sums.check(name).of_budget < 0.5
    sums.drift[name] = 0.0
    assert sums.check(name).of_budget > 1


def _scaled(factor):
    def fault(w):
        w[:, 4096:4160] *= factor
        return w

    return fault


@pytest.mark.parametrize("name", ["out", "dq"])
@pytest.mark.parametrize("factor", [0.0, 2.0, 1.002], ids=["missing", "twice", "wrong scale"])
def test_one_wrong_tile_of_keys_among_hundreds_is_wrong(name, factor):
    found = LongSums(16384).check(name, _scaled(factor))
    assert found.of_budget > 2, found


def test_a_causal_budget_at_long_contexts_is_a_few_times_an_honest_error():
    """On an H200 right implementations had an error of 8.4e-7 with 16,384 keys, 1.1e-6 with twice.

    Values of rows with few keys are large and lose little, so the whole may lose much less than
    the last row.
    """
    for T, measured in ((16384, 8.4e-7), (32768, 1.1e-6)):
        size_T = torch.arange(1, T + 1).double().rsqrt()[:, None]  # of an average of n values
        comparison = AccuracyCheck("out")
        comparison.add(size_T, size_T, size_T, attention_fp64.sum_slack(T, True, "out"))
        assert 1.5 < comparison.result().budget / measured < 4


def test_one_wrong_row_is_wrong(monkeypatch):
    def one_row(q, k, v, causal):
        out = op.attention("reference", q, k, v, causal)
        factor = torch.ones_like(out)
        factor[0, 1, 150] = 1.01
        return out * factor

    run = planted(monkeypatch, one_row)
    assert cell_result(run).status == "wrong"


def test_when_the_backward_fails_the_forward_is_kept(monkeypatch):
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return op.attention("reference", q, k, v, True)

        @staticmethod
        def backward(ctx, dout):
            raise MemoryError("no room")

    run = planted(monkeypatch, lambda q, k, v, causal: Half.apply(q, k, v))
    assert run.status == "oom" and run.reason == "backward: no room"
    result = cell_result(run)
    assert result.forward_ms > 0 and result.both_ms is None and result.errors == {}


def test_refused_cells_are_unsupported():
    runs = [measure_cell(spec) for spec in specs(["cudnn", "flex"])]
    assert [run.status for run in runs] == ["unsupported"] * 2
    assert "needs an NVIDIA GPU" in runs[0].reason and "no backward" in runs[1].reason


def test_a_cell_that_went_well():
    (spec,) = specs(["flash"], contexts=(64,))
    said = []
    run = measure_cell(spec, said.append)
    found = cell_result(run)
    assert run.status == "ok" and found.status == "ok" and said[-1] == "comparing with fp64"
    assert found.repeats == 8 and min(found.forward_ms, found.backward_ms, found.both_ms) > 0
    # Output and log-sum-exp (fp32) are kept; q, k and v are inputs.
    assert found.kept_bytes == 2 * 64 * (16 + 1) * 4
    assert found.extra_bytes >= found.kept_bytes + 3 * 2 * 64 * 16 * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs natively here")
def test_chosen_tiles_in_the_interpreter():
    pytest.importorskip("triton")
    code = (
        "import torch; from steplab.bench.ops.attention import AttentionInstance\n"
        "c = dict(batch=1, heads=1, context=40, head_width=16, causal=True, dtype='fp32')\n"
        "c |= dict(impl='triton_flash', tiles='16x32x1x1')\n"
        "found, _ = AttentionInstance(c, 0, torch.device('cpu')).check()\n"
        "assert len(found) == 4 and max(d.of_budget for d in found) <= 1, found\n"
        "assert hasattr(torch.ops.steplab, 'triton_flash_16x32x1x1')\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
