"""Dispatch against the loop: order, gather, combine and all gradients, under any routing."""

import pytest
import torch

from steplab.kernels import experts as op
from steplab.kernels import grouped_mm as grouped
from steplab.kernels.experts._rows import sort_rows
from steplab.kernels.experts.capacity import capacity, kept_assignments
from steplab.testing.tolerance import assert_as_good_as, relative_error

T, K, E, D, F = 40, 2, 4, 16, 24


def routing(kind, generator, tokens=T, experts=E):
    """Return experts_TK: two different experts per token, spread as `kind` says."""
    if kind == "balanced":
        first = torch.arange(tokens) % experts
        return torch.stack([first, (first + 1) % experts], 1)
    if kind == "skewed":  # twice as many for the first expert as for any other
        weights = torch.tensor([2.0] + [1.0] * (experts - 1))
        return torch.multinomial(weights.expand(tokens, -1), K, generator=generator)
    if kind == "collapsed":
        return torch.tensor([0, 1]).expand(tokens, 2).contiguous()
    assert kind == "last only"  # the first two experts are empty
    return torch.tensor([experts - 1, experts - 2]).expand(tokens, 2).contiguous()


ROUTINGS = ["balanced", "skewed", "collapsed", "last only"]


def make(kind, dtype, activation, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * F if activation == "swiglu" else F

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, weights = draw(T, D), draw(T, K).sigmoid()
    inputs = [x, weights, draw(E, rows, D) * 0.3, draw(E, D, F) * 0.3]
    low = [t.to(dtype) for t in inputs]
    low[1] = inputs[1].to(torch.promote_types(dtype, torch.float32))  # router weights stay fp32
    return low, routing(kind, generator)


def matmul(x, w, offsets):
    return grouped.grouped_mm(grouped.choose("auto", x, w), x, w, offsets)


def run(impl, inputs, experts_TK, activation):
    x, weights, w_in, w_out = inputs = [t.detach().requires_grad_() for t in inputs]
    bundle = op.ExpertWeights(w_in, w_out, activation)
    out, dropped = op.experts(impl, x, weights, experts_TK, bundle, matmul)
    slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * slope).sum(), inputs)], float(dropped)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_grouped_equals_loop_in_fp64(kind, activation):
    inputs, experts_TK = make(kind, torch.float64, activation)
    expected, _ = run("loop", inputs, experts_TK, activation)
    actual, dropped = run("grouped", inputs, experts_TK, activation)
    assert dropped == 0
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_grouped_is_as_exact_as_the_loop(kind, dtype):
    inputs, experts_TK = make(kind, dtype, "gelu")
    truth, _ = run("loop", [t.double() for t in inputs], experts_TK, "gelu")
    peer, _ = run("loop", inputs, experts_TK, "gelu")
    actual, _ = run("grouped", inputs, experts_TK, "gelu")
    for name, *three in zip(
        ("out", "dx", "dg", "dw_in", "dw_out"), actual, peer, truth, strict=True
    ):
        assert_as_good_as(*three, name=f"{name}, {kind}")


