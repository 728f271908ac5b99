"""Softmax of rows of scores and its gradient, in place, one program per row."""

# S keys padded to a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from steplab.kernels._triton import INTERPRETED
from steplab.kernels._triton_rounding import narrow


# fmt: off
@triton.jit
def _row(queries, keys, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Return this row's offset, how many keys it sees, and how many the last of its block sees."""
    row = tl.program_id(0)
    seen, set_to = keys, keys
    if CAUSAL:
        query = row % queries
        seen = keys - queries + query + 1
        set_to = keys - queries + tl.minimum((query // BLOCK + 1) * BLOCK, queries)
    return row.to(tl.int64) * keys, seen, set_to


@triton.jit(do_not_specialize=["queries"])
def softmax_kernel(
    scores, queries, keys, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write weights over one row of scores, 0 for what the rest of its block sees."""
    offset, seen, set_to = _row(queries, keys, CAUSAL, BLOCK)
    s_S = tl.arange(0, S)
    place = scores + offset + s_S
    x_S = tl.load(place, mask=s_S < seen, other=-float("inf")).to(tl.float32) * scale
    weight_S = tl.exp(x_S - tl.max(x_S, 0))
    weight_S = weight_S / tl.sum(weight_S, 0)
    tl.store(place, narrow(weight_S, scores.dtype.element_ty, UPCAST), mask=s_S < set_to)


@triton.jit(do_not_specialize=["queries"])
def softmax_backward_kernel(
    gradients, weights, queries, keys, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
    S: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write the gradients of scores over one row of those of weights."""
    offset, seen, set_to = _row(queries, keys, CAUSAL, BLOCK)
    s_S = tl.arange(0, S)
    place = gradients + offset + s_S
    d_S = tl.load(place, mask=s_S < seen, other=0.0).to(tl.float32)
    weight_S = tl.load(weights + offset + s_S, mask=s_S < seen, other=0.0).to(tl.float32)
    d_S = weight_S * (d_S - tl.sum(weight_S * d_S, 0)) * scale
    tl.store(place, narrow(d_S, gradients.dtype.element_ty, UPCAST), mask=s_S < set_to)
# fmt: on


def softmax(scores_BTS: Tensor, scale: float, causal: bool, block: int) -> None:
    """Turn (B, T, S) scores into weights, in place."""
    B, T, S = scores_BTS.shape
    padded = triton.next_power_of_2(S)
    softmax_kernel[(B * T,)](
        *(scores_BTS, T, S, scale),
        CAUSAL=causal,
        BLOCK=block,
        S=padded,
        UPCAST=INTERPRETED,
        num_warps=warps(padded),
    )


def softmax_backward(
    gradients_BTS: Tensor, weights_BTS: Tensor, scale: float, causal: bool, block: int
) -> None:
    """Turn the gradients of weights into those of scores, in place."""
    B, T, S = weights_BTS.shape
    padded = triton.next_power_of_2(S)
    softmax_backward_kernel[(B * T,)](
        *(gradients_BTS, weights_BTS, T, S, scale),
        CAUSAL=causal,
        BLOCK=block,
        S=padded,
        UPCAST=INTERPRETED,
        num_warps=warps(padded),
    )


def warps(padded: int) -> int:
    """Return the warps of a row: 16 numbers in each thread, as far as that goes."""
    return min(max(padded // 512, 1), 16)
