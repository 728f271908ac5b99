"""Norm, rotation and update in Triton: interpreted, compiled for sm_90, and on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.kernels import rms_norm as norm_op
from tests.kernels.norm_cases import (
    BF16,
    EPS,
    FP16,
    FP32,
    NormCase,
    check_norm,
    check_rotary,
    check_shared_angles,
    norm_inputs,
    norm_results,
    rotary_inputs,
    rotary_results,
)
from tests.kernels.triton_on_cpu import ROW_PASSES, compile_for_hopper, needs_no_gpu
from tests.kernels.update_cases import check_update

pytest.importorskip("triton")
NARROW = NormCase(stream=BF16, weight=BF16, added=BF16)
NORM_CASES = [
    NormCase(),
    NormCase(passed=False),
    NormCase(added=FP32),
    NormCase(added=BF16, out=BF16),
    NormCase(out=BF16),
    NARROW,
    NormCase(stream=BF16, weight=BF16, passed=False),
    NormCase(stream=FP16, added=FP16, out=FP16),
]


def compiled(run, *inputs):
    return torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)


class Interpreted:
    """Tiles are 4 rows forward and 2 backward, with 2 programs; 16 pairs; 128 weights."""

    @pytest.mark.parametrize("case", NORM_CASES, ids=str)
    def test_the_norm_equals_its_definition(self, case):
        check_norm("triton_norm", case)

    @settings(max_examples=5)
    @given(st.integers(1, 11), st.integers(1, 40), st.sampled_from([None, FP32, BF16]))
    def test_a_norm_of_any_shape_equals_its_definition(self, rows, width, added):
        check_norm("triton_norm", NormCase((rows,), width, added=added))

    @pytest.mark.parametrize("shape", [(1, 5), (9, 3, 7), (4, 40)], ids=str)
    def test_what_the_programs_found_is_added_up(self, shape):
        from steplab.kernels.triton_blocks import column_sums

        partial = torch.randn(shape)
        torch.testing.assert_close(column_sums(partial), partial.sum(0))

    def test_a_norm_of_no_rows(self):
        x, weight, _, _ = norm_inputs(NormCase())
        leaves = x[:0].requires_grad_(), weight.requires_grad_()
        normed, stream = norm_op.rms_norm("triton_norm", *leaves, EPS)
        assert normed.shape == stream.shape == (0, 5, 24)
        (dweight,) = torch.autograd.grad(normed.sum(), [weight])
        assert not dweight.any()

    def test_a_weight_may_have_any_stride(self):
        case = NormCase()
        x, weight, added, gradients = norm_inputs(case)
        strided = torch.stack([weight, -weight], 1)[:, 0]
        found = norm_results("triton_norm", case, x, strided, added, gradients)
        expected = norm_results("triton_norm", case, x, weight, added, gradients)
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    def test_only_the_stream_may_be_used(self):
        x, weight, added, gradients = norm_inputs(NARROW)
        leaves = [t.requires_grad_() for t in (x, weight, added)]
        _, stream = norm_op.rms_norm("triton_norm", x, weight, EPS, added)
        found = torch.autograd.grad(stream, leaves, gradients[1], allow_unused=True)
        assert torch.equal(found[0], gradients[1]) and torch.equal(found[2], gradients[1])
        assert found[1] is None

    def test_what_the_norm_saves(self):
        """The stream, the weight and one number per row; not x, not what was added."""
        x, weight, added, _ = norm_inputs(NARROW)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            _, stream = norm_op.rms_norm("triton_norm", x, weight.requires_grad_(), EPS, added)
        sizes = sorted(t.numel() for t in saved)
        assert sizes == sorted([stream.numel(), weight.numel(), stream.numel() // 24])
        assert any(t.data_ptr() == stream.data_ptr() for t in saved)

    @pytest.mark.parametrize("case", [NormCase(out=BF16), NARROW], ids=str)
    def test_a_compiled_norm_is_one_graph_with_the_same_bits(self, case):
        x, weight, added, gradients = norm_inputs(case)
        eager = norm_results("triton_norm", case, x, weight, added, gradients)
        leaves = [t.detach().requires_grad_() for t in (x, weight, added) if t is not None]

        def block(x, weight, *added):
            name = norm_op.choose("triton_norm", x, weight, *added)
            return norm_op.rms_norm(name, x, weight, EPS, *(added or [None]), case.out)

        out = compiled(block, *leaves)
        found = [*out, *torch.autograd.grad(out, leaves, gradients)]
        assert all(torch.equal(a, b) for a, b in zip(eager.values(), found, strict=True))

    def test_the_ops_are_registered_as_torch_wants_them(self):
        x, weight, added, gradients = norm_inputs(NARROW)
        ops, rstd = torch.ops.steplab, torch.ones(3, 5)
        torch.library.opcheck(ops.rms_norm.default, (x, weight, EPS, FP32))
        torch.library.opcheck(ops.add_rms_norm.default, (x, added, weight, EPS, None))
        backward = (gradients[0], None, x, weight, rstd)
        torch.library.opcheck(ops.rms_norm_backward.default, backward)
        qkv, cos, sin, gradients = rotary_inputs(1, 3, 2, 4, FP32, False)
        torch.library.opcheck(ops.rotary.default, (qkv, cos, sin))
        torch.library.opcheck(ops.rotary_backward.default, (*gradients, cos, sin))

    @pytest.mark.parametrize(
        "shape",
        [(2, 5, 3, 12, FP32, False), (2, 7, 2, 16, FP32, True), (1, 4, 3, 8, BF16, False)],
        ids=str,
    )
    def test_the_rotation_equals_its_definition(self, shape):
        check_rotary("triton_rotary", *shape)

    def test_one_row_of_angles_serves_the_whole_batch(self):
        check_shared_angles()

    def test_a_compiled_rotation_is_one_graph_with_the_same_bits(self):
        from steplab.kernels import rotary as op

        qkv, cos, sin, gradients = rotary_inputs(2, 3, 2, 8, BF16, False)
        eager = rotary_results("triton_rotary", qkv, cos, sin, gradients)
        leaf = qkv.detach().requires_grad_()
        out = compiled(
            lambda *x: op.rotary(op.choose("triton_rotary", x[0], x[1]), *x), leaf, cos, sin
        )
        found = [*out, *torch.autograd.grad(out, [leaf], gradients)]
        assert all(torch.equal(a, b) for a, b in zip(eager.values(), found, strict=True))

    @pytest.mark.parametrize("clipped", [False, True])
    @pytest.mark.parametrize(("param", "grad"), [(FP32, FP32), (FP32, BF16), (BF16, BF16)])
    @pytest.mark.parametrize("size", [1, 300])
    def test_the_update_equals_its_definition(self, param, grad, size, clipped):
        check_update("triton_update", param, grad, size, clipped)


LAUNCHES = """
from steplab.kernels.adamw import Hyperparameters, ParameterState
from steplab.kernels.adamw import triton_update
from steplab.kernels.rms_norm import triton_norm as norm
from steplab.kernels.rotary import triton_rotary as rotary

