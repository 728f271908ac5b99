"""Inputs for tests of the loss, the gradients of any implementation, and where they go wrong."""

import math
from dataclasses import dataclass

import torch

from steplab.kernels import cross_entropy as op
from steplab.kernels.cross_entropy import _chunks
from steplab.kernels.cross_entropy._chunks import wide
from tests.kernels.case import Named

NAMES = ("loss", "dx", "dw")
TILE = 16  # rows


@dataclass(frozen=True)
class Case(Named):
    """One shape; the weight has the dtype of the inputs unless given."""

    tokens: int = 45
    width: int = 16
    vocabulary: int = 37
    reduction: str = "mean"
    ignored: float = 0.0  # share of the targets
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    size: float = 1.0  # of the logits
    seed: int = 0


def in_small_chunks(monkeypatch, rows=8):
    """Let short tests have several chunks: of `rows` or more, and of twice as many words."""
    monkeypatch.setattr(_chunks, "TOKEN_TILE", rows)
    monkeypatch.setattr(_chunks, "VOCABULARY_TILE", 2 * rows)
    monkeypatch.setattr(_chunks, "MIN_TOKEN_BYTES", 1)
    monkeypatch.setattr(_chunks, "TILES", 0)
    monkeypatch.setattr(_chunks, "MIN_VOCABULARY_BYTES", 1)


def make(case: Case, device="cpu"):
    """Return x_TD, weight_VD, targets_T and the gradient of the loss, a scalar or (T)."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    x_TD = normal(case.tokens, case.width).to(case.dtype)
    weight_VD = normal(case.vocabulary, case.width) * case.size / case.width**0.5
    targets_T = torch.randint(case.vocabulary, (case.tokens,), generator=generator)
    ignored_T = torch.rand(case.tokens, generator=generator) < case.ignored
    targets_T[ignored_T] = op.IGNORE_INDEX
    d_loss = normal(*(() if case.reduction == "mean" else (case.tokens,)))
    weight_VD = weight_VD.to(case.weight_dtype or case.dtype)
    return x_TD, weight_VD, targets_T.to(device), d_loss.to(wide(case.dtype))


def results(impl, x_TD, weight_VD, targets_T, d_loss, reduction):
    """Return the loss and the gradients of inputs and weight."""
    leaves = [x_TD.detach().requires_grad_(), weight_VD.detach().requires_grad_()]
    loss = op.cross_entropy(impl, *leaves, targets_T, reduction)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, d_loss)]


def floors(x_TD, weight_VD, d_loss):
    """Return what rounding may cost in loss, dx and dw of few tokens, where errors may cancel.

    A logit is rounded once, and so is its gradient, at most 1 before d_loss; that meets a row of
    the weight or of the inputs. A mean takes the errors of the tokens together.
    """
    unit, T = torch.finfo(x_TD.dtype).eps, len(x_TD)
    longest_x, longest_w = (float(t.double().norm(dim=-1).max()) for t in (x_TD, weight_VD))
    loss = 1 + longest_x * longest_w + math.log(len(weight_VD))  # or more
    logit = unit * longest_x * longest_w + torch.finfo(wide(x_TD.dtype)).eps * loss
    each = (
        float(d_loss.double().abs().max()) * (unit + logit) * (T**-0.5 if d_loss.ndim == 0 else 1)
    )
    return logit, each * longest_w * T**0.5, each * longest_x * T**0.5


def check(impl, case: Case, device="cpu"):
    """Compare an implementation with the definition in fp64."""
    *inputs, d_loss = make(case, device)
    assert op.choose(impl, *inputs) == impl
    actual = results(impl, *inputs, d_loss, case.reduction)
    peer = results("reference", *inputs, d_loss, case.reduction)
    x, weight, targets = inputs
    truth = results(
        "reference", x.double(), weight.double(), targets, d_loss.double(), case.reduction
    )
    # Losses per token compute the logits again, and of large ones each product rounds other digits
    # off, where the definition has the same ones in softmax and sum, which cancel.
    twice = case.size > 1 and case.reduction == "none"
    few = floors(x, weight, d_loss) if case.tokens < 64 or twice else (0.0, 0.0, 0.0)
    if case.reduction == "mean":  # one number: the peer may be right by chance
        few = (floors(x, weight, d_loss)[0], *few[1:])
    assert_results(actual, peer, truth, f"{impl} {case}", few)


def assert_results(actual, peer, truth, label, floors):
    """Assert that loss, dx and dw are as good as a reference of equal precision.

    As a whole: twice the reference's own error and one rounding. In each tile of rows: four times
    the larger of the reference's error there and on average, and one rounding.
    """
    for name, a, p, t, floor in zip(NAMES, actual, peer, truth, floors, strict=True):
        assert a.shape == t.shape and a.dtype == p.dtype, f"{label} {name}"
        ours, theirs = (tile_norms(x.double() - t) for x in (a, p))
        rounding = tile_norms(t.to(a.dtype).double() - t)
        allowed = 4 * torch.maximum(theirs, theirs.mean()) + rounding + floor
        error, budget = float(ours.norm()), float(2 * theirs.norm() + rounding.norm()) + floor
        worst = int((ours / allowed.clamp_min(1e-300)).argmax())
        where = (
            f"worst in rows {worst * TILE} to {worst * TILE + TILE - 1}: {float(ours[worst]):.2e}"
        )
        good = error <= budget and bool((ours <= allowed).all())
        assert good, f"{label} {name}: error {error:.2e}, budget {budget:.2e}; {where}"


def tile_norms(x):
    """Return the norm of every tile of rows; NaN counts as infinite."""
    last = x.shape[-1] if x.ndim > 1 else 1
    squares = x.reshape(-1, last).double().nan_to_num(nan=torch.inf).square().sum(-1)
    return torch.stack([part.sum() for part in squares.split(TILE)]).sqrt()
