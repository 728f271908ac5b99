"""Networks in e4m3: against fp64 products of the same rounded factors, and honest about what fp8
costs; on CPU by the definition and in Triton's interpreter, and all of it on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import Unsupported
from steplab.kernels import e4m3, e4m3_network, e4m3_passes
from steplab.kernels import experts as experts_op
from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels.e4m3 import E4M3_MAX, balanced_scales, counting, scale_for
from steplab.kernels.experts._rows import place_rows
from steplab.kernels.experts.fp8 import pad_groups
from tests.kernels.expert_cases import ROUTINGS, Case, double, make, one_expert, results
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu

NAMES = ("out", "dx", "dweights", "dw_in", "dw_out")
# Two roundings in a row, each 3.7 % of the norm, and what gelu's slope makes of that of z.
TWO_ROUNDINGS = 0.09
SAME = 0.005  # the same arithmetic with sums in another order: numbers at a border may change sides


def off(found, true):
    return float((found.double() - true.double()).norm() / true.double().norm())


def fp8_case(routing, **more):
    return Case(routing, tokens=more.pop("tokens", 64), width=64, inner=96, **more)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_are_off_by_what_eight_bits_cost(routing, dtype):
    case = fp8_case(routing, dtype=dtype)
    inputs, experts_TK, d_out = make(case)
    exact, exact_d_out = double(inputs, d_out)
    truth = results("loop", case, exact, experts_TK, exact_d_out)
    found = results("fp8", case, inputs, experts_TK, d_out)
    for name, a, t in zip(NAMES, found, truth, strict=True):
        assert a.shape == t.shape and 0.02 < off(a, t) < TWO_ROUNDINGS, (name, off(a, t))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_network_is_one_expert(weighted):
    case = fp8_case("balanced")
    inputs, _, d_out = make(case)
    truth = one_expert("reference", case, inputs, d_out, weighted)
    found = one_expert("fp8", case, inputs, d_out, weighted)
    for a, t in zip(found, truth, strict=True):
        assert 0.02 < off(a, t) < TWO_ROUNDINGS


@pytest.mark.parametrize("weighted", [False, True])
def test_a_network_takes_any_number_of_rows(weighted, monkeypatch):
    """The units sum over multiples of 16 rows; those that are added change no result."""
    rows = []

    def recording(a, b, scale, offsets_E, dtype, weight_gradient=e4m3.weight_gradient):
        rows.append(a.shape[1])
        return weight_gradient(a, b, scale, offsets_E, dtype)

    monkeypatch.setattr(e4m3_network, "weight_gradient", recording)
    case = fp8_case("balanced", tokens=31)
    inputs, _, d_out = make(case)
    truth = one_expert("reference", case, inputs, d_out, weighted)
    found = one_expert("fp8", case, inputs, d_out, weighted)
    for a, t in zip(found, truth, strict=True):
        assert a.shape == t.shape and 0.02 < off(a, t) < TWO_ROUNDINGS
    assert rows == [32, 32]


@pytest.mark.parametrize("routed", [False, True])
def test_sums_over_rows_are_precise_and_others_fast(routed, monkeypatch):
    """Sums of 14 bits lose with every term, and a weight gradient has as many as there are rows."""
    fast = []

    def multiply(a, b, *scales, offs=None, out_dtype, use_fast_accum):
        fast.append(use_fast_accum)
        stack = [offs.shape[0]] if a.ndim == b.ndim == 2 and offs is not None else []
        return torch.zeros(*stack, a.shape[0], b.shape[-1], dtype=out_dtype)

    monkeypatch.setattr(e4m3, "_on_units", lambda values, dtype: True)
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", multiply)
    case = fp8_case("balanced", dtype=torch.bfloat16)
    inputs, experts_TK, d_out = make(case)
    if routed:
        results("fp8", case, inputs, experts_TK, d_out)
    else:
        one_expert("fp8", case, inputs, d_out)
    # Both products of the forward, dh, both weight gradients, dx.
    assert fast == [True, True, True, False, False, True]


@settings(max_examples=30)
@given(st.integers(1, 70), st.integers(1, 3), st.integers(1, 6), st.integers(0, 999))
def test_groups_are_multiples_of_16_and_none_is_empty(tokens, chosen, experts, seed):
    generator = torch.Generator().manual_seed(seed)
    odds = torch.rand(experts, generator=generator) ** 4  # some get nothing, some a single token
    experts_TK = torch.multinomial(
        odds + 1e-9, tokens * chosen, replacement=True, generator=generator
    ).view(tokens, chosen)
    row_TK, _, offsets_E = place_rows(experts_TK, experts)
    row_TK, source_R, ends_E = pad_groups(row_TK, offsets_E, experts_TK)
    sizes_E = torch.diff(ends_E, prepend=torch.zeros(1, dtype=ends_E.dtype))
    assert (sizes_E % 16 == 0).all() and (sizes_E > 0).all() and ends_E[-1] <= source_R.shape[0]
    assert source_R.shape[0] % 16 == 0
    assert torch.equal(source_R[row_TK.flatten().long()], torch.arange(tokens * chosen).int())
    assert (source_R >= 0).sum() == tokens * chosen
    expert_TK = torch.searchsorted(ends_E, row_TK, right=True)
    assert torch.equal(expert_TK, experts_TK)


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([0, 1, 2, 17, 40]), min_size=1, max_size=4),
    st.floats(-30, 30),
    st.integers(0, 99),
)
def test_experts_that_are_empty_have_one_row_or_many(sizes, octaves, seed):
    """Whatever the size of the numbers: finite, zero where nothing arrives, else 8 bits off."""
    generator = torch.Generator().manual_seed(seed)
    experts_TK = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[:, None]
    if not len(experts_TK):
        return
    case = fp8_case("balanced", tokens=len(experts_TK), chosen=1, experts=len(sizes))
    (x, *rest), _, d_out = make(case)
    d_out = d_out * 2.0**octaves * torch.randn(len(d_out), 1, generator=generator).exp()
    truth = results("loop", case, [x, *rest], experts_TK, d_out)
    found = results("fp8", case, [x, *rest], experts_TK, d_out)
    for name, a, t in zip(NAMES, found, truth, strict=True):
        assert torch.isfinite(a).all(), name
        # The gradient of a single weight is one sum, of which little may be left.
        assert name == "dweights" or off(a, t) < 0.15, (name, off(a, t))
    for e, size in enumerate(sizes):
        assert size or not (found[3][e].any() or found[4][e].any())


def test_a_nan_is_seen_and_what_is_too_large_saturates():
    case = fp8_case("balanced", dtype=torch.bfloat16)
    (x, *rest), experts_TK, d_out = make(case)
    plain = results("fp8", case, [x, *rest], experts_TK, d_out)
    x[3, 5] = torch.nan
    found = results("fp8", case, [x, *rest], experts_TK, d_out)
    assert found[0].isnan().any(1).nonzero().flatten().tolist() == [3]
    assert found[3].isnan().any() and torch.equal(found[0][4:], plain[0][4:])
    x[3, 5] = torch.inf
    large = results("fp8", case, [x, *rest], experts_TK, d_out)
    assert not any(t.isnan().any() for t in large)
    assert torch.equal(large[0][4:], plain[0][4:])
    x[3] = 3e38
    assert not results("fp8", case, [x, *rest], experts_TK, d_out)[0][4:].isnan().any()


@settings(max_examples=50)
@given(st.floats(0, 2.0**126, width=32))
def test_a_scale_is_the_least_power_of_two_that_fits(bound):
    scale = float(scale_for(torch.tensor(bound)))
    assert bound <= E4M3_MAX * scale or bound > 448 * 2.0**123
    assert bound > E4M3_MAX * scale / 2 or scale == 2.0**-100
    assert torch.frexp(torch.tensor(scale)).mantissa == 0.5


def test_balanced_scales_share_what_a_row_is_smaller():
    a, b = torch.tensor([1.0, 2.0**-20, 4.0]), torch.tensor([2.0, 2.0**-21, 2.0**-30])
    first, second = balanced_scales(a, b, (a * b).amax())
    assert torch.equal(first * second, torch.full((3,), 2.0))
    # The second row is 2^42 smaller: either factor loses 21 octaves.
    assert first[1] == a[1] * 2.0**21 and second[1] == b[1] * 2.0**21
    assert ((first >= a) & (second >= b)).all()


@settings(max_examples=40)
@given(
    st.integers(-90, 100), st.integers(-90, 100), st.sampled_from([torch.float64, torch.bfloat16])
)
def test_gradients_of_any_size_are_right_or_out_of_range(octaves, octaves_out, dtype):
    """Scales multiply to 2^-198 and to 2^200, of which fp32 holds neither; never a NaN."""
    case = fp8_case("skewed", tokens=32)
    (x, *rest), experts_TK, d_out = make(case)
    inputs, d_out = [x * 2.0**octaves, *rest], d_out * 2.0**octaves_out
    truth = results("loop", case, inputs, experts_TK, d_out)
    narrow = [t.to(dtype) for t in (*inputs, d_out)]
    found = results("fp8", case, narrow[:4], experts_TK, narrow[4])
    for name, a, t in zip(NAMES, found, truth, strict=True):
        if name == "dw_in":
            assert not a.isnan().any()
            # Within what e4m3 holds of a sum whose largest scale is 2^-126 to 2^127. Where z is 30
            # and more, its rounding moves what is left of the slope by 15 %.
            if 2.0**-100 < t.abs().max() < 2.0**120:
                assert off(a, t) < 0.25, (octaves, octaves_out, off(a, t))


def test_rows_of_very_different_gradients_keep_their_part():
    """A few tokens with gradients a thousand times as large must not round the others away."""
    case = fp8_case("one expert", tokens=256)
    (x, *rest), experts_TK, d_out = make(case)
    x[:8], d_out[:8] = 0.0, 0.0
    x[:2], d_out[:2, 0] = torch.randn(2, 64), 500.0
    truth = results("loop", case, [x, *rest], experts_TK, d_out)
    found = results("fp8", case, [x, *rest], experts_TK, d_out)
    for a, t in zip(found[3:], truth[3:], strict=True):
        assert off(a, t) < 0.1
        if a is found[4]:  # of the outputs that the large ones do not touch
            assert off(a[:, 1:], t[:, 1:]) < 0.1


def test_compiled_it_is_one_graph_with_the_same_bits():
    case = fp8_case("skewed", dtype=torch.bfloat16)
    inputs, experts_TK, d_out = make(case)

    def both(x, weights, w_in, w_out):
        bundle = experts_op.ExpertWeights(w_in, w_out, "gelu")
        out, _ = experts_op.experts("fp8", x, weights, experts_TK, bundle, None)
        shared = (w_in[0], w_out[0], "gelu", weights[:, :1])
        return out + feed_forward_op.feed_forward("fp8", x, *shared)

    found = []
    for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = function(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, d_out)])
    for eager, compiled in zip(*found, strict=True):
        assert eager.abs().sum() > 0 and torch.equal(eager, compiled)


def test_the_ops_are_registered_as_torch_wants_them():
    (x, weights, w_in, w_out), experts_TK, _ = make(fp8_case("skewed", tokens=16))
    leaves = [t.detach().requires_grad_() for t in (x, weights, w_in, w_out)]
    row_TK, _, offsets_E = place_rows(experts_TK, 4)
    placed = pad_groups(row_TK, offsets_E, experts_TK)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.steplab.experts_fp8, (*leaves, *placed), test_utils=checks)
    one = [leaf[0].detach().requires_grad_() for leaf in leaves[2:]]
    gate = leaves[1][:, :1].detach().requires_grad_()
    for weight in (gate, None):
        arguments = (leaves[0], *one, weight)
        torch.library.opcheck(torch.ops.steplab.feed_forward_fp8, arguments, test_utils=checks)


@pytest.mark.parametrize("rounded", [e4m3_passes.quantize_rows, e4m3_passes.quantize_columns])
def test_what_is_rounded_lies_row_by_row(rounded):
    """Units take rows along the sum only; a transposed tensor must be written anew."""
    w = torch.randn(3, 32, 48)
    for matrix in (w, w.mT):
        found = rounded(matrix)
        assert all(t.is_contiguous() for t in found)


@needs_no_gpu
def test_without_a_gpu_they_are_refused_and_auto_never_takes_them():
    (x, _, w_in, w_out), _, _ = make(fp8_case("balanced", dtype=torch.bfloat16))
    bundle = experts_op.ExpertWeights(w_in, w_out, "gelu")
    assert experts_op.choose("auto", x, bundle) == "grouped"
    with pytest.raises(Unsupported, match="experts 'fp8' needs an NVIDIA GPU"):
        experts_op.choose("fp8", x, bundle)
    with pytest.raises(Unsupported, match="feed_forward 'fp8' needs an NVIDIA GPU"):
        feed_forward_op.choose("fp8", x, w_in[0], w_out[0])


def test_what_it_cannot_take_is_told(monkeypatch):
    monkeypatch.setattr(feed_forward_op.IMPLS["fp8"], "refuse_device", lambda x: "")
    x = torch.empty(32, 64, dtype=torch.bfloat16)
    assert e4m3_network.refuse(x, 64, 96, "gelu") == ""
    assert "needs bf16" in e4m3_network.refuse(x.float(), 64, 96, "gelu")
    assert "gelu only" in e4m3_network.refuse(x, 64, 96, "swiglu")
    assert "multiples of 16, not 64 and 90" in e4m3_network.refuse(x, 64, 90, "gelu")
    refuse = feed_forward_op.IMPLS["fp8"].refuse
    assert refuse(x[:31], torch.empty(96, 64), torch.empty(64, 96)) == ""
    assert "gelu only" in refuse(x, torch.empty(192, 64), torch.empty(64, 96))


class Interpreted:
    """The Triton passes against the definition: the same numbers but at borders of e4m3."""

    @pytest.fixture
    def definition(self, monkeypatch):
        def use():
            monkeypatch.setattr(e4m3_passes, "_in_triton", lambda x: False)
            monkeypatch.setattr(e4m3_passes, "use_triton", lambda x: False)

        return use

    def test_every_number_is_rounded_as_torch_rounds_it(self, definition):
        exponents = torch.randint(-14, 10, (4, 200), generator=torch.Generator().manual_seed(0))
        x = torch.ldexp(torch.randn(4, 200), exponents).bfloat16()
        x[0, :3], x[1, 0], x[2] = torch.tensor([torch.nan, torch.inf, -torch.inf]), 480.0, 0.0
        source = torch.tensor([2, 0, -1, 6, 5], dtype=torch.int32)
        arguments = [(x,), (x, source, 2)]
        found = [e4m3_passes.quantize_rows(*a) for a in arguments]
        found.append(e4m3_passes.quantize_columns(x[None].expand(2, 4, 200)))
        definition()
        expected = [e4m3_passes.quantize_rows(*a) for a in arguments]
        expected.append(e4m3_passes.quantize_columns(x[None].expand(2, 4, 200)))
        for a, b in zip(found, expected, strict=True):
            values, truth = a.values.float(), b.values.float()
            assert torch.equal(values.isnan(), truth.isnan())
            assert torch.equal(values.nan_to_num(), truth.nan_to_num())
            assert torch.equal(a.scale, b.scale)
            torch.testing.assert_close(a.norm, b.norm)

    def test_the_passes_are_those_of_the_definition(self, definition):
        case = Case("last only", tokens=16, width=32, inner=48, dtype=torch.bfloat16)
        arguments = make(case)
        found = results("fp8", case, *arguments)
        networks = [one_expert("fp8", case, arguments[0], arguments[2], w) for w in (True, False)]
        definition()
        expected = results("fp8", case, *arguments)
        for a, b in zip(found, expected, strict=True):
            assert off(a, b) < SAME
        for weighted, network in zip((True, False), networks, strict=True):
            again = one_expert("fp8", case, arguments[0], arguments[2], weighted)
            assert all(off(a, b) < SAME for a, b in zip(network, again, strict=True))


LAUNCHES = """
from steplab.kernels import e4m3_passes as passes
from steplab.kernels.activation import RowWeights
from steplab.kernels.e4m3 import Rounded, Rows

