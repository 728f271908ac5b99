"""Inputs for tests of expert layers, and the gradients of any implementation."""

from dataclasses import dataclass

import torch

from steplab.kernels import experts as experts_op
from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels import grouped_mm as grouped_mm_op
from tests.kernels.case import Named

NAMES = ("out", "dx", "dweights", "dw_in", "dw_out")
ROUTINGS = ("balanced", "skewed", "one expert", "last only")


class Products:
    """The grouped product that `auto` chooses, as a module would offer it."""

    def choose(self, x, w):
        return grouped_mm_op.choose("auto", x, w)

    def __call__(self, x, w, offsets):
        return grouped_mm_op.grouped_mm(self.choose(x, w), x, w, offsets)


@dataclass(frozen=True)
class Case(Named):
    """One shape; `routing` says how the tokens spread."""

    routing: str = "skewed"
    activation: str = "gelu"
    tokens: int = 40
    chosen: int = 2
    experts: int = 4
    width: int = 16
    inner: int = 24
    dtype: torch.dtype = torch.float64


def route(case: Case, generator=None):
    """Return experts_TK; an expert may be chosen twice by a token, and then has two rows of it."""
    shape = (case.tokens, case.chosen)
    if case.routing == "balanced":
        return torch.arange(case.tokens * case.chosen).view(shape) % case.experts
    if case.routing == "skewed":  # twice as many for the first expert as for any other
        odds = torch.ones(case.experts).index_fill(0, torch.tensor(0), 2.0)
        flat = torch.multinomial(odds, shape[0] * shape[1], replacement=True, generator=generator)
        return flat.view(shape)
    if case.routing == "one expert":
        return torch.full(shape, 1 % case.experts)
    assert case.routing == "last only"
    return torch.full(shape, case.experts - 1)


def make(case: Case, device="cpu"):
    """Return [x, weights, w_in, w_out], experts_TK and d_out."""
    generator = torch.Generator().manual_seed(0)
    rows = 2 * case.inner if case.activation == "swiglu" else case.inner

    def draw(*shape):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(device, case.dtype)

    wide = torch.promote_types(case.dtype, torch.float32)  # router weights stay fp32
    inputs = [
        draw(case.tokens, case.width),
        draw(case.tokens, case.chosen).to(wide).sigmoid(),
        draw(case.experts, rows, case.width) * case.width**-0.5,
        draw(case.experts, case.width, case.inner) * case.inner**-0.5,
    ]
    return inputs, route(case, generator).to(device), draw(case.tokens, case.width)


def results(impl, case, inputs, experts_TK, d_out):
    """Return the output and all gradients of the routed experts."""
    x, weights, w_in, w_out = leaves = [t.detach().requires_grad_() for t in inputs]
    bundle = experts_op.ExpertWeights(w_in, w_out, case.activation)
    out, dropped = experts_op.experts(impl, x, weights, experts_TK, bundle, Products())
    assert float(dropped) == 0
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def one_expert(impl, case, inputs, d_out, weighted=True):
    """Return the output and all gradients of a feed-forward network: the first expert for all."""
    x, weights, w_in, w_out = inputs
    leaves = [x, w_in[0], w_out[0], *([weights[:, :1]] if weighted else [])]
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = feed_forward_op.feed_forward(impl, *leaves[:3], case.activation, *leaves[3:])
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def double(inputs, d_out):
    return [t.double() for t in inputs], d_out.double()


def worst_rows(actual, truth, shown=5):
    """Return a line that names the rows (of all but the last axis) with the largest errors."""
    error = (actual.double() - truth).nan_to_num(nan=torch.inf).flatten(0, -2).norm(dim=-1)
    order = error.argsort(descending=True)[:shown].tolist()
    return ", ".join(f"row {i}: {float(error[i]):.2e}" for i in order)


def assert_results(actual, peer, truth, label, names=NAMES):
    """Assert that each result is as good as that of a peer of equal precision, and where it is not.

    As a whole: twice the peer's own error and one rounding. No row has more than eight times the
    mean error of the peer's rows and one rounding: a row that went to the wrong place is larger.
    """
    for name, a, p, t in zip(names, actual, peer, truth, strict=True):
        assert a.shape == t.shape and a.dtype == p.dtype, f"{label} {name}: {a.shape} {a.dtype}"
        ours, theirs = ((x.double() - t).flatten(0, -2).norm(dim=-1) for x in (a, p))
        rounding = (t.to(a.dtype).double() - t).flatten(0, -2).norm(dim=-1)
        error, budget = float(ours.norm()), float(2 * theirs.norm() + rounding.norm())
        good = error <= budget and bool(
            (ours <= 8 * theirs.square().mean().sqrt() + rounding).all()
        )
        where = worst_rows(a, t)
        assert good, f"{label} {name}: error {error:.2e}, budget {budget:.2e}; {where}"
