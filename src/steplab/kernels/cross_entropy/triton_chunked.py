"""Chunks of tokens with one Triton kernel between the products: logits to losses and gradients.

A program owns one row of logits. Its first pass keeps a running maximum and sum for every lane; the
second reads the row again, from cache, and writes softmax - onehot over it. So memory sees one read
and one write, and what is left to save is instructions: 15 per logit for both passes together.
"""

# T tokens, D width, V vocabulary, C tokens or words of one chunk; in the kernels R rows, N columns
# of one step, K steps at once
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from torch import Tensor

from steplab.kernels.cross_entropy._chunked_op import RowMath, chunked_op
from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    on_device_of,
    refuse_device,
    refuse_dtype,
    tl,
    triton,
)

NEEDS_GPU = True
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# 8 elements of each of 4 steps per thread: 62 registers, so that two programs of 16 warps share a
# multiprocessor. Their rows of 50,257 take 27 MB of an H200's 50 MB of cache: a second read need
# not go to memory.
COLUMNS = 64 if INTERPRETED else 4096
COLUMNS_PER_WARP = 256
AT_ONCE = 4  # steps after which a lane's sum is rescaled to its new maximum
TILE = (8, 64) if INTERPRETED else (8, 256)  # rows and columns of the gradient alone


# fmt: off
@triton.jit
def row_gradient(z, column, top, log_sum, target, factor):
    """Return (softmax - onehot) times a factor, for the logits at some columns."""
    softmax = tl.exp2(((z - top) - log_sum) * LOG2_E)
    return (softmax - tl.where(column == target, 1.0, 0.0)) * factor


@triton.jit
def loss_rows_kernel(
    logits, targets, losses, norms, norm_stride, factor, stride, V, ignore,
    GRADIENT: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, UPCAST: tl.constexpr,
):
    """Fill loss and norm of a row and, if GRADIENT, write the gradients over its logits.

    Columns beyond V, up to the stride, are padding: read, and written with zeros, so that every
    access has the full width. A target outside of 0 to V - 1 makes everything NaN.
    """
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    # Read before anything is overwritten: the reductions below are barriers between the warps.
    own = tl.load(start + target, mask=inside, other=0.0).to(tl.float32)
    top_N = tl.full([COLUMNS], -1e30, tl.float32)  # finite: inf - inf would be NaN
    sum_N = tl.zeros([COLUMNS], tl.float32)
    column_N = tl.arange(0, COLUMNS)
    step_KN = tl.arange(0, AT_ONCE)[:, None] * COLUMNS + column_N[None, :]
    whole = V // (AT_ONCE * COLUMNS) * (AT_ONCE * COLUMNS)
    for first in tl.range(0, whole, AT_ONCE * COLUMNS):
        z_KN = tl.load(start + first + step_KN).to(tl.float32)
        before_N, top_N = top_N, tl.maximum(top_N, tl.max(z_KN, 0))
        grown_KN = tl.exp2((z_KN - top_N[None, :]) * LOG2_E)
        sum_N = sum_N * tl.exp2((before_N - top_N) * LOG2_E) + tl.sum(grown_KN, 0)
    for first in tl.range(whole, V, COLUMNS):
        z_N = tl.load(start + first + column_N, mask=first + column_N < stride, other=0.0)
        z_N = tl.where(first + column_N < V, z_N.to(tl.float32), float("-inf"))
        before_N, top_N = top_N, tl.maximum(top_N, z_N)
        sum_N *= tl.exp2((before_N - top_N) * LOG2_E)
        sum_N += tl.exp2((z_N - top_N) * LOG2_E)
    top = tl.max(top_N, 0)
    log2_sum = tl.log2(tl.sum(sum_N * tl.exp2((top_N - top) * LOG2_E), 0))
    top = tl.where(inside | (target == ignore), top, float("nan"))
    tl.store(norms + row, top)
    tl.store(norms + norm_stride + row, log2_sum * LN_2)
    tl.store(losses + row, tl.where(target == ignore, 0.0, (top - own) + log2_sum * LN_2))
    if GRADIENT:
        dtype: tl.constexpr = logits.dtype.element_ty
        scale = tl.where(target == ignore, 0.0, tl.load(factor))
        for first in tl.range(0, whole, AT_ONCE * COLUMNS):
            z_KN = tl.load(start + first + step_KN).to(tl.float32)
            z_KN = tl.exp2((z_KN - top) * LOG2_E - log2_sum) * scale
            tl.store(start + first + step_KN, narrow(z_KN, dtype, UPCAST))
        for first in tl.range(whole, V, COLUMNS):
            here_N, exists_N = start + first + column_N, first + column_N < stride
            z_N = tl.load(here_N, mask=exists_N, other=0.0).to(tl.float32)
            z_N = tl.exp2((z_N - top) * LOG2_E - log2_sum) * scale
            z_N = tl.where(first + column_N < V, z_N, 0.0)
            tl.store(here_N, narrow(z_N, dtype, UPCAST), mask=exists_N)
        # The one of onehot, once its column has been written as all others.
        tl.debug_barrier()
        own = (tl.exp2((own - top) * LOG2_E - log2_sum) - 1.0) * scale
        tl.store(start + target, narrow(own, dtype, UPCAST), mask=inside)


