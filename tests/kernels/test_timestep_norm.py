"""The timestep norm in Triton: in its interpreter on CPU, ahead of time for sm_90, and on a GPU."""

from dataclasses import dataclass, replace

import pytest
import torch

from steplab.core.errors import Unsupported
from steplab.kernels import timestep_norm as op
from steplab.kernels.timestep_norm import Affine, Statistics
from steplab.workloads.megalodon.layers import TimestepNorm
from tests.kernels.case import Named
from tests.kernels.mismatch import assert_sequences
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-5
ROUNDING = torch.finfo(FP32).eps


@dataclass(frozen=True)
class Case(Named):
    """One shape; `offset` is added to the input, `before` tokens have been counted already."""

    batch: int = 1
    length: int = 9
    width: int = 12
    groups: int = 3
    offset: float = 0.0
    before: bool = False
    keeps: bool = False
    dtype: torch.dtype = FP32
    weights: torch.dtype = FP32
    out: torch.dtype | None = None


@dataclass(frozen=True)
class Inputs:
    """Tensors that have a gradient by name, and the gradients of y and the last statistics."""

    leaves: dict[str, torch.Tensor]
    count: torch.Tensor
    dy: torch.Tensor
    dlast: tuple[torch.Tensor, torch.Tensor]

    def double(self):
        wide = {name: x.double() for name, x in self.leaves.items()}
        return Inputs(wide, self.count, self.dy.double(), tuple(d.double() for d in self.dlast))


def make(case, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=FP32):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    B, L, D, G = case.batch, case.length, case.width, case.groups
    leaves = {"x": (2 * normal(B, L, D) + normal(D) + case.offset).to(case.dtype)}
    leaves |= {"weight": normal(D, dtype=case.weights), "bias": normal(D, dtype=case.weights)}
    if case.before:
        leaves |= {"mean": normal(B, G) + case.offset, "variance": 1 + normal(B, G).square()}
    count = torch.arange(1, B + 1, device=device) * 5
    dlast = normal(B, G), normal(B, G)
    return Inputs(leaves, count, normal(B, L, D, dtype=case.out or case.dtype), dlast)


