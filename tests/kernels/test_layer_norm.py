"""Layer norm with the addition before it: its definition, and its kernels in the interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import Unsupported
from steplab.kernels import layer_norm as op
from steplab.testing.tolerance import assert_as_good_as

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-5


def inputs(rows=7, width=24, dtype=FP32, added=None, bias=True, seed=0):
    """Return x, weight, bias, added and the gradients of norm and stream."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, weight = 3 * normal(rows, width) + 1, 1 + 0.5 * normal(width)
    shift = normal(width) if bias else None
    more = normal(rows, width).to(added) if added is not None else None
    stream = dtype if added is None else torch.promote_types(dtype, added)
    gradients = [normal(rows, width).to(stream) for _ in range(2)]
    vectors = [weight.to(dtype), None if shift is None else shift.to(dtype)]
    return [x.to(dtype), *vectors, more], gradients


def results(impl, tensors, gradients, passed=True):
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    out = op.layer_norm(impl, *leaves[:3], EPS, leaves[3])
    used = 2 if passed else 1
    wanted = [leaf for leaf in leaves if leaf is not None]
    found = torch.autograd.grad(out[:used], wanted, gradients[:used])
    return [*(t.detach() for t in out), *found]


def check(impl, passed=True, **case):
    """Compare values and gradients with the definition in fp64."""
    tensors, gradients = inputs(**case)
    wide = [None if t is None else t.double() for t in tensors]
    truth = results("reference", wide, [g.double() for g in gradients], passed)
    peer = results("reference", tensors, gradients, passed)
    for ours, theirs, exact in zip(
        results(impl, tensors, gradients, passed), peer, truth, strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert_as_good_as(ours, theirs, exact, f"{impl} {case}")


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(2, 40), st.booleans(), st.booleans())
def test_the_definition_is_torchs(rows, width, has_bias, has_added):
    tensors, _ = inputs(rows, width, torch.float64, torch.float64 if has_added else None, has_bias)
    x, weight, bias, added = tensors
    normed, stream = op.layer_norm("reference", x, weight, bias, EPS, added)
    assert torch.equal(stream, x if added is None else x + added)
    expected = torch.nn.functional.layer_norm(stream, (width,), weight, bias, EPS)
    torch.testing.assert_close(normed, expected, rtol=1e-12, atol=1e-12)


def test_a_cpu_has_the_definition():
    (x, weight, bias, _), _ = inputs()
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert op.choose("auto", x, weight, bias) == "reference"
    with pytest.raises(Unsupported):
        op.choose("triton_norm", x, weight, bias)


class Interpreted:
    @pytest.mark.parametrize(
        "case",
        [
            {},
            {"passed": False},
            {"bias": False},
            {"added": FP32},
            {"added": BF16, "dtype": BF16},
            {"added": BF16, "bias": False},
            {"dtype": FP16, "added": FP16},
            {"rows": 1, "width": 3},
        ],
        ids=str,
    )
    def test_the_norm_equals_its_definition(self, case):
        check("triton_norm", **case)

    @settings(max_examples=8)
    @given(st.integers(1, 11), st.integers(2, 40), st.sampled_from([None, FP32, BF16]))
    def test_a_norm_of_any_shape_equals_its_definition(self, rows, width, added):
        check("triton_norm", rows=rows, width=width, added=added)

    def test_a_compiled_norm_has_the_same_bits(self):
        tensors, gradients = inputs(added=FP32)
        eager = results("triton_norm", tensors, gradients)
        leaves = [t.detach().requires_grad_() for t in tensors]

        def block(x, weight, bias, added):
            return op.layer_norm("triton_norm", x, weight, bias, EPS, added)

        out = torch.compile(block, fullgraph=True, backend="aot_eager")(*leaves)
        found = [*out, *torch.autograd.grad(out, leaves, gradients)]
        assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))

    def test_the_ops_are_registered_as_torch_wants_them(self):
        (x, weight, bias, added), (d_normed, _) = inputs(added=FP32)
        ops = torch.ops.steplab
        torch.library.opcheck(ops.layer_norm.default, (x, weight, bias, EPS, FP32))
        torch.library.opcheck(ops.add_layer_norm.default, (x, added, weight, None, EPS, None))
        rows = x.mean(-1), x.std(-1).reciprocal()
        for has_bias in (False, True):
            given = (d_normed, None, x, weight, *rows, has_bias)
            torch.library.opcheck(ops.layer_norm_backward.default, given)