passes._in_triton = passes.use_triton = lambda x: True
half, full, index, narrow = ((lambda *s, d=d: torch.empty(*s, dtype=d)) for d in (
    torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn))
routed = RowWeights(full(64), index(96))
one, row = full(()), full(96)
for source in (None, index(96)):
    passes.quantize_rows(half(96, 768), source, 2)
    passes.transpose_rows(half(96, 768), source, 2, (row, row, one), True)
passes.quantize_columns(half(2, 768, 3072))
for weights in (routed, RowWeights(row), None):
    passes.activate_rows(half(96, 3072), row, one, weights)
    scales = passes.gradient_scales(Rows(narrow(96, 768), row, row), one, weights, row, row)
    passes.slope_rows(Rounded(narrow(96, 3072), row), half(96, 3072), weights, scales)
for kernel in kernels:
    assert kernel.metadata.shared <= 99 * 1024, kernel.metadata
    ptx = kernel.asm["ptx"]
    assert ".local" not in ptx and "div." not in ptx, kernel.metadata.name
    if kernel.metadata.name != "gradient_scales_kernel":
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx, kernel.metadata.name
        loads = "ld.global.v4", "cp.async.cg.shared.global"
        assert any(load in ptx for load in loads), kernel.metadata.name
print(len(kernels), "kernels")
"""


@needs_no_gpu
def test_the_kernels_compile_for_hopper():
    pytest.importorskip("triton")
    assert compile_for_hopper(LAUNCHES) == "14 kernels"


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gpu_experts_are_those_of_the_definition(routing):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the grouped products need compute capability 9.0")
    case = Case(routing, tokens=512, width=128, inner=256, experts=8, dtype=torch.bfloat16)
    inputs, experts_TK, d_out = make(case, "cuda")
    exact, exact_d_out = double(inputs, d_out)
    truth = results("fp8", case, exact, experts_TK, exact_d_out)
    found = results("fp8", case, inputs, experts_TK, d_out)
    for name, a, t in zip(NAMES, found, truth, strict=True):
        assert off(a, t) < 0.04, (name, off(a, t))
    again = results("fp8", case, inputs, experts_TK, d_out)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.gpu
def test_gpu_counting_changes_the_passes_and_not_the_results():
    """While somebody counts, the definition writes what the units multiply."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the grouped products need compute capability 9.0")
    case = Case("skewed", tokens=512, width=128, inner=256, experts=8, dtype=torch.bfloat16)
    inputs, experts_TK, d_out = make(case, "cuda")
    plain = results("fp8", case, inputs, experts_TK, d_out)
    network = one_expert("fp8", case, inputs, d_out, True)
    with counting() as counts:
        found = results("fp8", case, inputs, experts_TK, d_out)
        again = one_expert("fp8", case, inputs, d_out, True)
    assert all(off(a, b) < SAME for a, b in zip((*found, *again), (*plain, *network), strict=True))
    assert counts.rounded > 0 and counts.not_finite == counts.saturated == 0