def run(impl, case, inputs):
    """Return y, the last mean and variance, and the leaves that they come from."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.leaves.items()}
    affine = Affine(leaves["weight"], leaves["bias"], case.groups, EPS)
    before = None
    if case.before:
        before = Statistics(inputs.count, leaves["mean"], leaves["variance"])
    out = case.out if leaves["x"].dtype != torch.float64 else None
    y, last = op.timestep_norm(impl, leaves["x"], affine, before, None, case.keeps, out)
    return y, last, leaves


def results(impl, case, inputs):
    """Return outputs and all gradients by name."""
    y, last, leaves = run(impl, case, inputs)
    outputs, upstream, found = [y], [inputs.dy], {"y": y.detach()}
    if case.keeps:
        outputs += last[1:]
        upstream += inputs.dlast
        found |= {"last mean": last.mean_BG.detach(), "last variance": last.variance_BG.detach()}
        start = inputs.count if case.before else 0 * inputs.count
        assert torch.equal(last.count_B, start + case.length)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    return found | {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}


def check(case, device="cpu"):
    """As near to fp64 as twice the definition in the same dtype, one rounding, and four of fp32.

    The saved means are rounded to fp32, which counts by what they are of a deviation.
    """
    inputs = make(case, device)
    actual, peer = (results(impl, case, inputs) for impl in ("triton_running", "reference"))
    truth = results("reference", case, inputs.double())
    assert_sequences(actual, peer, truth, case, (4 + abs(case.offset)) * ROUNDING)


CASES = [
    Case(),
    Case(length=1),
    Case(length=1, before=True, keeps=True),
    Case(batch=2, length=21, before=True, keeps=True),
    Case(length=45, width=6, keeps=True),  # more tiles than chunks
    Case(length=21, width=8, groups=1),
    Case(length=17, width=5, groups=5, offset=100.0, before=True),
    Case(batch=2, length=20, width=20, groups=4, dtype=BF16, weights=BF16, before=True, keeps=True),
    Case(length=20, dtype=FP32, out=BF16),
    Case(length=11, dtype=FP16),
]


def test_far_from_zero_the_definition_keeps_its_digits():
    """Rounding the mean to fp32 before it is subtracted would cost 5e-4 at 1e4."""
    case = Case(length=45, offset=1e4)
    inputs = make(case)
    found, truth = (results("reference", case, x) for x in (inputs, inputs.double()))
    torch.testing.assert_close(found["y"].double(), truth["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
class Interpreted:
    """A tile has 32 numbers, and time is cut into 4 chunks at most."""

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_it_equals_the_definition(self, case):
        check(case)

    def test_two_pieces_equal_one(self):
        inputs = make(Case(batch=2, length=23))
        affine = Affine(inputs.leaves["weight"], inputs.leaves["bias"], 3, EPS)
        x = inputs.leaves["x"]
        whole, end = op.timestep_norm("triton_running", x, affine, keeps=True)
        for cut in (1, 8, 22):
            left, state = op.timestep_norm("triton_running", x[:, :cut], affine, keeps=True)
            right, last = op.timestep_norm("triton_running", x[:, cut:], affine, state, keeps=True)
            torch.testing.assert_close(torch.cat([left, right], 1), whole, rtol=2e-5, atol=2e-5)
            for found, expected in zip(last, end, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    def test_no_token(self):
        inputs = make(Case())
        affine = Affine(inputs.leaves["weight"], inputs.leaves["bias"], 3, EPS)
        y, last = op.timestep_norm("triton_running", inputs.leaves["x"][:, :0], affine, keeps=True)
        assert y.shape == (1, 0, 12) and last.count_B.tolist() == [0]

    def test_a_mask_goes_to_the_definition(self):
        """Also where the kernels could run; garbage under the mask reaches no gradient."""
        norm, x = TimestepNorm(12, 3, EPS), make(Case()).leaves["x"]
        valid = torch.ones(1, 9, dtype=torch.bool)
        valid[0, 6:] = False
        spoiled = torch.where(valid[..., None], x, torch.nan).requires_grad_()
        y, last = norm(spoiled, None, valid, True)
        assert norm.ran == "reference" and last.count_B.tolist() == [6]
        alone, _ = norm(x[:, :6])
        assert norm.ran == "triton_running"
        torch.testing.assert_close(y[:, :6], alone, rtol=2e-5, atol=2e-5)
        gradients = torch.autograd.grad(y.square().sum(), [spoiled, norm.weight, norm.bias])
        assert not y[:, 6:].any() and all(d.isfinite().all() for d in gradients)

    def test_any_strides_and_expanded_gradients(self):
        case = Case()
        inputs = make(case)
        turned = inputs.leaves["x"].transpose(1, 2).contiguous().transpose(1, 2)
        dy = torch.ones(()).expand(inputs.dy.shape)
        strided = replace(inputs, leaves={**inputs.leaves, "x": turned}, dy=dy)
        found = results("triton_running", case, strided)
        plain = results("triton_running", case, replace(inputs, dy=dy.contiguous()))
        assert all(torch.equal(found[name], plain[name]) for name in plain)

    @pytest.mark.parametrize("kept", [True, False])
    def test_a_gradient_of_one_output_alone(self, kept):
        case = Case(before=True, keeps=True)
        inputs = make(case)

        def gradients(impl):
            y, last, leaves = run(impl, case, inputs)
            out = last.variance_BG if kept else y
            d = inputs.dlast[1] if kept else inputs.dy
            wanted = [leaves[name] for name in ("x", "mean", "variance")]
            return torch.autograd.grad(out, wanted, d)

        for found, expected in zip(
            gradients("triton_running"), gradients("reference"), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def test_nothing_is_kept_but_what_the_gradients_need(self):
        """The input, the weight, and two numbers per token and group."""
        inputs = make(Case(batch=2))
        affine = Affine(inputs.leaves["weight"], inputs.leaves["bias"], 3, EPS)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            op.timestep_norm("triton_running", inputs.leaves["x"].requires_grad_(), affine)
        assert sum(x.numel() for x in kept) == 2 * 9 * 12 + 12 + 2 * 2 * 9 * 3

    def test_compiled_it_is_one_graph_with_the_same_bits(self):
        case = Case(batch=2, length=13, before=True, keeps=True)
        inputs = make(case)
        eager = results("triton_running", case, inputs)
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.leaves.items()}

        def call(x, weight, bias, mean, variance):
            affine, before = Affine(weight, bias, 3, EPS), Statistics(inputs.count, mean, variance)
            impl = op.choose("auto", x, affine, before)
            return op.timestep_norm(impl, x, affine, before, None, True)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        y, last = compiled(*leaves.values())
        gradients = torch.autograd.grad(
            [y, *last[1:]], list(leaves.values()), [inputs.dy, *inputs.dlast]
        )
        assert torch.equal(y, eager["y"]) and torch.equal(last.mean_BG, eager["last mean"])
        for name, found in zip(leaves, gradients, strict=True):
            assert torch.equal(found, eager[f"d_{name}"])

    def test_the_ops_are_registered_as_torch_wants_them(self):
        leaves = [x.requires_grad_() for x in make(Case(length=6)).leaves.values()]
        rest = (3, EPS, None, None, None, False, FP32)
        torch.library.opcheck(torch.ops.steplab.timestep_norm.default, (*leaves, *rest))


LAUNCHES = """
from steplab.kernels.timestep_norm import triton_running as launch