@pytest.mark.parametrize("kind", ROUTINGS)
def test_capacity_equals_the_loop_with_the_same_assignments_dropped(kind):
    inputs, experts_TK = make(kind, torch.float64, "gelu")
    kept = kept_assignments(experts_TK, E)
    # In the loop a dropped assignment is one with weight zero; its weight gets no gradient.
    x, weights, *matrices = inputs
    expected, _ = run("loop", [x, weights * kept, *matrices], experts_TK, "gelu")
    expected[2] = expected[2] * kept
    actual, dropped = run("capacity", inputs, experts_TK, "gelu")
    assert dropped == pytest.approx(1 - kept.double().mean().item())
    assert (dropped > 0) == (kind in ("collapsed", "last only"))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["grouped", "capacity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gradients_equal_eager_ones(impl, dtype):
    """torch 2.11 can compile an autograd function to one with zero gradients, silently."""
    inputs, experts_TK = make("skewed", dtype, "gelu")

    def dispatch(x, weights, w_in, w_out):
        bundle = op.ExpertWeights(w_in, w_out, "gelu")
        return op.experts(impl, x, weights, experts_TK, bundle, matmul)[0]

    gradients = []
    for function in (dispatch, torch.compile(dispatch, backend="aot_eager", fullgraph=True)):
        own = [t.detach().requires_grad_() for t in inputs]
        gradients.append(torch.autograd.grad(function(*own).float().square().sum(), own))
    for eager, compiled in zip(*gradients, strict=True):
        assert eager.abs().sum() > 0
        # The same ops in the same order; bf16 may round an intermediate once more or less.
        assert relative_error(compiled, eager) < (1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_capacity_is_a_quarter_more_than_balanced():
    assert capacity(1024, 8) == 160
    assert capacity(7, 8) == 8


@pytest.mark.parametrize("kind", ROUTINGS)
def test_rows_are_sorted_by_expert_and_map_back(kind):
    _, experts_TK = make(kind, torch.float64, "gelu")
    rows = sort_rows(experts_TK, E)
    by_row = torch.empty(T * K, dtype=torch.long)
    by_row[rows.row_TK.flatten()] = experts_TK.flatten()
    assert torch.equal(by_row, experts_TK.flatten().sort(stable=True).values)
    assert torch.equal(rows.token_R[rows.row_TK], torch.arange(T)[:, None].expand(T, K))
    assert rows.offsets_E.tolist() == [int((experts_TK <= e).sum()) for e in range(E)]


@pytest.mark.parametrize("impl", ["loop", "dense", "aten"])
def test_grouped_mm_equals_single_products(impl):
    torch.manual_seed(0)
    x, w = torch.randn(12, 8, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    offsets = torch.tensor([5, 5, 12])
    expected = torch.cat([x[:5] @ w[0], x[5:] @ w[2]])
    actual = grouped.grouped_mm(impl, x, w, offsets)
    slope = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(
        torch.autograd.grad((actual * slope).sum(), (x, w)),
        torch.autograd.grad((expected * slope).sum(), (x, w)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_group_by_group_passes_opcheck():
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    torch.library.opcheck(torch.ops.steplab.grouped_mm_loop, (x, w, offsets))


def test_grouped_mm_says_where_it_cannot_run():
    fp64 = torch.randn(4, 8, dtype=torch.float64), torch.randn(2, 8, 8, dtype=torch.float64)
    assert grouped.choose("auto", *fp64) == "loop"
    odd = torch.randn(4, 33), torch.randn(2, 33, 8)
    assert grouped.choose("auto", *odd) == "loop"
    with pytest.raises(Exception, match="fp32"):
        grouped.choose("aten", *fp64)
    with pytest.raises(Exception, match="needs cuda, not cpu"):
        grouped.choose("dense", *odd)


@pytest.mark.gpu
def test_gpu_few_rows_in_fp32_need_no_wait():
    x, w = torch.randn(256, 8, device="cuda"), torch.randn(3, 8, 16, device="cuda")
    offsets = torch.tensor([90, 90, 256], device="cuda")
    assert grouped.choose("auto", x, w) == "loop"  # of a training step
    with torch.no_grad():
        assert grouped.choose("auto", x, w) == "dense"
        assert grouped.choose("auto", x.repeat(2, 1), w) == "loop"
        found, expected = (grouped.grouped_mm(impl, x, w, offsets) for impl in ("dense", "loop"))
    torch.testing.assert_close(found, expected)


def test_the_error_measure_sees_a_wrong_result():
    """A dispatch that swaps two tokens must not pass as rounding."""
    inputs, experts_TK = make("skewed", torch.float64, "gelu")
    (truth, *_), _ = run("loop", inputs, experts_TK, "gelu")
    swapped = truth.clone()
    swapped[[0, 1]] = truth[[1, 0]]
    assert relative_error(swapped, truth) > 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROUTINGS)
def test_gpu_grouped_is_as_exact_as_the_loop(kind):
    inputs, experts_TK = make(kind, torch.bfloat16, "gelu")
    inputs, experts_TK = [t.cuda() for t in inputs], experts_TK.cuda()

    def run_there(impl, inputs):
        x, weights, w_in, w_out = inputs = [t.detach().requires_grad_() for t in inputs]
        bundle = op.ExpertWeights(w_in, w_out, "gelu")
        out, _ = op.experts(impl, x, weights, experts_TK, bundle, matmul)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]

    truth = run_there("loop", [t.double() for t in inputs])
    for three in zip(run_there("grouped", inputs), run_there("loop", inputs), truth, strict=True):
        assert_as_good_as(*three)


@pytest.mark.gpu
def test_gpu_grouped_does_not_wait_for_the_host():
    inputs, experts_TK = make("skewed", torch.bfloat16, "gelu")
    x, weights, w_in, w_out = (t.cuda() for t in inputs)
    bundle, experts_TK = op.ExpertWeights(w_in, w_out, "gelu"), experts_TK.cuda()
    op.experts("grouped", x, weights, experts_TK, bundle, matmul)
    torch.cuda.set_sync_debug_mode("error")
    try:
        op.experts("grouped", x, weights, experts_TK, bundle, matmul)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_end_of_one_group_may_be_cut_from_a_larger_tensor():
    """As one expert of a rank is: its stride is that of the tensor, which torch 2.15 refuses."""
    x, w = torch.randn(6, 16), torch.randn(1, 16, 8)
    ends_E = torch.full((1, 6), 6)[:, -1]
    assert ends_E.stride() == (6,)
    out = grouped.grouped_mm("aten", x, w, ends_E)
    torch.testing.assert_close(out, x @ w[0])