def bf16(*shape): return torch.empty(shape, dtype=torch.bfloat16)
for width in (768, 8192):
    x, weight = bf16(64, width), bf16(width)
    normed, stream, rstd = norm.launch_forward(x, x, weight, 1e-6, None)
    norm.launch_backward(x, x, stream, weight, rstd)
angles = torch.empty(64, 32)
rotary.launch_rotation(bf16(2, 64, 3, 12, 64)[:, :, 1], bf16(2, 64, 12, 64), angles, angles)
states = (torch.empty(4096) for _ in range(3))
weight = ParameterState(bf16(4096), next(states), bf16(4096), *states, torch.zeros(()))
rate = torch.zeros((), dtype=torch.float64)
triton_update.update(weight, Hyperparameters(0.9, 0.95, 1e-8, 0.1), rate, torch.ones(()))
"""


@needs_no_gpu
def test_the_kernels_compile_for_hopper():
    assert compile_for_hopper(LAUNCHES + ROW_PASSES) == "8 kernels"


GPU_NORMS = [
    NormCase((2048,), 768, BF16, BF16, BF16),
    NormCase((2048,), 768, FP32, FP32, BF16, BF16),
    NormCase((333,), 384, BF16, FP32),
    NormCase((7, 9), 100, FP32, FP32, FP32),
    NormCase((65,), 4096, BF16, BF16, BF16),
    NormCase((33,), 8192, FP32, FP32, FP32),
    NormCase((200,), 1, FP32, FP32),
    NormCase((50,), 2560, FP16, FP16, FP16, passed=False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_NORMS, ids=str)
def test_gpu_norm_equals_its_definition(case):
    check_norm("triton_norm", case, "cuda")


@pytest.mark.gpu
def test_gpu_norm_repeats_its_bits():
    case = NormCase((5000,), 768, BF16, BF16, BF16)
    inputs = norm_inputs(case, "cuda")
    first, again = (norm_results("triton_norm", case, *inputs) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("shape", [(2, 300, 12, 64), (1, 77, 3, 128), (3, 50, 2, 24)], ids=str)
@pytest.mark.parametrize("own_positions", [False, True])
def test_gpu_rotation_equals_its_definition(shape, dtype, own_positions):
    check_rotary("triton_rotary", *shape, dtype, own_positions, device="cuda")


@pytest.mark.gpu
def test_gpu_one_row_of_angles_serves_the_whole_batch():
    check_shared_angles("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(("param", "grad"), [(FP32, FP32), (FP32, BF16), (BF16, BF16)])
@pytest.mark.parametrize("size", [1, 1_000_003])
def test_gpu_update_equals_its_definition(param, grad, size, clipped):
    check_update("triton_update", param, grad, size, clipped, device="cuda")


@pytest.mark.gpu
def test_gpu_norm_and_rotation_compile_to_one_graph():
    from steplab.modules.norms import RMSNorm
    from steplab.modules.rotary import Rotary, RotaryHeads

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv = RMSNorm(64, EPS), torch.nn.Linear(64, 192)
            self.heads = RotaryHeads(Rotary(16, 32, 100.0), 4)

        def forward(self, x):
            normed, x = self.norm(x)
            return x + sum(self.heads(self.qkv(normed))).transpose(1, 2).flatten(-2)

    block = Block().to("cuda", BF16)
    block.heads.table.float()
    x = torch.randn(2, 32, 64, device="cuda", dtype=BF16, requires_grad=True)
    outs = []
    for run in (block, torch.compile(block, fullgraph=True)):
        out = run(x)
        outs.append([out, *torch.autograd.grad(out.float().square().sum(), [x])])
    assert (block.norm.ran, block.heads.ran) == ("triton_norm", "triton_rotary")
    for a, b in zip(*outs, strict=True):
        # The compiler leaves out roundings between ops: as a whole a few of 2^-9 each.
        assert (a.float() - b.float()).norm() <= 2**-7 * b.float().norm()
