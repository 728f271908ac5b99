"""One kernel forward and one backward; the norm is written for the selected rows only.

Saved for the backward: the stream and one number per row. torch.compile sees opaque ops.
"""

# B batch, S rows of a sequence, K rows taken, D width
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels.norm_rows import MAX_WIDTH
from steplab.kernels.stream_norm import Norm, RowSelection, Scored, Update
from steplab.kernels.stream_norm._rows import index_rows
from steplab.kernels.stream_norm._stream_ops import stream_backward, stream_forward, stream_rows
from steplab.kernels.triton_runtime import refuse_device, refuse_dtype

NEEDS_GPU = True


def refuse(x_BSD: Tensor, update: Update | None, norm: Norm) -> str:
    """Return why it cannot run, or ""."""
    reason = refuse_dtype(x_BSD, norm.weight_D, norm.offset_D, update.added if update else None)
    if reason:
        return reason
    if x_BSD.ndim != 3 or x_BSD.shape[-1] > MAX_WIDTH:
        return f"needs sequences of rows of at most {MAX_WIDTH} numbers, not {tuple(x_BSD.shape)}"
    return refuse_device(x_BSD)


def norm(
    x_BSD: Tensor, update: Update | None, norm: Norm, dtype: torch.dtype | None, ends: bool
) -> tuple[Tensor, Tensor]:
    """Return (normed, stream)."""
    normed, stream = _AddAndNorm.apply(x_BSD, *_parts(update), *norm, dtype, ends)
    return normed, stream.detach() if ends else stream


def score(x_BSD: Tensor, update: Update | None, norm: Norm, router_D: Tensor) -> Scored:
    """Return the stream, its scores, and 1 / root-mean-square of each row."""
    parts = (*_parts(update), *(t if t is None else t.detach() for t in _vectors(norm)))
    stream, score, rstd = _AddAndScore.apply(x_BSD, *parts, router_D.detach(), norm.eps)
    return Scored(stream, score, (rstd,))


def take(
    scored: Scored, selection: RowSelection, norm: Norm, router_D: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normed_BKD, stream_BSD, score_BS)."""
    stream, score, (rstd,) = scored
    inputs = (stream, score, rstd, *selection, *_vectors(norm), router_D, dtype)
    out: tuple[Tensor, Tensor, Tensor] = _TakeNormed.apply(*inputs)
    return out


def _parts(update: Update | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if update is None:
        return None, None, None
    rows, slots = update.selection or (None, None)
    return update.added, rows, slots


def _vectors(norm: Norm) -> tuple[Tensor, Tensor | None]:
    return norm.weight_D, norm.offset_D


def _of_added(d_stream: Tensor, rows_BK: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return the gradient of what was added."""
    if dtype is None:
        return None
    return (d_stream if rows_BK is None else index_rows(d_stream, rows_BK)).to(dtype)


class _AddAndNorm(torch.autograd.Function):
    """The stream passes through, so that all of its gradient arrives in one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        rows: Tensor | None,
        slots: Tensor | None,
        weight_D: Tensor,
        eps: float,
        offset_D: Tensor | None,
        dtype: torch.dtype | None,
        ends: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)
        found = stream_forward(x, added, slots, weight_D, offset_D, None, eps, dtype or wide)
        stream, normed, rstd, _ = found
        stream = x if added is None else stream
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(stream, rstd, weight_D, offset_D, rows)
        ctx.dtypes = x.dtype, None if added is None else added.dtype
        ctx.ends = ends
        return normed, stream

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_normed, d_stream = gradients[0], None if ctx.ends else gradients[1]
        stream, rstd, weight_D, offset_D, rows = ctx.saved_tensors
        d_weight = d_offset = None
        if d_normed is not None:
            inputs = (d_normed, None, None, d_stream, stream, rstd, weight_D, offset_D, None)
            d_stream, sums_3D = stream_backward(*inputs)
            d_weight = sums_3D[0].to(weight_D.dtype)
            d_offset = None if offset_D is None else sums_3D[2].to(offset_D.dtype)
        if d_stream is None:
            return (None,) * 9
        d_added = _of_added(d_stream, rows, ctx.dtypes[1])
        return d_stream.to(ctx.dtypes[0]), d_added, None, None, d_weight, None, d_offset, None, None


class _AddAndScore(torch.autograd.Function):
    """The gradient of the scores is left to `_TakeNormed`, through which the stream goes last."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        rows: Tensor | None,
        slots: Tensor | None,
        weight_D: Tensor,
        offset_D: Tensor | None,
        router_D: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (x, added, slots, weight_D, offset_D, router_D, eps, None)
        stream, _, rstd, score = stream_forward(*inputs)
        stream = x if added is None else stream
        ctx.mark_non_differentiable(score, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows)
        ctx.dtypes = x.dtype, None if added is None else added.dtype
        return stream, score, rstd

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_stream, (rows,) = gradients[0], ctx.saved_tensors
        if d_stream is None:
            return (None,) * 8
        d_added = _of_added(d_stream, rows, ctx.dtypes[1])
        return d_stream.to(ctx.dtypes[0]), d_added, *[None] * 6


class _TakeNormed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        score: Tensor,
        rstd: Tensor,
        rows: Tensor,
        slots: Tensor,
        weight_D: Tensor,
        offset_D: Tensor | None,
        router_D: Tensor,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = stream_rows(stream, rstd, rows, weight_D, offset_D, dtype or stream.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(stream, rstd, slots, weight_D, offset_D, router_D)
        ctx.taken, ctx.dtype = rows.shape[1], normed.dtype
        return normed, stream, score.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_normed, d_stream, d_score = gradients
        stream, rstd, slots, weight_D, offset_D, router_D = ctx.saved_tensors
        if d_normed is None and d_score is None:
            return d_stream, *[None] * 8
        if d_normed is None:
            shape = (len(stream), ctx.taken, stream.shape[-1])
            d_normed = stream.new_zeros(shape, dtype=ctx.dtype)
        inputs = (d_normed, slots, d_score, d_stream, stream, rstd, weight_D, offset_D, router_D)
        d_stream, sums_3D = stream_backward(*inputs)
        of_norm, of_score, of_offset = sums_3D
        d_router = None
        if d_score is not None:
            d_router = (of_score * weight_D).to(router_D.dtype)
            of_norm = of_norm + of_score * router_D
        d_offset = None if offset_D is None else of_offset.to(offset_D.dtype)
        d_weight = of_norm.to(weight_D.dtype)
        return d_stream, None, None, None, None, d_weight, d_offset, d_router, None
