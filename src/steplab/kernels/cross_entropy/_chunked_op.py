"""Two differentiable ops from what an implementation does with rows of logits: mean, and per token.

torch.compile sees single nodes and does not look inside, so what is saved for the backward is what
is written here: the two gradients for the mean, the norm of each softmax for losses per token.
"""

# T tokens, C tokens of one chunk, D width, V vocabulary
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steplab.kernels.cross_entropy._chunks import ChunkedHead, gradients_by_vocabulary, wide
from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import (
    DTYPES,
    INTERPRETED,
    on_device_of,
    tl,
    triton,
    use_triton,
)

SCALED_BLOCK = 1024 if INTERPRETED else 4096
Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]
Pair = tuple[Tensor, Tensor]


class RowMath(NamedTuple):
    """What an implementation does with the logits of some tokens, in place.

    `loss(logits, targets, ignore, losses, norms, factor)` fills losses (C) and norms (2, C) from
    logits (C, V) and, if a `factor` of one element is given, turns the logits into their gradients,
    (softmax - onehot) times it; 0 where ignored.
    `gradient(logits, targets, ignore, norms, first, d_losses)` turns the logits of the words from
    `first` on into their gradients, times d_losses (T).
    The norm of a row is its maximum and the log of the sum of exponentials relative to it: added up
    in one number they would lose the digits that a confident softmax of large logits needs.
    """

    loss: Callable[[Tensor, Tensor, int, Tensor, Tensor, Tensor | None], None]
    gradient: Callable[[Tensor, Tensor, int, Tensor, int, Tensor], None]


class ChunkedOp(NamedTuple):
    """The two functions that an implementation file offers."""

    mean: Loss
    per_token: Loss


def chunked_op(name: str, rows: RowMath) -> ChunkedOp:
    """Register `steplab::<name>_mean` and `steplab::<name>_tokens` with their gradients."""
    return ChunkedOp(_mean_op(f"steplab::{name}_mean", rows), _token_op(f"steplab::{name}", rows))


def _losses(
    rows: RowMath, head: ChunkedHead, targets_T: Tensor, ignore: int, factor: Tensor | None = None
) -> Pair:
    """Return losses (T) and norms (2, T); with a factor the head gets their gradients."""
    losses_T, norms_2T = _empty_losses(head.x_TD)
    for chunk in head.chunks():
        logits_CV, part = head.logits(chunk), (losses_T[chunk], norms_2T[:, chunk])
        rows.loss(logits_CV, targets_T[chunk], ignore, *part, factor)
        if factor is not None:
            head.collect(chunk)
    return losses_T, norms_2T


def _empty_losses(x_TD: Tensor) -> Pair:
    T, dtype = x_TD.shape[0], wide(x_TD.dtype)
    return x_TD.new_empty(T, dtype=dtype), x_TD.new_empty(2, T, dtype=dtype)


