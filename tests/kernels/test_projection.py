"""A projection in e4m3: against fp64 products of the same rounded factors; its weight gradient,
which is not rounded, against fp64 itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import Unsupported
from steplab.costs.own_ops import find_own_op
from steplab.kernels import projection as projection_op
from steplab.kernels.e4m3 import E4M3_MAX, rounded_to_e4m3
from steplab.modules.fp8 import PROJECTION_LAYER, EmulatedProduct
from steplab.modules.projection import Projection
from tests.kernels.triton_on_cpu import needs_no_gpu

BF16_ROUNDING = 2.0**-8


def make(rows, width, outputs, dtype=torch.float64, seed=0, sigma=1.0, device="cpu"):
    """Return x, w, bias and the gradient of the output; rows differ in size."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    x, dout = (draw(rows, n) * (sigma * draw(rows, 1)).exp() for n in (width, outputs))
    inputs = (x, draw(outputs, width) * width**-0.5, draw(outputs), dout)
    return [t.to(device, dtype) for t in inputs]


def results(impl, x, w, bias, dout):
    """Return out, dx, dw and dbias."""
    leaves = [t.detach().requires_grad_() for t in (x, w, bias)]
    out = projection_op.projection(impl, *leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def by_definition(x, w, bias, dout):
    """The same in fp64, written out; `dw` and `dbias` of what was not rounded."""
    x, w, bias, dout = (t.double() for t in (x, w, bias, dout))
    out = rounded_to_e4m3(x, 1) @ rounded_to_e4m3(w, 1).T + bias
    dx = rounded_to_e4m3(dout, 1) @ rounded_to_e4m3(w, 0)
    return out, dx, dout.T @ x, dout.sum(0)


def off(found, true):
    distance = (found.double() - true).norm()
    return float(distance / true.norm()) if true.norm() else float(distance)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([0, 1, 3, 16, 65]),
    st.sampled_from([16, 48]),
    st.sampled_from([16, 96]),
    st.sampled_from([0.0, 2.0, 10.0]),
    st.integers(0, 999),
)
def test_it_multiplies_the_rounded_factors(rows, width, outputs, sigma, seed):
    inputs = make(rows, width, outputs, seed=seed, sigma=sigma)
    for found, true in zip(results("fp8", *inputs), by_definition(*inputs), strict=True):
        assert found.shape == true.shape and off(found, true) < 1e-12
    narrow = [t.bfloat16() for t in inputs]
    for found, true in zip(results("fp8", *narrow), by_definition(*narrow), strict=True):
        assert torch.isfinite(found).all() and off(found, true) < BF16_ROUNDING


def test_it_is_off_by_what_eight_bits_cost_and_its_weight_gradient_is_not():
    inputs = make(256, 128, 192)
    truth = results("reference", *inputs)
    out, dx, dw, dbias = (off(a, b) for a, b in zip(results("fp8", *inputs), truth, strict=True))
    assert 0.02 < out < 0.045 and 0.02 < dx < 0.045
    assert dw < 1e-12 and dbias < 1e-12


def test_a_nan_stays_in_its_row_and_what_is_too_large_saturates():
    x, w, bias, dout = make(8, 32, 48, torch.bfloat16)
    plain = results("fp8", x, w, bias, dout)[0]
    x[3, 5] = torch.nan
    assert results("fp8", x, w, bias, dout)[0].isnan().any(1).nonzero().flatten().tolist() == [3]
    x[3, 5] = torch.inf
    dout[2, 1] = 1e38
    out, dx, *_ = results("fp8", x, w, bias, dout)
    assert not out.isnan().any() and not dx.isnan().any()
    others = torch.arange(8) != 3
    assert torch.equal(out[others], plain[others])
    x[3] = 4 * E4M3_MAX  # above the largest number of the format: its scale makes it fit
    found, true = results("fp8", x, w, bias, dout)[0], by_definition(x, w, bias, dout)[0]
    assert off(found, true) < BF16_ROUNDING


def test_the_ops_are_registered_as_torch_wants_them():
    x, w, bias, _ = make(16, 32, 48)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for last in (leaves[2], None):
        arguments = (*leaves[:2], last)
        torch.library.opcheck(torch.ops.steplab.projection_fp8, arguments, test_utils=checks)
    assert find_own_op("projection_fp8").flops and find_own_op("projection_fp8_backward").flops


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_what_is_frozen_gets_no_gradient(frozen):
    x, w, bias, dout = make(16, 32, 48)
    wanted = {"x": w, "w": x}[frozen].requires_grad_()
    out = projection_op.projection("fp8", x, w, bias)
    (found,) = torch.autograd.grad(out, [wanted], dout)
    dx, dw = by_definition(x.detach(), w.detach(), bias, dout)[1:3]
    assert off(found, dx if wanted is x else dw) < 1e-12


def test_compiled_it_is_one_graph_with_the_same_bits():
    inputs = make(32, 32, 48, torch.bfloat16)

    def both(x, w, bias):
        return projection_op.projection("fp8", x.view(2, 16, 32), w, bias)

    found = []
    for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        leaves = [t.detach().requires_grad_() for t in inputs[:3]]
        out = function(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, inputs[3].view_as(out))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_module_is_an_nn_linear_with_the_same_bits(bias, autocast):
    torch.manual_seed(0)
    linear, ours = torch.nn.Linear(24, 32, bias), Projection(24, 32, bias)
    ours.load_state_dict(linear.state_dict())
    x = torch.randn(2, 5, 24)
    found = []
    for module in (linear, ours):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = module(leaf)
        grads = torch.autograd.grad(out.float().square().sum(), [leaf, *module.parameters()])
        found.append([out, *grads])
    assert ours.ran == "reference"
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_no_gpu
def test_without_a_gpu_it_is_refused_and_auto_never_takes_it(monkeypatch):
    x, w = make(16, 32, 48, torch.bfloat16)[:2]
    assert projection_op.choose("auto", x, w) == "reference"
    with pytest.raises(Unsupported, match="projection 'fp8' needs an NVIDIA GPU"):
        projection_op.choose("fp8", x, w)
    monkeypatch.setattr(projection_op.IMPLS["fp8"], "refuse_device", lambda x: "")
    assert projection_op.choose("fp8", x, w) == "fp8"
    with pytest.raises(Unsupported, match="multiples of 16, not 32 and 40"):
        projection_op.choose("fp8", x, w[:40])
    with pytest.raises(Unsupported, match="needs bf16"):
        projection_op.choose("fp8", x.float(), w)


class Interpreted:
    """The Triton passes round as the definition does."""

    def test_the_passes_are_those_of_the_definition(self):
        inputs = make(24, 48, 80, torch.bfloat16, sigma=2.0)
        for found, true in zip(results("fp8", *inputs), by_definition(*inputs), strict=True):
            assert off(found, true) < BF16_ROUNDING


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 24, 4096])
def test_gpu_products_are_those_of_the_rounded_factors(rows):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")
    inputs = make(rows, 768, 2304, torch.bfloat16, sigma=1.5, device="cuda")
    found = results("fp8", *inputs)
    leaves = [t.double().requires_grad_() for t in inputs[:2]]
    out = EmulatedProduct.apply(*leaves, PROJECTION_LAYER)
    gradients = torch.autograd.grad(out, leaves, inputs[3].double())
    truth = (out.detach() + inputs[2].double(), *gradients)
    for a, t in zip(found[:3], truth, strict=True):
        assert off(a, t) < BF16_ROUNDING
