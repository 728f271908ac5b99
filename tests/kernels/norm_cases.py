"""Inputs, results and comparisons for tests of the row-wise kernels."""

from dataclasses import dataclass

import torch

from steplab.kernels import rms_norm as norm_op
from steplab.kernels import rotary as rotary_op
from steplab.testing.tolerance import assert_as_good_as
from tests.kernels.case import Named

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-6


@dataclass(frozen=True)
class NormCase(Named):
    """One shape and its dtypes; `added` is the dtype of what is added, `out` that of the norm."""

    shape: tuple[int, ...] = (3, 5)
    width: int = 24
    stream: torch.dtype = FP32
    weight: torch.dtype = FP32
    added: torch.dtype | None = None
    out: torch.dtype | None = None
    passed: bool = True  # whether the stream is used after the norm, and so has a gradient


def norm_inputs(case, device="cpu"):
    """Return x, weight, added or None, and the gradients of norm and stream."""
    generator = torch.Generator().manual_seed(0)

    def normal(dtype, *shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    shape = (*case.shape, case.width)
    weight = 1 + 0.5 * normal(case.weight, case.width)
    added = None if case.added is None else normal(case.added, *shape)
    stream = case.stream if added is None else torch.promote_types(case.stream, case.added)
    gradients = normal(case.out or stream, *shape), normal(stream, *shape)
    return 3 * normal(case.stream, *shape), weight, added, gradients


def norm_results(impl, case, x, weight, added, gradients):
    """Return norm and stream, and the gradients of x, of the weight and of what was added."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, added) if t is not None]
    out = norm_op.rms_norm(impl, *leaves[:2], EPS, *(leaves[2:] or [None]), case.out)
    used = 2 if case.passed else 1
    found = torch.autograd.grad(out[:used], leaves, gradients[:used])
    names = ("normed", "stream", "dx", "dweight", "dadded")
    return dict(zip(names, [*(t.detach() for t in out), *found], strict=False))


def check_norm(impl, case, device="cpu"):
    """Compare an implementation with the definition in fp64."""
    x, weight, added, gradients = norm_inputs(case, device)
    assert norm_op.choose(impl, x, weight, added) == impl
    actual = norm_results(impl, case, x, weight, added, gradients)
    peer = norm_results("reference", case, x, weight, added, gradients)
    wide = [None if t is None else t.double() for t in (x, weight, added)]
    exact = NormCase(case.shape, case.width, passed=case.passed)
    truth = norm_results("reference", exact, *wide, [g.double() for g in gradients])
    compare(actual, peer, truth, f"{impl} {case}")


def rotary_inputs(B, T, H, D, dtype, own_positions, device="cpu"):
    """Return the product (B, T, 3, H, D), the angles and the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    angles = 9 * torch.rand(*((B, 1) if own_positions else ()), T, D // 2, generator=generator)
    # As attention gives them back: one in the layout (B, H, T, D), two as (B, T, H, D).
    gradients = normal(B, H, T, D), *(normal(B, T, H, D).transpose(1, 2) for _ in range(2))
    return normal(B, T, 3, H, D), angles.to(device).cos(), angles.to(device).sin(), gradients


def rotary_results(impl, qkv, cos, sin, gradients):
    """Return q, k, v and the gradient of the product."""
    leaf = qkv.detach().requires_grad_()
    out = rotary_op.rotary(impl, leaf, cos, sin)
    (dqkv,) = torch.autograd.grad(out, [leaf], gradients)
    return dict(zip("qkv", (t.detach() for t in out), strict=True)) | {"dqkv": dqkv}


def check_rotary(impl, *shape, device="cpu"):
    """Compare an implementation with the definition in fp64."""
    qkv, cos, sin, gradients = rotary_inputs(*shape, device=device)
    actual = rotary_results(impl, qkv, cos, sin, gradients)
    peer = rotary_results("reference", qkv, cos, sin, gradients)
    wide = (t.double() for t in (qkv, cos, sin))
    truth = rotary_results("reference", *wide, [g.double() for g in gradients])
    compare(actual, peer, truth, f"{impl} {shape}")


def check_shared_angles(device="cpu"):
    """Compare angles (1, 1, T, D / 2), as a cache gives them, with the same as (T, D / 2)."""
    qkv, cos, sin, gradients = rotary_inputs(3, 5, 2, 8, FP32, False, device)
    angles = cos[None, None], sin[None, None]
    assert rotary_op.choose("auto", qkv, angles[0]) == "triton_rotary"
    shared = rotary_results("triton_rotary", qkv, *angles, gradients)
    plain = rotary_results("reference", qkv, cos, sin, gradients)
    for name, value in plain.items():
        torch.testing.assert_close(shared[name], value, msg=lambda text, n=name: f"{n}: {text}")


def compare(actual, peer, truth, label):
    """Assert that every result is as good as the reference's; a failure names the worst row."""
    assert actual.keys() == peer.keys() == truth.keys()
    for name, value in actual.items():
        exact, own = truth[name], peer[name]
        assert value.shape == exact.shape and value.dtype == own.dtype, f"{label} {name}"
        error = (value.double() - exact).flatten(0, -2) if value.ndim > 1 else value[None] - exact
        row = int(error.norm(dim=-1).nan_to_num(torch.inf).argmax())
        where = f"row {row} of {len(error)}, {float(error[row].norm()):.2e} off"
        assert_as_good_as(value, own, exact, f"{label} {name} ({where})")