def _mean_op(name: str, rows: RowMath) -> Loss:
    def run(
        x: Tensor, weight: Tensor, targets: Tensor, ignore: int, need_dx: bool, need_dw: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        targets, sums = targets.contiguous(), wide(x.dtype)
        count = (targets != ignore).sum()
        share = count.clamp_min(1).to(sums).reciprocal()
        early, late = share, share.new_empty(0)
        if x.dtype == torch.float16:  # too narrow for shares: they wait for the loss scale
            early, late = torch.ones_like(share), share
        head = ChunkedHead(x, weight, need_dx, need_dw)
        factor = early.reshape(1) if need_dx or need_dw else None
        losses_T, _ = _losses(rows, head, targets, ignore, factor)
        dx_TD, dw_VD = head.finish(weight.dtype)
        return losses_T.sum() / count, late, dx_TD, dw_VD

    def fake(
        x: Tensor, weight: Tensor, targets: Tensor, ignore: int, need_dx: bool, need_dw: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        waits = x.dtype == torch.float16
        loss, late = (x.new_empty(size, dtype=wide(x.dtype)) for size in ((), () if waits else 0))
        needed = ((x, need_dx), (weight, need_dw))
        dx, dw = (t.new_empty(t.shape if need else 0) for t, need in needed)
        return loss, late, dx, dw

    op = torch.library.custom_op(name, run, mutates_args=())
    op.register_fake(fake)
    op.register_autograd(_differentiate_mean, setup_context=_keep_mean)

    def mean(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, ignore: int) -> Tensor:
        needs = (torch.is_grad_enabled() and t.requires_grad for t in (x_TD, weight_VD))
        loss: Tensor = op(x_TD, weight_VD, targets_T, ignore, *needs)[0]
        return loss

    return mean


def _keep_mean(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs = inputs[-2:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros in the size of what is kept
    ctx.save_for_backward(*output[1:])


def _differentiate_mean(ctx: Any, d_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if d_loss is None:
        return (None,) * 6
    late, *kept = ctx.saved_tensors
    factor = d_loss * late if late.numel() else d_loss
    pairs = zip(kept, ctx.needs, strict=True)
    dx, dw = (scaled(gradient, factor) if need else None for gradient, need in pairs)
    return dx, dw, None, None, None, None


@triton.jit
def scaled_kernel(x, factor, out, numel, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    """Write x times the one element of `factor`, multiplied in fp32."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(x + index, mask=index < numel).to(tl.float32) * tl.load(factor)
    tl.store(out + index, narrow(product, out.dtype.element_ty, UPCAST), mask=index < numel)


@torch.library.custom_op("steplab::scaled", mutates_args=())
def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Return gradient times a scalar tensor, multiplied in the wider of their dtypes.

    One kernel and no temporary: as two ops, an fp32 copy of the gradient would live in between. By
    torch's own product of bf16 and fp32, which does not access whole cache lines, the gradients of
    50,257 x 768 and 16,384 x 768 take 0.22 ms on an H200 where memory needs 0.05.
    """
    if use_triton(gradient) and gradient.dtype in DTYPES and gradient.is_contiguous():
        out = torch.empty_like(gradient)
        with on_device_of(gradient):
            scaled_kernel[(triton.cdiv(out.numel(), SCALED_BLOCK),)](
                gradient, factor, out, out.numel(), BLOCK=SCALED_BLOCK, UPCAST=INTERPRETED,
                num_warps=8,
            )  # fmt: skip
        return out
    # One element and not none: torch would round a scalar to the dtype of the gradient first.
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient))


@scaled.register_fake
def _(gradient: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(gradient)


def _token_op(name: str, rows: RowMath) -> Loss:
    def run(x: Tensor, weight: Tensor, targets: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
        return _losses(rows, ChunkedHead(x, weight), targets.contiguous(), ignore)

    def run_backward(
        d_losses: Tensor,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        norms: Tensor,
        ignore: int,
        need_dx: bool,
        need_dw: bool,
    ) -> tuple[Tensor, Tensor]:
        targets = targets.contiguous()

        def gradient(logits_TC: Tensor, first: int) -> None:
            rows.gradient(logits_TC, targets, ignore, norms, first, d_losses)

        return gradients_by_vocabulary(gradient, x, weight, need_dx, need_dw)

    def differentiate(ctx: Any, d_losses: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if d_losses is None:
            return (None,) * 4
        x, weight, targets, norms = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        both = gradient_op(d_losses, x, weight, targets, norms, ctx.ignore, *needs)
        dx, dw = (g if need else None for g, need in zip(both, needs, strict=True))
        return dx, dw, None, None

    def fake_backward(d_losses: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Pair:
        needed = zip((x, weight), rest[-2:], strict=True)
        dx, dw = (t.new_empty(t.shape if need else 0) for t, need in needed)
        return dx, dw

    op = torch.library.custom_op(f"{name}_tokens", run, mutates_args=())
    op.register_fake(lambda x, *rest: _empty_losses(x))
    gradient_op = torch.library.custom_op(f"{name}_tokens_backward", run_backward, mutates_args=())
    gradient_op.register_fake(fake_backward)
    op.register_autograd(differentiate, setup_context=_keep_tokens)

    def per_token(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, ignore: int) -> Tensor:
        losses_T: Tensor = op(x_TD, weight_VD, targets_T, ignore)[0]
        return losses_T

    return per_token


def _keep_tokens(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    x, weight, targets, ctx.ignore = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros in the size of what is kept
    ctx.save_for_backward(x, weight, targets, output[1])
