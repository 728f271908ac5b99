"""Norm, rotation and update on CPU: definitions against formulas, choices and refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import Unsupported
from steplab.kernels import rms_norm as norm_op
from steplab.kernels import rotary as rotary_op
from steplab.modules.norms import RMSNorm
from steplab.modules.rotary import Rotary, RotaryHeads
from tests.kernels.norm_cases import BF16, EPS, FP32, NormCase, check_norm, norm_inputs

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_the_definition_is_the_formula(rows, width, has_added, seed):
    torch.manual_seed(seed)
    x, y = torch.randn(2, rows, width, dtype=torch.float64)
    weight = torch.randn(width, dtype=torch.float64)
    normed, stream = norm_op.rms_norm("reference", x, weight, EPS, y if has_added else None)
    expected = x + y if has_added else x
    assert torch.equal(stream, expected)
    for row, own in zip(normed, expected, strict=True):
        scale = (sum(float(v) ** 2 for v in own) / width + EPS) ** -0.5
        torch.testing.assert_close(row, own * scale * weight, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("impl", ["aten", "reference"])
@pytest.mark.parametrize(
    "case",
    [
        NormCase(),
        NormCase(passed=False),
        NormCase(added=FP32),
        NormCase(added=BF16, out=BF16),
        NormCase(stream=BF16, weight=BF16, added=BF16),
    ],
    ids=str,
)
def test_all_gradients_against_fp64(impl, case):
    check_norm(impl, case)


def test_torch_is_chosen_on_a_cpu_and_gives_its_own_bits():
    x, weight, _, _ = norm_inputs(NormCase())
    if not torch.cuda.is_available():
        assert norm_op.choose("auto", x, weight) == "aten"
    normed, stream = norm_op.rms_norm("aten", x, weight, EPS)
    assert stream is x
    assert torch.equal(normed, torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS))


def test_mixed_dtypes_are_left_to_the_definition():
    x, weight, _, _ = norm_inputs(NormCase(stream=BF16))
    assert norm_op.choose("auto", x, weight) == "reference"
    with pytest.raises(Unsupported, match="needs one dtype"):
        norm_op.choose("aten", x, weight)


@needs_no_gpu
def test_without_a_gpu_triton_is_refused():
    x, weight, _, _ = norm_inputs(NormCase())
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        norm_op.choose("triton_norm", x, weight)
    qkv, angles = torch.zeros(1, 2, 3, 1, 4), torch.zeros(2, 2)
    assert rotary_op.choose("auto", qkv, angles) == "reference"
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        rotary_op.choose("triton_rotary", qkv, angles)


def test_inputs_that_triton_cannot_take_have_reasons():
    from steplab.kernels.rms_norm import triton_norm

    weight = torch.ones(8)
    assert "float64" in triton_norm.refuse(torch.ones(2, 8).double(), weight)
    assert "at most" in triton_norm.refuse(torch.ones(1, 20_000), torch.ones(20_000))
    # A broadcast is the reference's: the kernel would read beyond the end.
    assert "as wide" in triton_norm.refuse(torch.ones(2, 8), torch.ones(1))
    assert "of the shape" in triton_norm.refuse(torch.ones(2, 8), weight, torch.ones(8))
    from steplab.kernels.rotary import triton_rotary

    qkv = torch.zeros(3, 2, 3, 1, 4)
    for shape in ((1, 2), (2, 4), (2, 1, 2, 2), (3, 1, 1, 2)):
        assert "needs angles of" in triton_rotary.refuse(qkv, torch.zeros(shape))
    many = torch.zeros(1, 2, 3, 1, 4).expand(65_536, -1, -1, -1, -1)
    assert "a batch of at most 65535" in triton_rotary.refuse(many, torch.zeros(2, 2))
    assert "head width" in triton_rotary.refuse(torch.zeros(1, 1, 3, 1, 1024), torch.zeros(1, 512))
    assert "angles" in triton_rotary.refuse(torch.zeros(1, 1, 3, 1, 4), torch.zeros(1, 2).double())


def test_counted_flops_are_complete_beside_these_ops():
    from steplab.probes.formulas import own_formula

    names = ("rms_norm", "add_rms_norm", "rms_norm_backward", "rotary", "rotary_backward")
    assert all(own_formula(name) for name in names)


def test_the_module_takes_the_place_of_torchs():
    """The same name of the parameter, the same bits, and the products' dtype under autocast."""
    own, theirs = RMSNorm(16, EPS), torch.nn.RMSNorm(16, eps=EPS)
    theirs.weight.data.normal_()
    own.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 16)
    normed, stream = own(x)
    assert torch.equal(normed, theirs(x)) and stream is x
    with torch.autocast("cpu", dtype=BF16):
        normed, stream = own(x, x.to(BF16))
    assert normed.dtype == BF16 and stream.dtype == FP32
    assert own.ran == norm_op.choose("auto", x, own.weight)


def test_heads_are_those_of_separate_rotations():
    """Bit for bit, at positions from 0 and at given ones."""
    rotary = Rotary(8, 32, 100.0)
    heads = RotaryHeads(rotary, 3)
    qkv = torch.randn(2, 5, 72)
    parts = [part.unflatten(-1, (3, 8)).transpose(1, 2) for part in qkv.chunk(3, -1)]
    for angles in (None, rotary.angles(torch.randint(32, (2, 5)))):
        q, k, v = heads(qkv, angles)
        assert torch.equal(q, rotary(parts[0], angles)) and torch.equal(k, rotary(parts[1], angles))
        assert torch.equal(v, parts[2])
    assert heads.ran == "reference" and not heads.state_dict()