@triton.jit
def gradient_tiles_kernel(
    logits, targets, norms, norm_stride, d_losses, d_stride, stride, T, first, ignore,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write (softmax - onehot) d_loss over logits of the words from `first` on.

    Grid: tiles of rows, tiles of columns.
    """
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_1N = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    exists_R = row_R < T
    target_R = tl.load(targets + row_R, mask=exists_R, other=0)
    factor_R = tl.load(d_losses + row_R.to(tl.int64) * d_stride, mask=exists_R, other=0.0)
    factor_R = tl.where(target_R == ignore, 0.0, factor_R.to(tl.float32))
    top_R = tl.load(norms + row_R, mask=exists_R, other=0.0)
    log_sum_R = tl.load(norms + norm_stride + row_R, mask=exists_R, other=0.0)
    here_RN = logits + row_R.to(tl.int64)[:, None] * stride + column_1N
    mask_RN = exists_R[:, None] & (column_1N < stride)
    z_RN = tl.load(here_RN, mask=mask_RN, other=0.0).to(tl.float32)
    z_RN = row_gradient(
        z_RN, first + column_1N, top_R[:, None], log_sum_R[:, None], target_R[:, None],
        factor_R[:, None],
    )
    tl.store(here_RN, narrow(z_RN, logits.dtype.element_ty, UPCAST), mask=mask_RN)
# fmt: on


def loss(
    logits_CV: Tensor,
    targets_C: Tensor,
    ignore: int,
    losses_C: Tensor,
    norms_2C: Tensor,
    factor: Tensor | None,
    most_columns: int = COLUMNS,
) -> None:
    """Run `RowMath.loss` on `logits_CV`, which must be a view of rows padded to 64 elements."""
    C, V = logits_CV.shape
    columns = min(most_columns, triton.next_power_of_2(V))
    with on_device_of(logits_CV):
        loss_rows_kernel[(C,)](
            logits_CV, targets_C, losses_C, norms_2C, norms_2C.stride(0), factor,
            logits_CV.stride(0), V, ignore, GRADIENT=factor is not None, COLUMNS=columns,
            AT_ONCE=AT_ONCE, UPCAST=INTERPRETED, num_warps=max(1, columns // COLUMNS_PER_WARP),
        )  # fmt: skip


def gradient(
    logits_TC: Tensor,
    targets_T: Tensor,
    ignore: int,
    norms_2T: Tensor,
    first: int,
    d_losses_T: Tensor,
) -> None:
    """Run `RowMath.gradient` on `logits_TC`, a view of rows padded likewise."""
    T, C = logits_TC.shape
    with on_device_of(logits_TC):
        gradient_tiles_kernel[(triton.cdiv(T, TILE[0]), triton.cdiv(C, TILE[1]))](
            logits_TC, targets_T, norms_2T, norms_2T.stride(0), d_losses_T, d_losses_T.stride(0),
            logits_TC.stride(0), T, first, ignore, ROWS=TILE[0], COLUMNS=TILE[1],
            UPCAST=INTERPRETED, num_warps=8,
        )  # fmt: skip


def refuse(x_TD: Tensor, weight_VD: Tensor) -> str:
    """Return why it cannot run, or ""."""
    return refuse_device(x_TD) or refuse_dtype(x_TD)


mean, per_token = chunked_op("triton_chunked_cross_entropy", RowMath(loss, gradient))
