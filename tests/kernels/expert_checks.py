"""Compares the activation and the router in Triton with their definitions in fp64."""

from functools import partial
from typing import NamedTuple

import torch

from steplab.kernels import activation as activation_op
from steplab.kernels import router as router_op
from steplab.testing.tolerance import assert_as_good_as, relative_error

GELU_ERROR = 6e-6  # of its value: the approximation's 4.7e-6, and roundings


def wide_rows(rows, inner, activation, dtype, device="cpu"):
    """Return z, dh and the weights of the rows, which are in another order."""
    generator = torch.Generator().manual_seed(rows)
    columns = 2 * inner if activation == "swiglu" else inner
    z, dh = (
        torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (columns, inner)
    )
    source = torch.randperm(rows, generator=generator).to(device, torch.int32)
    values = torch.rand(rows, generator=generator).to(device)
    return (2 * z).to(device, dtype), dh.to(device, dtype), activation_op.RowWeights(values, source)


def activation_results(impl, z, dh, activation, weights):
    h = activation_op.forward(impl, z, activation, weights)
    dz, again, dweights = activation_op.backward(impl, z, dh.clone(), activation, weights)
    return [h, dz, again, *([] if dweights is None else [dweights])]


def check_activation(rows, inner, activation, dtype, weighted, device="cpu"):
    """Compare the kernels with the definition in fp64."""
    z, dh, weights = wide_rows(rows, inner, activation, dtype, device)
    exact = activation_op.RowWeights(weights.values_R.double(), weights.source_R)
    weights, exact = (weights, exact) if weighted else (None, None)
    found = activation_results("triton_rows", z, dh, activation, weights)
    peer = activation_results("reference", z, dh, activation, weights)
    truth = activation_results("reference", z.double(), dh.double(), activation, exact)
    label = f"of {rows} rows of {inner}, {activation}"
    for name, a, p, t in zip(("h", "dz", "h again"), found, peer, truth, strict=False):
        assert_as_good_as(a, p, t, f"{name} {label}")
    if device == "cpu":  # a GPU's compiler may round other steps of the two kernels together
        assert torch.equal(found[0], found[2])
    if weighted:
        h = activation_op.forward("reference", z.double(), activation)
        sizes = torch.empty(rows, dtype=torch.float64, device=device)
        sizes[exact.source_R.long()] = (dh.double() * h).abs().sum(1)
        error = (found[3] - truth[3]).abs()
        assert bool((error <= GELU_ERROR * sizes).all()), f"dweights {label}: {error} of {sizes}"


class Routed(NamedTuple):
    """What a router gave, and the gradients of what it got."""

    probabilities: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    gate: torch.Tensor
    dx: torch.Tensor
    dweight: torch.Tensor
    dgate: torch.Tensor


def routed(run, leaves, slopes):
    """Return what `run` gives for x, weight and gate; slopes are of its outputs but the experts."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    probabilities, weights, experts, gate = run(*leaves)
    gradients = torch.autograd.grad((probabilities, weights, gate), leaves, slopes)
    return Routed(probabilities.detach(), weights.detach(), experts, gate.detach(), *gradients)


def check_router(tokens, experts, width, chosen, device="cpu", dtypes=(torch.float32,) * 2):
    """Compare with the definition in fp64; `dtypes` are the weight's and the gate's.

    Chosen experts may differ where fp64 ties.
    """
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    rows = ((draw(n, width) * width**-0.5).to(d) for n, d in zip((experts, 1), dtypes, strict=True))
    leaves = draw(tokens, width).bfloat16(), *rows
    slopes = [draw(tokens, columns).float() for columns in (experts, chosen, 1)]
    kernel, reference = (
        partial(router_op.router, impl, chosen=chosen) for impl in ("triton_router", "reference")
    )
    found, peer = (routed(run, leaves, slopes) for run in (kernel, reference))
    exact = [t.double() for t in leaves]
    truth = routed(reference, exact, [s.double() for s in slopes])
    assert all(a.dtype == p.dtype and a.shape == p.shape for a, p in zip(found, peer, strict=True))
    assert torch.equal(found.experts, truth.experts)
    # A sum of `width` products in fp32 is off by the root of so many roundings of the sum of their
    # sizes; four times that is never seen. A probability is off by as much as its logit. RowWeights
    # rounded to bf16 would be off ten times further.
    unit, sizes = 2.0**-24, (exact[0].abs() @ torch.cat(exact[1:]).abs().T).max()
    bound = 4 * float(width**0.5 * unit * sizes) + 8 * unit
    for name in ("probabilities", "weights", "gate"):
        error = (getattr(found, name) - getattr(truth, name)).abs().amax(1)
        assert float(error.max()) <= bound, f"{name} of token {int(error.argmax())}: {error.max()}"
    assert_as_good_as(found.dx, peer.dx, truth.dx, "dx")
    for name, dtype in zip(("dweight", "dgate"), dtypes, strict=True):
        expected = getattr(truth, name)
        rounding = relative_error(expected.to(dtype), expected)
        assert relative_error(getattr(found, name), expected) <= bound + rounding, name