def run(B, L, D, G, has_prior, dtype):
    x, weight = torch.empty(B, L, D, dtype=dtype), torch.empty(D)
    stats = torch.empty(B, dtype=torch.int64), torch.empty(B, G), torch.empty(B, G)
    prior = stats if has_prior else None
    *_, means, rstds = launch.launch_forward(x, (weight, weight, G, 1e-5), prior, has_prior, dtype)
    last = stats[1:] if has_prior else None
    launch.launch_backward(x, last, (x, weight, means, rstds), stats[:2] if has_prior else None)

run(4, 4096, 1024, 32, False, torch.bfloat16)
run(1, 1, 1024, 32, True, torch.bfloat16)
run(2, 100, 384, 32, True, torch.float32)
for kernel in kernels:
    assert len(kernel.asm["cubin"]) > 0 and kernel.metadata.shared < 64 * 1024
print(len(kernels), "kernels")
"""


@needs_no_gpu
def test_the_kernels_compile_for_hopper():
    pytest.importorskip("triton")
    assert compile_for_hopper(LAUNCHES) == "11 kernels"


@needs_no_gpu
def test_what_it_refuses():
    x, weight = torch.zeros(1, 4, 12), torch.zeros(12)
    affine = Affine(weight, weight, 3, EPS)
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        op.choose("triton_running", x, affine)
    with pytest.raises(Unsupported, match="takes no invalid tokens"):
        op.choose("triton_running", x, affine, None, torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(Unsupported, match="fp16, bf16 or fp32"):
        op.choose("triton_running", x.double(), affine)
    assert op.choose("auto", x, affine) == "reference"


GPU_CASES = [
    Case(batch=2, length=700, width=1024, groups=32, before=True, keeps=True),
    Case(batch=1, length=5000, width=96, groups=8, offset=10.0),
    Case(length=1, width=384, groups=32, before=True, keeps=True),
    Case(batch=3, length=33, width=60, groups=5, keeps=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_equals_the_definition(case, dtype):
    check(replace(case, dtype=dtype), "cuda")


@pytest.mark.gpu
def test_gpu_repeats_its_bits():
    case = Case(batch=2, length=700, width=1024, groups=32, dtype=BF16)
    inputs = make(case, "cuda")
    first, again = (results("triton_running", case, inputs) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
